"""Workloads of a directory that is repartitioned into stores of other kinds, with all that is hard to move: large
bodies, messages that wait for their time or have come back, keyed values, and a prepared transaction.

What is there is told by one mark before it begins, so that nothing but the repartition is checked: whatever a power
failure leaves, a router that opens shows all of it, or refuses; the same command, run again, moves the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import anabranch
from anabranch.adapters.core.migration import copying
from anabranch.policies.errors import PlacementError
from anabranch.router.offline.repartition import repartition
from anabranch.router.placement.on_disk.repartition_progress import NAME

from ..ledger import Marks, body_of, contents, identity_of, violations
from .waiting import FAR, HOUR, Clock, states_of
from .worker import SEGMENT, Workload

LARGE: Final = 1024
PAGE: Final = 4
"""Messages that are copied at once."""
XID: Final = anabranch.Xid(1, "moved")
Fact = list[Any]
"""A message's queue, id, until when it waits, and how often it was delivered; or a map and the id of a value."""


def _config(directory: Path, *stores: tuple[str, str, str]) -> anabranch.Config:
    """Stores of a name, a pattern and a kind."""
    journal = anabranch.JournalOptions(segment_size=SEGMENT, large_message_size=LARGE)
    options: dict[str, Any] = {
        "journal": journal,
        "sql": anabranch.SqlOptions(large_message_size=LARGE, chunk_size=LARGE),
    }
    return anabranch.Config(
        directory, [anabranch.StoreConfig(name, [match], **{kind: options[kind]}) for name, match, kind in stores]
    )


def before(directory: Path, options: dict[str, Any]) -> anabranch.Config:
    return _config(directory, ("all", ">", options["of"]))


def after(directory: Path, options: dict[str, Any]) -> anabranch.Config:
    one, other = options["to"]
    return _config(directory, ("a", "queue://a", one), ("topics", "topic://>", other), ("rest", ">", one))


def run(directory: Path, workload: Workload) -> None:
    marks = Marks()
    with Clock().stopped(), patch.object(copying, "PAGE", PAGE):
        with anabranch.open(before(directory, workload.options)) as router:
            fill(router)
            prepared = prepare(router)
            facts = facts_of(router)
        marks.write("FILLED", {"facts": facts, "prepared": prepared})
        repartition(after(directory, workload.options))
    marks.write("MOVED", {})


def fill(router: anabranch.Router) -> None:
    """Each sort of message, with some that have come back."""
    topic = router.topic("t")
    for name in ("quick", "slow"):
        topic.subscribe(name)
    a, b = router.queue("a"), router.queue("b")
    for number in range(18):
        identity = f"m.{number}"
        wait = (None, HOUR / 1000, FAR / 1000)[number // 3 % 3]
        target: Any = (a, b, topic)[number % 3]
        body = body_of(identity, 100 if number % 4 else 2500)
        target.send(body if number % 4 else BytesIO(body), deliver_in=wait, message_id=identity)
    for source in (a, b, topic.subscriptions()[0]):
        for delay in (None, 5000.0):
            if (message := source.receive()) is not None:
                message.release(delay=delay)
    values = router.map("m")
    for number in range(6):
        values.put(f"k{number % 4}", body_of(f"v.{number}", 200), ttl=1e6 if number % 2 else None)


def prepare(router: anabranch.Router) -> dict[str, list[Fact]]:
    """A transaction that acks and sends in what moves; what its commit does."""
    tx = router.transaction(XID)
    acked: list[Fact] = []
    for name, source in ("a", router.queue("a")), ("t/slow", router.topic("t").subscriptions()[1]):
        message = source.receive()
        assert message is not None, name
        tx.ack(message)
        acked.append([name, identity_of(message.read())])
    tx.send("a", body_of("p.0", 3000))  # large ones have to be told their outcome before
    tx.send("topic://t", body_of("p.1", 100), deliver_in=FAR / 1000)
    tx.put("m", "k0", body_of("v.9", 300))
    tx.prepare()
    sent = [["a", "p.0"], ["t/quick", "p.1"], ["t/slow", "p.1"], ["=m", "v.9"]]
    return {"acked": [*acked, ["=m", "v.4"]], "sent": sent}


def facts_of(router: anabranch.Router) -> list[Fact]:
    """What a router shows."""
    states = [[name, identity, *state] for (name, identity), state in states_of(router).items()]
    values = [[name, identity] for name, ids in contents(router).items() if name[0] == "=" for identity in ids]
    return sorted(states, key=lambda fact: str(fact[0])) + values  # of one queue in its order


def check(directory: Path, workload: Workload, marks: dict[str, Any]) -> list[str]:
    """What is wrong with what was left, and with what the next repartition makes of it."""
    filled = [line.partition(" ")[2] for line, _ in marks["marks"] if line.startswith("FILLED")]
    if not filled:
        return []  # nothing has begun to move
    known = json.loads(filled[0])
    old, new = (make(directory, workload.options) for make in (before, after))
    with Clock().stopped(), patch.object(copying, "PAGE", PAGE):
        wrong = shown(old, known["facts"]) + shown(new, known["facts"])
        repartition(new, old)
        with anabranch.open(new) as router:
            wrong += done(router, known["facts"], known["prepared"])
    stores = {path.name for path in (directory / "stores").iterdir()}
    if stores != {"a", "rest", "topics"} or (directory / NAME).exists():
        wrong.append(f"there are the stores {stores}, and {[path.name for path in directory.iterdir()]}")
    return wrong


def shown(setup: anabranch.Config, facts: Sequence[Fact]) -> list[str]:
    """All, if it opens."""
    try:
        with anabranch.open(setup) as router:
            if (found := facts_of(router)) != facts:
                return [f"{[store.name for store in setup.stores]} show {found}, not {facts}"]
            return violations(router)
    except PlacementError:
        return []


def done(router: anabranch.Router, facts: Sequence[Fact], prepared: dict[str, list[Fact]]) -> list[str]:
    """What is wrong in the end: with all that is there, with what is known of ids, with the outcome of what waited."""
    found = facts_of(router)
    wrong = [f"moved, it shows {found}, not {facts}"] if found != facts else []
    for name, identity in ("a", "m.0"), ("b", "m.16"):
        if not router.queue(name).send(b"", message_id=identity).duplicate:
            wrong.append(f"the duplicate window of {name} has lost {identity}")
    router.commit(XID)
    pairs = [fact[:2] for fact in facts if fact[:2] not in prepared["acked"]] + prepared["sent"]
    if sorted(fact[:2] for fact in facts_of(router)) != sorted(pairs):
        wrong.append(f"committed, it shows {facts_of(router)}, not {pairs}")
    if router.recover() or router.in_doubt():
        wrong.append(f"in doubt: {router.in_doubt()}")
    return wrong + violations(router)


MOVED: Final = {
    f"moved-from-{of}": Workload(run, {"of": of, "to": to}, setup=before, check=check)
    for of, to in (("journal", ("sql", "journal")), ("sql", ("journal", "sql")))
}
