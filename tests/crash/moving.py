"""A directory is repartitioned from one journal store into three; every call of it is spoiled, and every power failure.

    python -m tests.crash.moving --kind crash        the process ends before call number k; it is run again
    python -m tests.crash.moving --kind power        every directory that a disk may hold at any point
    python -m tests.crash.moving --joined --kind crash     a store for each destination becomes one for all: they are
                                                           put aside first (router/placement/changed_kinds.py)

Whatever happens, no router opens the directory that would not show all of it; the same command, run again, moves the
rest; and in the end everything is there once, in order, with all that was known of it, and nothing else is left.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import anabranch
from anabranch.adapters.core.migration import copying
from anabranch.policies.errors import AnabranchError, PlacementError
from anabranch.router.offline.repartition import repartition
from anabranch.router.placement.on_disk.in_force import read_in_force

from ..places import in_memory
from ..taking import take
from .calls import Crash, Faults, Jobs, simulated
from .disk import Recorder, State, states
from .ledger import violations
from .power.waiting import until_of
from .spoiling import POWER, Campaign, of_arguments, parser, require_recorded, without_power

JOURNAL: Final = anabranch.JournalOptions(segment_size=64 * 1024)
PAGE: Final = 4
"""Messages that are copied at once, so that each destination takes several pages."""
Facts = dict[str, list[Any]]
XID: Final = anabranch.Xid(1, "moving", "b")
"""Prepared before, committed in the end."""
ACKED: Final = {"queue://a": b"1", "queue://b": b"2", "topic://t second": b"4"}
SENT: Final = {"queue://a": b"x", "topic://t": b"x", "queue://new": b"x"}


def _config(directory: Path, *stores: tuple[str, str]) -> anabranch.Config:
    return anabranch.Config(
        directory, [anabranch.StoreConfig(name, [match], journal=JOURNAL) for name, match in stores]
    )


joined = False
"""What is moved: see above."""


def before(directory: Path) -> anabranch.Config:
    if joined:
        return anabranch.Config(directory, [anabranch.StoreConfig("s", [">"], per_destination=True, journal=JOURNAL)])
    return _config(directory, ("all", ">"))


def after(directory: Path) -> anabranch.Config:
    if joined:
        return _config(directory, ("s", ">"))
    return _config(directory, ("a", "queue://a"), ("topics", "topic://>"), ("rest", ">"))


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    with mock.patch.object(copying, "PAGE", PAGE):
        yield


def fill(directory: Path, prepared: bool = True) -> Facts:
    """Some of everything, and a prepared transaction; returns what is there."""
    with anabranch.open(before(directory)) as router:
        for name, count in ("a", 10), ("b", 3):
            queue = router.queue(name)
            for number in range(count):
                queue.send(b"%d" % number, {"n": number}, f"{name}-{number}")
            for give_back in (False, True):
                message = take(queue)
                message.release() if give_back else message.ack()
        topic = router.topic("t")
        first = topic.subscribe("first")
        for number in range(3):
            topic.send(b"%d" % number)
        second = topic.subscribe("second", client_id="c")
        for number in range(3, 6):
            topic.send(b"%d" % number, message_id=f"t-{number}")
        for subscriber in (first, first, second):
            message = take(subscriber)
            message.ack()
        router.topic("idle").subscribe("nothing")
        for endpoint in (router.queue("a"), topic):  # they come to lie in pages of their own
            for number in range(PAGE):
                endpoint.send(b"later %d" % number, deliver_in=1e6)
        message = take(router.queue("b"))
        message.release(delay=1e6)
        if prepared:
            prepare(router, second)
        return facts_of(router)


def prepare(router: anabranch.Router, second: anabranch.Subscriber) -> None:
    """A transaction that acks and sends in what moves, and waits for its manager."""
    transaction = router.transaction(XID)
    for receiver in (router.queue("a"), router.queue("b"), second):
        message = take(receiver)
        transaction.ack(message)
    for name in SENT:
        transaction.send(name, b"x", message_id="prepared")
    transaction.prepare()


def facts_of(router: anabranch.Router) -> Facts:
    """What an open router shows."""

    def of(messages: Any) -> list[Any]:
        return [(m.body, m.headers, m.message_id, m.timestamp_ms, m.deliveries, until_of(router, m)) for m in messages]

    found: Facts = {str(d): of(router.queue(d).browse()) for d in router.destinations() if str(d)[0] == "q"}
    for known in router.subscriptions():
        store = router._registry.store_for(known.topic)
        found[f"{known.topic} {known.name}"] = of(store.browse(known.topic, subscription=known.key))
    return found


def bodies(facts: Facts) -> Facts:
    return {name: [fact[0] for fact in found] for name, found in facts.items() if found}


def committed(expected: Facts) -> Facts:
    """What the outcome of the prepared transaction makes of them."""
    found = bodies(expected) | {"queue://new": []}
    for name, body in ACKED.items():
        found[name] = [one for one in found[name] if one != body]
    for name, body in SENT.items():
        for key in found:
            if key == name or key.startswith(f"{name} "):
                found[key] = [*found[key], body]
    return found


def shown(settings: anabranch.Config, expected: Facts) -> list[str]:
    """What a router shows, if it opens: all."""
    try:
        with anabranch.open(settings) as router:
            if facts_of(router) != expected:
                return [f"{[s.name for s in settings.stores]} show {facts_of(router)}, not {expected}"]
            return violations(router)
    except PlacementError:
        return []


def gone_on_with(directory: Path, expected: Facts) -> list[str]:
    """What is wrong with what an interrupted run has left, and with what the next one makes of it."""
    read_in_force(directory)  # whole, or not there
    wrong = shown(before(directory), expected) + shown(after(directory), expected)
    repartition(after(directory))
    return wrong + done(directory, expected)


def done(directory: Path, expected: Facts) -> list[str]:
    """What is wrong at the end."""
    wrong = []
    with anabranch.open(after(directory)) as router:
        if (found := facts_of(router)) != expected:
            wrong.append(f"found {found}, not {expected}")
        for name, identity in ("a", "a-0"), ("a", "a-9"), ("b", "b-0"):
            if not router.queue(name).send(b"", message_id=identity).duplicate:
                wrong.append(f"the duplicate window of {name} has lost {identity}")
        router.commit(XID)
        if (found := bodies(facts_of(router))) != (due := committed(expected)):
            wrong.append(f"committed: found {found}, not {due}")
        wrong += violations(router)
    left = {path.name for path in directory.iterdir() if path.name != "decisions"}
    if left != {"in-force.yaml", "placement.records", "router.lock", "stores"}:
        wrong.append(f"{left} are in the directory")
    if read_in_force(directory) != after(directory):
        wrong.append(f"in force is {read_in_force(directory)}")
    stores = {path.name for path in (directory / "stores").iterdir()}
    if stores != {store.name for store in after(directory).stores}:
        wrong.append(f"there are the stores {stores}")
    return wrong


# A call fails, or is the last one


def trial(base: Path, template: Path, expected: Facts, kind: str, at: int) -> tuple[Faults, list[str]]:
    """Move with call number `at` spoilt; what is wrong."""
    faults = Faults(base, kind, at)
    move = partial(repartition, after(base / "data"))
    return faults, spoiled(base, template, faults, move, partial(gone_on_with, expected=expected))


def spoiled(
    base: Path, template: Path, faults: Faults, move: Callable[[], object], look: Callable[[Path], list[str]]
) -> list[str]:
    """Move a copy of a directory with a call spoilt; what is wrong with what is left."""
    directory, killed = base / "data", base / "killed" / "data"
    shutil.copytree(template, directory)
    jobs, wrong, what = Jobs(), list[str](), f"{faults.kind} {faults.at}"
    try:
        with simulated(jobs, what), small_pages():
            with faults.patched():
                try:
                    move()
                except Crash:
                    pass
                except AnabranchError:
                    if not faults.kind:
                        raise
                if not faults.dead:
                    faults.on = False
                    wrong += look(directory)
                faults.dead = True  # what the abandoned objects still try to do does not reach the disk
            if faults.hit and faults.kind == "crash":
                shutil.copytree(directory, killed)
            wrong += jobs.raised
        if killed.exists():
            jobs = Jobs()
            with simulated(jobs, f"after {what}"), small_pages():
                wrong += look(killed) + jobs.raised
    finally:
        gc.collect()  # closes their files
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(killed, ignore_errors=True)
    return [f"{faults.kind} at {faults.at}, {faults.hit}: {line}" for line in wrong]


# The power fails


@dataclass
class Recording:
    """All calls, those that made the directory too, which is whole from call `begin` on."""

    recorder: Recorder
    begin: int
    expected: Facts


def record(base: Path) -> Recording:
    directory = base / "data"
    recorder, jobs = Recorder(base), Jobs()
    faults = Faults(base, watch=recorder.watch)
    with simulated(jobs, "power"), small_pages(), faults.patched():
        expected = fill(directory)
        begin = recorder.now()
        repartition(after(directory))
        faults.dead = True
    require_recorded(base, recorder)
    return Recording(recorder, begin, expected)


def distinct(recorder: Recorder, begin: int) -> list[State]:
    """Each state once, of those from the first call of the repartition on."""
    found: dict[tuple[int, tuple[int, str] | None], State] = {}
    for state in states(recorder.calls):
        if state.point >= begin:
            found[state.kept, state.torn] = state
    return list(found.values())


# Campaigns


def spoil(campaign: Campaign) -> int:
    """Every call, every kind, or a share of them; how many trials went wrong."""
    with tempfile.TemporaryDirectory(prefix="moving-", dir=in_memory()) as place:
        base = Path(place)
        expected = fill(base / "template" / "data")
        template = base / "template" / "data"
        gc.collect()
        gc.freeze()  # each trial collects what it made, and nothing else
        faults, wrong = trial(base, template, expected, "", 0)
        campaign.begin(faults.log, wrong)
        spoiled = partial(trial, base, template, expected)
        campaign.spoil(faults.log, lambda kind, at: spoiled(kind, at)[1], base)
        if POWER in campaign.kinds:
            _power(base, campaign)
    return campaign.bad


def _power(base: Path, campaign: Campaign) -> None:
    recording = record(base)
    found = distinct(recording.recorder, recording.begin)

    def look(directory: Path, jobs: Jobs) -> list[str]:
        return gone_on_with(directory, recording.expected) + jobs.raised

    checked = campaign.lose_power(
        found, lambda state: without_power(base, recording.recorder, state, small_pages, look)
    )
    points = recording.recorder.now() - recording.begin
    campaign.report(f"power: {points} points, {len(found)} distinct states, {checked} checked, {campaign.bad} wrong")


def main() -> int:
    global joined
    logging.disable()  # records would hold stores and their files
    arguments = parser("Spoil every call of a repartition.", POWER)
    arguments.add_argument("--joined", action="store_true", help="make one store of one for each destination")
    given = arguments.parse_args()
    joined = given.joined
    return 1 if spoil(of_arguments(given, POWER)) else 0


if __name__ == "__main__":
    sys.exit(main())
