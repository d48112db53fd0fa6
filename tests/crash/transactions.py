"""Transactions over 2 to 4 stores: every call is the last one, or fails, and every state that a power failure leaves.

    python -m tests.crash.transactions [--stores N] [--kind K] [--only CALL] [--backward] [--share 1/10] [--seconds 60]

Kinds: those of faults.py (`eio`, `enospc`, `short`, `crash`), and `power`, which needs no call to fail: the program
runs once, and the directories are built that a power failure could have left at each of its calls (disk.py).
`--backward` lets the stores of a transaction prepare in the opposite order.

What has to hold (invariants 1 to 4 and 7, rules T2 to T5): a transaction is in all its stores or in none; what its
caller was told stands; an external one waits until told; queues keep their order, nothing is there twice; only one
store fails, the others work on, and no sync is tried again; in the end nothing is in doubt and no decision is left.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import anabranch
from anabranch.adapters.core.store_types import Pending
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.wal import format as w
from anabranch.router.transactions import decision_log
from anabranch.router.transactions.decision_log import Decision, DecisionLog, External

from ..garbage import set_aside
from .calls import Crash, Faults, Jobs, simulated
from .disk import Levels, Recorder, State, states
from .ledger import body_of, contents, violations
from .programs import DONE, LAST, UNDONE, Script, Step, configured, scripted, stores_of
from .spoiling import POWER, Campaign, of_arguments, parser, require_recorded, without_power

DECISIONS_BYTES: Final = w.HEADER_BYTES + 1024
"""Of a segment of the decision log: small, so that it rolls over every few decisions."""


@contextlib.contextmanager
def small_decision_log() -> Iterator[None]:
    """Smaller than options may ask for."""
    with (
        mock.patch.object(decision_log, "SEGMENT_BYTES", DECISIONS_BYTES),
    ):
        yield


# What is found


def externals_of(router: anabranch.Router) -> set[str]:
    return {str(xid) for xid in router.recover()}


def in_doubt(router: anabranch.Router) -> list[str]:
    """What waits for something else than its transaction manager."""
    return [f"in doubt: {found}" for found in router.in_doubt() if found.xid is None or found.outcome is not None]


def receivable(router: anabranch.Router, found: dict[str, list[str]], claimed: set[tuple[str, str]]) -> list[str]:
    """Everything can be received, in order, but what a prepared transaction has claimed."""
    wrong = []
    for queue, ids in found.items():
        target = router.queue(queue)
        received = []
        while (message := target.receive()) is not None:
            received.append(message)
        got = [message.body.split(b"|", 1)[0].decode() for message in received]
        wanted = [identity for identity in ids if (queue, identity) not in claimed]
        if got != wanted:
            wrong.append(f"{queue} gives {got}, not {wanted}")
        for message in received:
            message.release()
    return wrong


def probe(router: anabranch.Router, names: Sequence[str], number: int) -> list[str]:
    """A transaction over these stores works."""
    body = body_of(f"p.{number}")
    try:
        with router.transaction() as tx:
            for store in names:
                tx.send(f"{store}.probe", body)
        for store in names:
            message = router.queue(f"{store}.probe").receive()
            if message is None or message.body != body:
                return [f"a transaction over {names} left {message} in {store}"]
            message.ack()
    except anabranch.AnabranchError as error:
        return [f"a transaction over {names} fails: {type(error).__name__}: {error}"]
    return []


def looked_at(router: anabranch.Router, script: Script, moment: int = LAST, power: bool = False) -> list[str]:
    """What is wrong in an open router, whose stores are all well."""
    wrong = in_doubt(router)
    found, externals = contents(router), externals_of(router)
    wrong += script.account.judge(found, externals, moment, power)
    claimed = {pair for entry in script.account.entries if entry.xid in externals for pair in entry.acks}
    if not script.passed_over:
        wrong += receivable(router, found, claimed)
    return wrong + violations(router)


def decisions_left(router: anabranch.Router, jobs: Jobs) -> list[str]:
    """Decisions that nobody needs any more are forgotten (rule T5)."""
    jobs.run()
    return [f"never forgotten: {said}" for said in router._coordinator.log.decisions.values()]


def left(directory: Path, script: Script, jobs: Jobs, moment: int = LAST, power: bool = False) -> list[str]:
    """What a new process finds; what the next one finds without the indexes; that externals can still be told."""
    config = configured(directory, script.stores)
    script.passed_over = False
    with anabranch.open(config) as router:
        wrong = looked_at(router, script, moment, power)
        found, externals = contents(router), externals_of(router)
        wrong += decisions_left(router, jobs)
    for index in directory.rglob("index.mdb"):
        index.unlink()
    with anabranch.open(config) as router:
        again = (contents(router), externals_of(router))
        if again != (found, externals):
            wrong.append(f"opened again without its indexes it holds {again}, before {(found, externals)}")
        wrong += in_doubt(router) + violations(router)
        wrong += told(router, script, externals, moment, power)
        wrong += probe(router, [store.name for store in stores_of(router)], 1) + decisions_left(router, jobs)
    return wrong + jobs.raised


def told(router: anabranch.Router, script: Script, externals: set[str], moment: int, power: bool) -> list[str]:
    """Externals that waited get their outcome: one is committed, the next rolled back."""
    kept = [(entry, list(entry.history), entry.told) for entry in script.account.entries]
    for number, xid in enumerate(router.recover()):
        commit = number % 2 == 0
        (router.commit if commit else router.rollback)(xid)
        for entry in script.account.entries:
            if entry.xid == str(xid):
                entry.history = [(0, frozenset({DONE if commit else UNDONE}))]
                entry.told = LAST + number
    wrong = script.account.judge(contents(router), externals_of(router), moment, power) if externals else []
    for entry, history, when in kept:  # another state of the same run is judged with them
        entry.history, entry.told = history, when
    return wrong


# A call fails, or is the last one


def trial(
    base: Path, program: Sequence[Step], stores: int, kind: str, at: int, backward: bool = False
) -> tuple[Faults, list[str]]:
    """Run the program with call number `at` spoilt; what is wrong, while it runs and in what it leaves."""
    directory, killed = base / "data", base / "killed" / "data"
    faults, jobs = Faults(base, kind, at), Jobs(backward)
    try:
        with simulated(jobs, f"{kind} {at}"), small_decision_log():
            script = Script(directory, stores, jobs, hit=lambda: faults.hit)
            with faults.patched():
                with contextlib.suppress(Crash):
                    script.run(program)
                wrong = script.wrong
                if not faults.dead:
                    faults.on = False
                    wrong += behaviour(script, faults)
                faults.dead = True  # what the abandoned objects still try to do does not reach the disk
            if directory.exists():
                shutil.copytree(directory, killed)
            script.router = None
            wrong += jobs.raised
        jobs = Jobs()
        with simulated(jobs, f"after {kind} {at}"), small_decision_log():
            wrong += left(killed, script, jobs)
    finally:
        gc.collect()  # closes their files
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(killed, ignore_errors=True)
    return faults, [f"{kind} at {at}, {faults.hit}: {line}" for line in wrong]


def behaviour(script: Script, faults: Faults) -> list[str]:
    """The fault is over. A failed store stays failed, the others work, all is well once it is opened again."""
    for entry in script.account.entries:
        entry.loose = entry.loose or entry.interrupted  # told again when its store can do it, maybe after others
    wrong = [f"sync of {target} was tried again after it had failed" for target in faults.retried]
    if script.router is None:
        script.open()
    router = script.open_router
    router.in_doubt()  # opens them all
    names = [store.name for store in stores_of(router)]
    failed = [store.name for store in stores_of(router) if store.stats().failed]
    undecided = router._coordinator.log.failed is not None
    if len(failed) + undecided > 1:
        wrong.append(f"failed: {failed}{' and the decision log' if undecided else ''}")
    well = [name for name in names if name not in failed]
    for name in names:
        one = probe(router, [name], 2)
        if name in well and one:
            wrong += one
        if name not in well and not any("StoreFailedError" in line for line in one):
            wrong.append(f"failed store {name} says {one}")
    if len(well) > 1:
        several = probe(router, well, 3)
        if several and not undecided:
            wrong += several
        if undecided and not any("StoreFailedError" in line for line in several):
            wrong.append(f"without a decision log {well} say {several}")
    for name in failed:
        script.attempt("reopen", partial(router.reopen, name))
    if undecided:
        script.attempt("reopen_decisions", router.reopen_decisions)
    for message in script.leased:
        with contextlib.suppress(anabranch.AnabranchError):
            message.release()
    for _ in range(3):
        script.jobs.run()
    wrong += looked_at(router, script)
    if len(names) > 1:
        wrong += probe(router, names, 4)
    return wrong


# Power failures


@dataclass
class Recording:
    """A program that ran, and all its calls."""

    script: Script
    recorder: Recorder
    levels: list[Levels] = field(default_factory=list)


def record(base: Path, program: Sequence[Step], stores: int, backward: bool = False) -> Recording:
    """Run the program; check that its calls make the directory that it left."""
    directory = base / "data"
    faults, jobs, recorder = Faults(base), Jobs(backward), Recorder(base)
    faults.watch = recorder.watch
    with simulated(jobs, "record"), small_decision_log(), contextlib.ExitStack() as stack:
        script = Script(directory, stores, jobs, now=recorder.now)
        recording = Recording(script, recorder)
        began: dict[bytes, int] = {}
        prepare = JournalStore.prepare

        def preparing(self: JournalStore, transaction: bytes, *arguments: Any) -> Pending[None]:
            began.setdefault(transaction, recorder.now())
            return prepare(self, transaction, *arguments)

        stack.enter_context(mock.patch.object(JournalStore, "prepare", preparing))
        for method in ("decide", "hold"):
            stack.enter_context(_watched(method, began, recording))
        with faults.patched():
            script.run(program)
            faults.dead = True
        if script.errors or script.wrong or jobs.raised:
            raise AssertionError(f"without faults: {script.errors + script.wrong + jobs.raised}")
        script.router = None
    require_recorded(base, recorder)
    return recording


def _watched(method: str, began: dict[bytes, int], recording: Recording) -> Any:
    """What the decision log is told ends the stores' preparing."""
    real = getattr(DecisionLog, method)

    def told(self: DecisionLog, said: Decision | External, *still: Any) -> Any:
        first = began.pop(said.transaction, None)
        if first is not None:
            recording.levels.append(Levels(first, recording.recorder.now()))
        return real(self, said, *still)

    return mock.patch.object(DecisionLog, method, told)


def distinct(recording: Recording) -> tuple[int, list[State]]:
    """How many states there are, and those that differ: each at the last point at which it may be found, by when the
    most was promised."""
    found: dict[tuple[int, tuple[int, str] | None], State] = {}
    number = 0
    for state in states(recording.recorder.calls, recording.levels):
        number += 1
        known = found.get((state.kept, state.torn))
        if known is None or known.point <= state.point:
            found[state.kept, state.torn] = state
    return number, list(found.values())


def power_trial(base: Path, recording: Recording, state: State) -> list[str]:
    """What is wrong in the directory of one state."""
    return without_power(
        base, recording.recorder, state, small_decision_log,
        lambda directory, jobs: left(directory, recording.script, jobs, state.point, power=True),
    )  # fmt: skip


# Campaigns


def scratch() -> Any:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # what is simulated needs no disk
    return tempfile.TemporaryDirectory(prefix="transactions-", dir=memory)


def spoil(stores: int, campaign: Campaign, backward: bool = False) -> int:
    """Every call, every kind, or a share of them; how many trials went wrong."""
    program = scripted(stores)
    campaign.name = f"{stores} stores, "
    with scratch() as place:
        base = Path(place)
        set_aside()  # each trial collects what it made, and nothing else
        faults, wrong = trial(base, program, stores, "", 0, backward)
        calls = faults.log[: faults.count]
        campaign.begin(calls, wrong)
        campaign.spoil(calls, lambda kind, at: trial(base, program, stores, kind, at, backward)[1], base)
        if POWER in campaign.kinds and campaign.bad < campaign.enough:
            _power(base, program, stores, campaign, backward)
    return campaign.bad


def _power(base: Path, program: Sequence[Step], stores: int, campaign: Campaign, backward: bool) -> None:
    recording = record(base, program, stores, backward)
    number, different = distinct(recording)
    checked = campaign.lose_power(different, lambda state: power_trial(base, recording, state))
    campaign.report(
        f"{stores} stores, power: {recording.recorder.now()} points, {number} states, {len(different)} distinct, "
        f"{checked} checked, {campaign.bad} wrong"
    )


def main() -> int:
    options = parser("Spoil every call of transactions over several stores.", POWER)
    options.add_argument("--stores", type=int, choices=(2, 3, 4), action="append")
    options.add_argument("--backward", action="store_true", help="stores prepare in the opposite order")
    given = options.parse_args()
    bad = sum(spoil(stores, of_arguments(given, POWER), given.backward) for stores in given.stores or (2, 3, 4))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
