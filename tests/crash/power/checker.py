"""Is the directory right? Opened, compared with what was promised, walked by check(), opened without its indexes.

python -m tests.crash.power.checker NAME DIR MARKS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anabranch

from .. import mixed
from ..ledger import (
    Contents,
    Held,
    Operation,
    Prefix,
    acks_of,
    body_of,
    compare,
    contents,
    identity_of,
    nothing_else_waits,
    sends_of,
    source,
    violations,
)
from .waiting import END_MS, Clock, states_of
from .waiting import compare as compare_waiting
from .worker import Workload, config
from .workloads import WORKLOADS

PROBE = "probe"


def verdict(name: str, directory: Path, marks: dict[str, Any]) -> list[str]:
    """What is wrong; empty if nothing is. Raises whatever opening raises, which is wrong too."""
    workload = WORKLOADS[name]
    if workload.check is not None:
        return workload.check(directory, workload, marks)
    setup = workload.setup(directory, workload.options)
    if workload.setup is not config:
        return _of_kinds(setup, marks)
    if workload.waits:
        clock = Clock()
        with clock.stopped():
            wrong = _waiting(setup, marks, clock)
            clock.ms = END_MS
            return wrong or _of_one_kind(workload, setup, marks)
    return _of_one_kind(workload, setup, marks)


def _waiting(setup: anabranch.Config, marks: dict[str, Any], clock: Clock) -> list[str]:
    """What waits still does, until the same time; what was due once stays so when the clock is put back."""
    with anabranch.open(setup) as router:
        found = contents(router)
        wrong = compare_waiting(router, found, marks["marks"]) + violations(router)
        states = states_of(router)
    _without_index(setup)
    with anabranch.open(setup) as router:
        if states_of(router) != states:
            wrong.append(f"without its index it waits otherwise: {states_of(router)}, with it {states}")
        begun, clock.ms = clock.ms, END_MS
        for name in found:
            if (message := source(router, name).receive()) is not None:
                message.release(delivered=False)
        states = {pair: (0, times) for pair, (_, times) in states.items()}
        clock.ms = begun
        if states_of(router) != states:
            wrong.append(f"it was due once, and waits: {states_of(router)}")
    _without_index(setup)
    with anabranch.open(setup) as router:
        if states_of(router) != states:
            wrong.append(f"it was due before, and waits: {states_of(router)}")
        return wrong + violations(router)


def _without_index(setup: anabranch.Config) -> None:
    for index in setup.directory.rglob("index.mdb"):
        index.unlink()


def _of_one_kind(workload: Workload, setup: anabranch.Config, marks: dict[str, Any]) -> list[str]:
    held = Held.of(line for line, _ in marks["marks"])
    with anabranch.open(setup) as router:
        found = contents(router)
        wrong = _compare(workload, found, marks) + violations(router)
        waiting = {xid.global_id for xid in router.recover()}
        wrong += held.compare(waiting, found) + nothing_else_waits(router)
        if wrong:
            return wrong
        wrong += _receivable(router, found, held.claimed(waiting))
        router.queue(PROBE).send(body_of("p.0"))
    _without_index(setup)
    found = {**found, PROBE: ["p.0"]}
    with anabranch.open(setup) as router:
        again = contents(router)
        if again != found:
            wrong.append(f"without its index it holds {again}, with it {found}")
        if waiting != {xid.global_id for xid in router.recover()}:
            wrong.append(f"without its index {router.recover()} wait, with it {waiting}")
        wrong += nothing_else_waits(router) + violations(router)
        if waiting and not wrong:
            wrong += _receivable(router, found, held.claimed(waiting)) + _end(router, held, found)
            found = contents(router)
    if waiting and not wrong:
        with anabranch.open(setup) as router:
            if contents(router) != found or router.recover():
                wrong.append("opened once more after all had ended, it holds something else")
            wrong += nothing_else_waits(router) + violations(router)
    return wrong


def _of_kinds(setup: anabranch.Config, marks: dict[str, Any]) -> list[str]:
    held = Held.of(line for line, _ in marks["marks"])
    for _ in range(2):
        with anabranch.open(setup) as router:
            wrong = mixed.verify(router, marks["promised"], marks["maybe"], held, power=True)
            if wrong:
                return wrong
            for store in setup.stores:  # it works
                probe = router.queue(f"{store.name}.{PROBE}")
                probe.send(body_of("p.0"))
                probe.purge()
        _without_index(setup)
    return []


def _receivable(router: anabranch.Router, found: Contents, claimed: set[tuple[str, str]]) -> list[str]:
    """All but what is claimed can be received, in order (rule X6); it is given back."""
    wrong = []
    for name, ids in found.items():
        if name.startswith("="):
            continue  # nothing is received from a map
        queue, taken = source(router, name), []
        while (message := queue.receive()) is not None:
            taken.append(message)
        if [identity_of(message.read()) for message in taken] != [i for i in ids if (name, i) not in claimed]:
            wrong.append(f"{len(taken)} messages of {name} can be received, not all that are free of {ids}")
        for message in taken:
            message.release(delay=0)
    return wrong


def _end(router: anabranch.Router, held: Held, found: Contents) -> list[str]:
    """Say the outcomes of all that wait; every other is committed."""
    wanted = {(queue, identity) for queue, ids in found.items() for identity in ids}
    for number, xid in enumerate(router.recover()):
        if number % 2:
            router.rollback(xid)
            continue
        operation = {**held.prepares[xid.global_id], "op": "tx"}
        router.commit(xid)
        wanted |= set(sends_of(operation))
        wanted -= set(acks_of(operation))
    after = contents(router)
    got = {(queue, identity) for queue, ids in after.items() for identity in ids}
    wrong = [f"ended, and wrong: {sorted(got ^ wanted)}"] if got != wanted else []
    wrong += _receivable(router, after, set()) + violations(router)
    return wrong + [f"still in doubt: {known}" for known in router.in_doubt()]


def _compare(workload: Workload, found: Contents, marks: dict[str, Any]) -> list[str]:
    if not workload.prefix:
        return compare(found, marks["promised"], marks["maybe"])
    operations: list[Operation] = []
    floor = 0
    for line, _ in marks["marks"]:
        word, _, text = line.partition(" ")
        if word == "TRY":
            operations.append(json.loads(text))
        else:
            floor = len(operations)
    return Prefix(operations, floor).compare(found)


def judge(arguments: list[str]) -> list[str]:
    """The same, of the command line's NAME, DIR and MARKS."""
    name, directory, marks = arguments
    return verdict(name, Path(directory), json.loads(Path(marks).read_text()))


def main(arguments: list[str]) -> int:
    wrong = judge(arguments)
    print("; ".join(wrong[:5]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
