"""Programs of transactions over several stores, and the account of what each step was promised.

A program is a list of steps. Store n's queues are `sN.q` and `sN.r`; policies go round: always, periodic, never. The
account knows at every moment which outcomes a transaction may have, and says whether what is found can be right.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, TypeVar
from unittest import mock

import anabranch
from anabranch.adapters.core.store_types import Pending
from anabranch.adapters.journal import JournalStore
from anabranch.router.transactions.decision_log import Decision, DecisionLog

from .calls import Crash, Jobs
from .ledger import body_of, identity_of, name

DONE: Final = "done"
UNDONE: Final = "undone"
HELD: Final = "held"
T = TypeVar("T")
Pair = tuple[str, str]
"""Queue and message."""
LAST: Final = 1 << 60
"""A moment after all others."""

POLICIES: Final = ("always", "periodic", "never")


# Steps


@dataclass(frozen=True)
class Tx:
    """A transaction: so many sends to and acks from each of the stores."""

    stores: tuple[int, ...]
    sends: int = 1
    acks: int = 0
    size: int = 100
    commit: bool = True


@dataclass(frozen=True)
class Xa:
    """An external one, prepared."""

    name: str
    """A transaction of that name may have been prepared before: it is no longer spoken of."""
    stores: tuple[int, ...]
    sends: int = 1
    acks: int = 0
    size: int = 100


@dataclass(frozen=True)
class Tell:
    """Its outcome."""

    name: str
    commit: bool


@dataclass(frozen=True)
class Send:
    store: int
    size: int = 100


@dataclass(frozen=True)
class Ack:
    store: int


@dataclass(frozen=True)
class Do:
    """jobs, checkpoint, reclaim, or reopen: close and open again."""

    what: str


POINTS: Final = ("prepared", "decided", "half")


@dataclass(frozen=True)
class Die:
    """A transaction in which the process is gone: once it is prepared everywhere, decided, or carried out in the first
    store. Another one opens the directory."""

    stores: tuple[int, ...]
    point: str
    sends: int = 1
    acks: int = 1
    size: int = 100


Step = Die | Tx | Xa | Tell | Send | Ack | Do


def scripted(stores: int) -> list[Step]:
    """All that a transaction can meet: roll-overs, checkpoints, forgetting, a restart; the stores in changing sets."""
    every = tuple(range(stores))
    steps: list[Step] = []
    for _ in range(2):
        steps += [Send(store) for store in every]
    steps += [
        Tx(every, acks=1),
        Tx(every[:2], acks=1, commit=False),
        Tx((0, stores - 1), sends=2, size=14_000),
        Xa("one", every, acks=1),
        Tx(every[-2:]),
        Tell("one", True),
        Do("jobs"),
        Xa("two", every[:2], acks=1),
        Send(stores - 1),
        Do("checkpoint"),
        Tell("two", False),
        Ack(stores - 1),
        Tx(every[-2:], acks=1),
        Tx((0,), sends=1, acks=1),
        Xa("kept", every, acks=1),
        Send(0),
        Tx((0, 1), sends=2, size=14_000),
        Do("jobs"),
        Do("reclaim"),
        Tx(every),
        Do("reopen"),
        Tx(every, acks=1),
        Tx(every),
        Do("jobs"),
        Die(every, "half"),
        Tell("kept", True),
        Die(every[-2:], "prepared"),
        Die(every[:2], "decided"),
        Tx(every),
        Xa("left", every[-2:], acks=1),
        Tx(every[:2]),
        Send(1),
    ]
    return steps


# What was promised


@dataclass
class Entry:
    """An operation, and at each moment the outcomes that it may have had by then."""

    what: str
    stores: frozenset[int]
    sends: list[Pair]
    acks: list[Pair]
    xid: str = ""
    lazy: bool = False
    """In one store whose policy does not wait for the disk."""
    history: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    written: int = LAST
    """The moment its writing began."""
    told: int = LAST
    """The moment at which its last call began: by this its effects are in order."""
    interrupted: bool = False
    """Its process was gone before it was carried out."""
    loose: bool = False
    """A store may have been told later than others that came after it."""

    def outcomes(self, moment: int) -> frozenset[str]:
        return next((which for when, which in reversed(self.history) if when <= moment), frozenset({UNDONE}))

    def ended(self) -> int:
        return self.history[-1][0]


@dataclass
class Account:
    """All entries, in the order of their beginning."""

    entries: list[Entry] = field(default_factory=list)
    synced: list[tuple[int, int]] = field(default_factory=list)
    """Store and moment: all before is on its disk."""

    def judge(
        self,
        found: Mapping[str, Sequence[str]],
        externals: set[str],
        moment: int = LAST,
        power: bool = False,
    ) -> list[str]:
        """Why this cannot be what the operations up to a moment left; `power` if lazy ones may be lost."""
        present = {(queue, identity) for queue, ids in found.items() for identity in ids}
        known = [entry for entry in self.entries if entry.history and entry.history[0][0] <= moment]
        wrong = [f"never sent: {name(pair)}" for pair in sorted(present - {p for e in known for p in e.sends})]
        wrong += [
            f"twice: {name((queue, identity))}"
            for queue, ids in found.items()
            for identity, times in Counter(ids).items()
            if times > 1
        ]
        verdicts: list[tuple[Entry, str | None]] = []
        for entry in known:
            seen = self._signs(entry, known, present, moment, power)
            if len(seen) > 1:
                wrong.append(f"half done: {entry.what}: {seen}")
            verdict = next(iter(seen), None)
            wrong += _allowed(entry, verdict, entry.xid in externals, moment, power)
            verdicts.append((entry, HELD if entry.xid in externals else verdict))
        if power:
            wrong += self._prefixes(verdicts, moment)
        return [*wrong, *_disorder(found, known)]

    @staticmethod
    def _signs(entry: Entry, known: list[Entry], present: set[Pair], moment: int, power: bool) -> dict[str, str]:
        """What its messages say of it: outcome and a message that says so."""

        def may(other: Entry, outcome: str) -> bool:
            allowed = other.outcomes(moment)
            return outcome in allowed or (power and other.lazy and DONE in allowed)

        seen: dict[str, str] = {}
        for pair in entry.sends:
            if pair in present:
                seen[DONE] = name(pair)
            elif not any(pair in other.acks and may(other, DONE) for other in known):
                seen[UNDONE] = name(pair)
        for pair in entry.acks:
            if pair in present:
                seen[UNDONE] = name(pair)
            else:
                others = [o for o in known if o is not entry and pair in o.acks and may(o, DONE)]
                unsent = any(pair in other.sends and may(other, UNDONE) for other in known)
                if not others and not unsent:
                    seen[DONE] = f"{name(pair)} acked"
        return seen

    def _prefixes(self, verdicts: list[tuple[Entry, str | None]], moment: int) -> Iterator[str]:
        """What is lost under a lazy policy is lost with all that the store was given after it (invariant 1)."""
        for entry, verdict in verdicts:
            if not (entry.lazy and verdict == UNDONE and entry.outcomes(moment) == {DONE}):
                continue
            for store, when in self.synced:
                if store in entry.stores and entry.ended() <= when <= moment:
                    yield f"lost: {entry.what}, though its store was synced after it"
            for other, found in verdicts:
                if other.stores & entry.stores and other.written >= entry.ended() and found in (DONE, HELD):
                    yield f"lost: {entry.what}, though {other.what}, which came later, is there"


def _allowed(entry: Entry, verdict: str | None, held: bool, moment: int, power: bool) -> Iterator[str]:
    allowed = entry.outcomes(moment)
    if power and entry.lazy and DONE in allowed:
        allowed |= {UNDONE}
    if held:
        if HELD not in allowed:
            yield f"prepared still: {entry.what}, which may be {sorted(allowed)}"
        if verdict == DONE:
            yield f"seen though prepared: {entry.what}"
        return
    allowed -= {HELD}
    if not allowed:
        yield f"forgotten: {entry.what} was prepared and is not"
    elif verdict is not None and verdict not in allowed:
        yield f"{entry.what} is {verdict}; it may be {sorted(allowed)}"


def _disorder(found: Mapping[str, Sequence[str]], known: list[Entry]) -> Iterator[str]:
    """Within a queue effects are in the order of the calls that made them (invariant 2)."""
    ranks = {
        pair: (entry.told, place, entry) for entry in known for place, pair in enumerate(entry.sends)
    }  # fmt: skip
    for queue, ids in found.items():
        last = (-1, -1)
        within: dict[int, int] = {}
        for identity in ids:
            if (queue, identity) not in ranks:
                continue
            told, place, entry = ranks[queue, identity]
            if entry.loose:
                if place < within.get(told, -1):
                    yield f"out of order within a transaction: {identity} of {queue}"
                within[told] = place
            elif (told, place) < last:
                yield f"out of order: {identity} of {queue}"
            else:
                last = (told, place)


# Running a program


class Script:
    """Runs a program; `hit` says what was spoilt so far, `now` which moment it is."""

    def __init__(
        self,
        directory: Path,
        stores: int,
        jobs: Jobs,
        hit: Callable[[], str] = str,
        now: Callable[[], int] | None = None,
    ) -> None:
        self.config = configured(directory, stores)
        self.stores = stores
        self.jobs = jobs
        self.account = Account()
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self.router: anabranch.Router | None = None
        self.leased: list[anabranch.Message] = []
        self.passed_over = False
        """A message could not be read: receivers go on behind it until its store is opened again."""
        self._hit = hit
        self._now = now or count().__next__
        self._numbers = count()
        self._xids: dict[str, anabranch.Xid] = {}

    def run(self, program: Sequence[Step]) -> None:
        for step in program:
            if self.router is None:
                self.open()
            if self.router is not None:
                self.step(step)

    def open(self) -> None:
        self.leased.clear()
        self.router = self.attempt("open", lambda: anabranch.open(self.config))

    def attempt(self, what: str, act: Callable[[], T]) -> T | None:
        """Do it; note an error, and one of a wrong type as wrong."""
        try:
            return act()
        except (anabranch.AnabranchError, Crash) as error:
            self.errors.append(f"{what}: {type(error).__name__}: {error}")
            if isinstance(error, Crash):
                raise
        except Exception as error:
            self.errors.append(f"{what}: {type(error).__name__}: {error}")
            self.wrong.append(f"{what} raised {type(error).__name__}: {error}")
        return None

    def step(self, step: Step) -> None:
        if isinstance(step, Tx):
            self._transaction(step)
        elif isinstance(step, Xa):
            self._prepare(step)
        elif isinstance(step, Tell):
            self._tell(step)
        elif isinstance(step, Die):
            self._die(step)
        elif isinstance(step, Send):
            self._send(step)
        elif isinstance(step, Ack):
            self._ack(step)
        elif step.what == "jobs":
            self.jobs.run()
        elif step.what == "checkpoint":
            self.attempt("checkpoint", self._checkpoint)
        elif step.what == "reclaim":
            self.attempt("reclaim", self.open_router.reclaim)
        elif step.what == "reopen":
            self._close()

    @property
    def open_router(self) -> anabranch.Router:
        assert self.router is not None
        return self.router

    def _checkpoint(self) -> None:
        for store in stores_of(self.open_router):
            store.checkpoint()
            self.account.synced.append((int(store.name[1:]), self._now()))

    def _close(self) -> None:
        before = len(self.errors)
        self.attempt("close", self.open_router.close)
        if len(self.errors) == before:
            self.account.synced += [(store, self._now()) for store in range(self.stores)]
        self.router = None

    def _new(self, queue: str) -> Pair:
        return queue, f"m.{next(self._numbers)}"

    def _entry(
        self, what: str, stores: Sequence[int], sends: list[Pair], acks: Sequence[anabranch.Message], xid: str = ""
    ) -> Entry:
        lazy = len(stores) == 1 and POLICIES[stores[0] % 3] != "always"
        pairs = [(message.destination.name, identity_of(message.body)) for message in acks]
        entry = Entry(f"{what} {len(self.account.entries)}", frozenset(stores), sends, pairs, xid, lazy)
        self.account.entries.append(entry)
        return entry

    def _call(
        self, entry: Entry, act: Callable[[], object], during: set[str], after: set[str], unknown: set[str]
    ) -> bool:
        """A call that brings an operation on. It may have any outcome `during` it; `after` it returns; if its error
        says that nobody knows, `unknown`; any other error says that it changed nothing."""
        before = entry.outcomes(LAST)
        entry.told = self._now()
        entry.written = min(entry.written, entry.told)
        entry.history.append((entry.told, frozenset(during)))
        hit, errors = self._hit(), len(self.errors)
        self.attempt(entry.what, act)
        entry.loose = self._hit() != hit
        outcomes: frozenset[str] | set[str] = after
        if len(self.errors) > errors:
            doubt = any(f": {kind}:" in self.errors[-1] for kind in ("TransactionInDoubt", "OutcomeUnknownError"))
            outcomes = unknown if doubt else before
        entry.history.append((self._now(), frozenset(outcomes)))
        return len(self.errors) == errors

    def _send(self, step: Send) -> None:
        queue, identity = self._new(f"s{step.store}.q")
        entry = self._entry("send", [step.store], [(queue, identity)], [])
        target = self.open_router.queue(queue)
        self._call(
            entry, lambda: target.send(body_of(identity, step.size)), {UNDONE, DONE}, {DONE}, {UNDONE, DONE}
        )  # fmt: skip

    def _receive(self, store: int, count: int) -> list[anabranch.Message]:
        found: list[anabranch.Message] = []
        for queue in ("q", "r"):
            target = self.open_router.queue(f"s{store}.{queue}")
            while len(found) < count:
                errors = len(self.errors)
                message = self.attempt("receive", target.receive)
                if message is None:
                    self.passed_over = self.passed_over or len(self.errors) > errors
                    break
                found.append(message)
        return found

    def _ack(self, step: Ack) -> None:
        messages = self._receive(step.store, 1)
        if messages:
            entry = self._entry("ack", [step.store], [], messages)
            router = self.open_router
            if not self._call(entry, lambda: router.ack(messages), {UNDONE, DONE}, {DONE}, {UNDONE, DONE}):
                self.leased += messages

    def _filled(
        self, step: Tx | Xa | Die, what: str, xid: anabranch.Xid | None = None
    ) -> tuple[Entry, anabranch.Transaction | None]:
        """A transaction with all that it is to do in it."""
        messages = [message for store in step.stores for message in self._receive(store, step.acks)]
        sends = [self._new(f"s{store}.{'qr'[n % 2]}") for store in step.stores for n in range(step.sends)]
        entry = self._entry(what, step.stores, sends, messages, str(xid) if xid else "")

        def fill() -> anabranch.Transaction:
            tx = self.open_router.transaction(xid)
            try:
                for message in messages:
                    tx.ack(message)
                for place, (queue, identity) in enumerate(sends):  # every other one with an id to know it by
                    tx.send(queue, body_of(identity, step.size), message_id=identity if place % 2 else None)
            except BaseException:
                tx.rollback()
                raise
            return tx

        tx = self.attempt(f"fill {entry.what}", fill)
        if tx is None:
            self.leased += messages
        entry.history.append((self._now(), frozenset({UNDONE})))
        return entry, tx

    def _transaction(self, step: Tx) -> None:
        entry, tx = self._filled(step, "tx")
        if tx is not None and step.commit:
            self._call(entry, tx.commit, {UNDONE, DONE}, {DONE}, {UNDONE, DONE})
        elif tx is not None:
            self.attempt("rollback", tx.rollback)

    def _die(self, step: Die) -> None:
        entry, tx = self._filled(step, f"tx gone when {step.point}")
        entry.interrupted = True
        if tx is not None:
            after = UNDONE if step.point == "prepared" else DONE
            commit = partial(_gone_at, step.point, tx)
            self._call(entry, commit, {UNDONE, DONE}, {after}, {UNDONE, DONE})
        self._abandon()

    def _abandon(self) -> None:
        """What the end of a process does to its open files, locks and threads."""
        router, self.router = self.open_router, None
        self.jobs.forget()
        for store in stores_of(router):
            store.backend._index.close()
            store.backend._directory.unlock()
        router._coordinator.log._directory.unlock()
        router._registry.let_go()
        router._directory_lock.release()

    def _prepare(self, step: Xa) -> None:
        xid = self._xids[step.name] = anabranch.Xid(1, step.name, str(next(self._numbers)))
        entry, tx = self._filled(step, f"xa {step.name}", xid)
        if tx is not None:
            self._call(entry, tx.prepare, {UNDONE, HELD}, {HELD}, {UNDONE, HELD})

    def _tell(self, step: Tell) -> None:
        """Only of those that were prepared: of others it is an error."""
        xid = self._xids.get(step.name)
        entry = next((e for e in self.account.entries if e.xid == str(xid)), None)
        if xid is None or entry is None or HELD not in entry.outcomes(LAST):
            return
        router, outcome = self.open_router, DONE if step.commit else UNDONE
        tell = router.commit if step.commit else router.rollback
        self._call(entry, lambda: tell(xid), {HELD, outcome}, {outcome}, {HELD, outcome})


class Gone(BaseException):
    """The process is gone here."""


def _gone_at(point: str, tx: anabranch.Transaction) -> None:
    """Commit, and be gone at a point, if it is reached."""
    decide, carry_out = DecisionLog.decide, JournalStore.commit_prepared

    def before(self: DecisionLog, decision: Decision, still: object) -> Decision:
        raise Gone

    def after(self: DecisionLog, decision: Decision, still: object) -> Decision:
        decide(self, decision)
        raise Gone

    def half(self: JournalStore, transaction: bytes) -> Pending[list[anabranch.Receipt]]:
        carry_out(self, transaction).wait()
        raise Gone

    owner, method, instead = {
        "prepared": (DecisionLog, "decide", before),
        "decided": (DecisionLog, "decide", after),
        "half": (JournalStore, "commit_prepared", half),
    }[point]
    with mock.patch.object(owner, method, instead), contextlib.suppress(Gone):
        tx.commit()


def configured(directory: Path, stores: int) -> anabranch.Config:
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig(
                f"s{number}",
                [f"queue://s{number}.>"],
                journal=anabranch.JournalOptions(
                    sync=POLICIES[number % 3],
                    sync_interval=3600.0,
                    checkpoint_interval=3600.0,
                    segment_size=64 * 1024,
                    pool_files=1,
                ),
            )
            for number in range(stores)
        ],
    )


def stores_of(router: anabranch.Router) -> list[JournalStore]:
    return [store for store in router._registry.open_stores() if isinstance(store, JournalStore)]
