"""Damage to every file of a data directory with every kind of store, and what is found then (invariant 9).

    python -m tests.crash.damage [--positions 24] [--state closed] [--kind segment] [--only 417]

A directory holds journals of each sync policy, SQLite, a memory store that has swapped, dead letters, subscriptions,
external transactions that nobody has decided, decisions and a record of placement; one is closed in order, one is left
by a kill. Each trial copies it, damages one file, and opens it in a process of its own, since a damaged LMDB file may
well kill the process. All of the file's damages are made: a bit flipped, a page zeroed or filled with noise, at places
spread over all of it and over what is used of it; cut short, made longer, emptied, removed, and replaced by a file of
its kind from another store. Then everything is read and received, and one more message is sent to each store.

Outcomes that are right: `right`, all is as it was; `named`, an error of ours that names the file or its store, and what
is shown beside it is right; `ours`, an error of ours that names neither. `known` are limits that README.md tells.
Everything else is wrong: `lost`, `wrong`, `foreign` (another error), a signal's name, `hangs`. A line for each, and a
table of kinds of files and outcomes at the end; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anabranch
import anabranch.adapters.journal
import anabranch.adapters.memory
import anabranch.adapters.sql  # here, not in each child

from ..places import in_memory
from .ledger import body_of, identity_of, violations
from .sigkill import reaped

STATES: Final = ("closed", "killed")
JOURNALS: Final = ("always", "periodic", "never")
STORES: Final = (*JOURNALS, "sql", "other", "memory")
FORMAT: Final = 7
SENT: Final = 90
PAGE: Final = 4096
RIGHT: Final = ("right", "named", "ours", "known")
KINDS: Final = {
    "*.seg": "segment", "*.free": "pool", "index.mdb": "index", "index.sums": "checksums",
    "placement.mdb": "placement", "store.id": "id", "watermark": "watermark",
    "store.db": "database", "store.db-wal": "wal", "store.db-shm": "shm", "*.swap": "swap", "*.lock": "lock",
    "*-lock": "lock",
}  # fmt: skip
"""Of files, by their names; those of the decision log are kinds of their own."""


def config(directory: Path) -> anabranch.Config:
    found = [
        anabranch.StoreConfig(
            name,
            [f"{name}.>"],
            journal=anabranch.JournalOptions(
                sync=anabranch.Sync(name), segment_size=64 * 1024, checkpoint_interval=3600, pool_files=2
            ),
        )
        for name in JOURNALS
    ]
    found += [anabranch.StoreConfig(name, [f"{name}.>"], sql=anabranch.SqlOptions()) for name in ("sql", "other")]
    memory = anabranch.MemoryOptions(max_bytes=64 * 1024, roll_over_size=64 * 1024)
    return anabranch.Config(directory, [*found, anabranch.StoreConfig("memory", ["memory.>"], memory=memory)])


# The directory -------------------------------------------------------------------------------------------------------


def fill(directory: Path, state: str) -> None:
    """To be called in a process of its own, which does not outlive it."""
    with anabranch.open(config(directory)) as router:
        for store in STORES:
            queue = router.queue(f"{store}.q")
            for name in ("x", "y"):
                router.topic(f"{store}.t").subscribe(name)
            for number in range(SENT):
                identity = f"{store}q.{number}"
                queue.send(body_of(identity, 900 + 37 * (number % 40)), {"n": number}, identity)
                if number % 3 == 0:
                    router.topic(f"{store}.t").send(body_of(f"{store}t.{number}", 300))
                if number % 4:
                    _take(queue).ack()
                if number == SENT // 2:
                    router.reclaim()
            _take(queue).release()
        for number in range(4):
            with router.transaction() as tx:
                for store in STORES[:-1]:
                    tx.send(f"{store}.x", body_of(f"tx.{store}{number}", 200))
        for number in range(6):
            xid = anabranch.Xid(FORMAT, f"x{number}")
            tx = router.transaction(xid)
            for store in ("always", "never", "sql"):
                tx.send(f"{store}.held", body_of(f"held.{store}{number}", 200))
                tx.ack(_take(router.queue(f"{store}.q")))
            tx.prepare()
            if number > 2:
                (router.commit if number % 2 else router.rollback)(xid)
        if state == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def _take(queue: anabranch.Queue) -> anabranch.Message:
    message = queue.receive()
    assert message is not None
    return message


# What is found in it -------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a process finds that opens a directory. Queues are named as in ledger.py."""

    shown: dict[str, list[str]] = field(default_factory=dict)
    """By browse()."""
    counted: dict[str, int] = field(default_factory=dict)
    received: dict[str, list[str]] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    """External transactions."""
    errors: list[tuple[str, str]] = field(default_factory=list)
    """Of ours: the queue, the store, or nothing if it is of all; and the text."""
    checked: list[str] = field(default_factory=list)
    foreign: str = ""
    bodies: list[str] = field(default_factory=list)
    """Queues of which a body was not the one that had been sent."""


def look(directory: Path) -> Found:
    """Open it, read everything, send one more to each store."""
    found = Found()

    def attempt(where: str, act: Callable[[], object]) -> None:
        try:
            act()
        except anabranch.AnabranchError as error:
            found.errors.append((where, f"{type(error).__name__}: {error}"))
        except AssertionError as error:
            if "is not the one that was sent" not in str(error):
                raise
            found.bodies.append(where)

    try:
        attempt("", lambda: _look_at_all(directory, found, attempt))
    except Exception:
        found.foreign = traceback.format_exc()
    return found


def _look_at_all(directory: Path, found: Found, attempt: Callable[[str, Callable[[], object]], None]) -> None:
    with anabranch.open(config(directory)) as router:
        found.waiting = sorted(str(xid) for xid in router.recover())
        for store in STORES:
            for name in ("q", "x", "held"):
                attempt(f"{store}.{name}", partial(_read, found, f"{store}.{name}", router.queue(f"{store}.{name}")))
            attempt(f"{store}.t", partial(_read_topic, found, store, router, attempt))
            attempt(f"{store}.more", lambda store=store: router.queue(f"{store}.more").send(body_of("more.0")))  # type: ignore[misc]
        attempt("", lambda: found.checked.extend(violations(router)))


def _read_topic(
    found: Found, store: str, router: anabranch.Router, attempt: Callable[[str, Callable[[], object]], None]
) -> None:
    for subscriber in router.topic(f"{store}.t").subscriptions():
        name = f"{store}.t/{subscriber.subscription.name}"
        attempt(name, partial(_read, found, name, subscriber))


def _read(found: Found, name: str, source: anabranch.Queue | anabranch.Subscriber) -> None:
    found.counted[name] = len(source)
    shown = found.shown.setdefault(name, [])
    for browsed in source.browse():
        shown.append(identity_of(browsed.body))
        if len(shown) > 10 * SENT:
            raise RuntimeError(f"{name} has no end")
    received = found.received.setdefault(name, [])
    while (message := source.receive()) is not None:
        received.append(identity_of(message.body))
        if len(received) > 10 * SENT:
            raise RuntimeError(f"{name} has no end")


def verdict(found: Found, right: Found, victim: Path, directory: Path) -> tuple[str, str]:
    """The outcome, and a few words about it."""
    if found.foreign:
        return "foreign", found.foreign.strip().splitlines()[-1] + " <- " + _place(found.foreign)
    failed = {where for where, _ in found.errors}
    lost: list[str] = []
    wrong: list[str] = []

    def silent(name: str) -> bool:
        store = name.partition(".")[0]
        return not failed & {"", name, store, f"{store}.t" if "/" in name else name}

    for what in ("shown", "received"):
        for name, ids in getattr(right, what).items():
            seen = getattr(found, what).get(name, [])
            if name in found.bodies:
                continue
            if ids[: len(seen)] != seen:
                extra = [identity for identity in seen if identity not in ids]
                kept = [identity for identity in ids if identity in seen]
                (wrong if extra or kept != seen or not silent(name) else lost).append(
                    f"{what} {name}: {_brief(seen, ids)}"
                )
            elif len(seen) < len(ids) and silent(name):
                lost.append(f"{what} {name}: {_brief(seen, ids)}")
        wrong += [
            f"{what} {name}: {ids}" for name, ids in getattr(found, what).items() if name not in getattr(right, what)
        ]
    for name, count in right.counted.items():
        if silent(name) and found.counted.get(name) != count:
            wrong.append(f"{name} counts {found.counted.get(name)}, not {count}")
    if "" not in failed and found.waiting != right.waiting:
        wrong.append(f"{found.waiting} wait, not {right.waiting}")
    told = [text for _, text in found.errors] + [f"check: {line}" for line in found.checked]
    if wrong or lost:
        return ("wrong" if wrong else "lost"), "; ".join((wrong + lost)[:4]) + (f" [{told[0][:150]}]" if told else "")
    if found.bodies:
        return "wrong", f"a body of {found.bodies[0]} is not the one that was sent"
    if not told:
        return "right", ""
    names = {victim.name, f"store {victim.parent.name!r}", f"store {victim.parent.name}", str(victim.parent)}
    named = any(name in text for name in names for text in told)
    return ("named" if named else "ours"), told[0]


def _brief(seen: Sequence[str], ids: Sequence[str]) -> str:
    missing = [identity for identity in ids if identity not in seen]
    extra = [identity for identity in seen if identity not in ids]
    return f"{len(seen)} of {len(ids)}, missing {missing[:3]}, extra {extra[:3]}"


def _place(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.lstrip().startswith("File")), "")


def in_child(run: Callable[[], object], report: Path, seconds: float) -> str:
    """What it returns as JSON, in `report`; the outcome: nothing, a signal's name, or `hangs`."""
    pid = os.fork()
    if pid == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)  # LMDB says what it aborts for
        try:
            report.write_text(json.dumps(run()))
        finally:
            os._exit(0)
    code = reaped(pid, seconds)
    if code is None:
        return "hangs"
    return signal.Signals(-code).name if code < 0 else ""


def found_in(directory: Path, report: Path, seconds: float) -> tuple[str, Found | None]:
    outcome = in_child(lambda: asdict(look(directory)), report, seconds)
    if outcome:
        return outcome, None
    read = json.loads(report.read_text())
    return "", Found(**{**read, "errors": [tuple(error) for error in read["errors"]]})


# Damage --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damage:
    """What is done to one file."""

    what: str
    at: int = 0
    """Byte."""
    other: Path | None = None
    """What it is replaced by."""

    def __str__(self) -> str:
        return f"{self.what} {self.other.parent.name}/{self.other.name}" if self.other else f"{self.what} {self.at}"

    def apply(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        if self.what == "remove":
            path.unlink()
            return
        if self.what == "flip":
            data[self.at] ^= 1 << (self.at % 8)
        elif self.what == "zero":
            data[self.at : self.at + PAGE] = bytes(len(data[self.at : self.at + PAGE]))
        elif self.what == "noise":
            data[self.at : self.at + PAGE] = random.Random(self.at).randbytes(len(data[self.at : self.at + PAGE]))
        elif self.what == "cut":
            del data[self.at :]
        elif self.what == "longer":
            data += random.Random(self.at).randbytes(self.at)
        else:
            assert self.other is not None
            data[:] = self.other.read_bytes()
        path.write_bytes(data)


def damages(path: Path, others: Sequence[Path], positions: int) -> Iterator[Damage]:
    """All that is done to a file, in order."""
    data = path.read_bytes()
    size, used = len(data), len(data.rstrip(b"\0"))
    if size:
        for at in spread(used, positions) + spread(size, positions // 4):
            yield Damage("flip", at)
        pages = sorted({at - at % PAGE for at in spread(used, max(2, positions // 2))})
        for at in pages:
            yield Damage("zero", at)
        for at in pages[:: max(1, len(pages) // 4)]:
            yield Damage("noise", at)
        cuts = {0, used // 2, used - 1, size // 2 - size // 2 % PAGE, size - 1, max(0, size - PAGE), min(size, PAGE)}
        for at in sorted(cuts - {size}):
            yield Damage("cut", at)
    for more in (1, PAGE):
        yield Damage("longer", more)
    yield Damage("remove")
    for other in others:
        yield Damage("replace", 0, other)


def spread(size: int, count: int) -> list[int]:
    """So many places of a file of that size, the first byte and the last among them."""
    if size <= count:
        return list(range(size))
    return sorted({number * (size - 1) // max(1, count - 1) for number in range(count)})


def kind_of(path: Path) -> str:
    kind = next((kind for pattern, kind in KINDS.items() if path.match(pattern)), path.name)
    return f"decisions' {kind}" if "decisions" in path.parts else kind


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def known(kind: str, outcome: str, damage: Damage, state: str, path: Path, newest: bool) -> bool:
    """Limits that README.md tells of: no checksum covers SQLite's files, and nothing vouches for what was written last
    before a kill."""
    if outcome not in ("lost", "wrong"):
        return False
    if kind in ("database", "wal", "shm"):
        return True
    return kind in ("segment", "decisions' segment") and newest and state == "killed" and damage.what != "remove"


# The campaign --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was found."""

    table: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    bad: list[str] = field(default_factory=list)
    trials: int = 0


def campaign(
    base: Path,
    report: Callable[[str], None],
    positions: int,
    states: Sequence[str] = STATES,
    kinds: Sequence[str] = (),
    only: int = 0,
    seconds: float = 120,
    every: int = 1,
) -> Tally:
    """Every damage to every file; of `kinds` alone, `only` one, or one of `every` so many."""
    tally = Tally()
    for state in states:
        source = base / state
        if (ended := in_child(lambda source=source, state=state: fill(source, state), base / "report", 600)) not in (  # type: ignore[misc]
            "",
            "SIGKILL",
        ):
            raise RuntimeError(f"filling the directory: {ended}")
        outcome, right = _trial(source, base, None, None, seconds)
        if right is None or right.errors or right.checked or right.foreign or right.bodies or len(right.waiting) != 3:
            raise RuntimeError(f"undamaged, {state}: {outcome} {right}")
        paths = files_of(source)
        for path in paths:
            kind = kind_of(path)
            if kinds and kind not in kinds:
                continue
            others = [o for o in paths if kind_of(o) == kind and o.parent != path.parent][:2]
            others += [o for o in paths if kind_of(o) == kind and o.parent == path.parent and o != path][:1]
            newest = path == max((o for o in paths if o.parent == path.parent and kind_of(o) == kind), default=path)
            for damage in damages(path, others, positions):
                tally.trials += 1
                if (only and tally.trials != only) or tally.trials % every:
                    continue
                outcome, found = _trial(source, base, path, damage, seconds)
                text = ""
                if found is not None:
                    outcome, text = verdict(found, right, path, base)
                if outcome not in RIGHT and known(kind, outcome, damage, state, path, newest):
                    outcome = "known"
                tally.table[kind][outcome] += 1
                line = f"{tally.trials}: {state}, {path.relative_to(source)}, {damage}: {outcome} {text}"
                if outcome not in RIGHT:
                    tally.bad.append(line)
                if outcome not in RIGHT or only:
                    report(line)
        shutil.rmtree(source)
    return tally


def _trial(
    source: Path, base: Path, path: Path | None, damage: Damage | None, seconds: float
) -> tuple[str, Found | None]:
    place = base / "trial"
    shutil.copytree(source, place)
    try:
        if path is not None and damage is not None:
            damage.apply(place / path.relative_to(source))
        return found_in(place, base / "report", seconds)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def table_of(tally: Tally) -> str:
    """Kinds of files down, outcomes across."""
    outcomes = [*RIGHT, *sorted({o for counts in tally.table.values() for o in counts} - set(RIGHT))]
    rows = [
        ["", *outcomes],
        *([kind, *(str(counts[o] or "-") for o in outcomes)] for kind, counts in tally.table.items()),
    ]
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(row[1:], wide[1:], strict=True))])
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage every file, and look.")
    parser.add_argument("--positions", type=int, default=24, help="flipped bits of each file")
    parser.add_argument("--state", choices=STATES, action="append")
    parser.add_argument("--kind", action="append", help="segment, pool, index, placement, database, ...")
    parser.add_argument("--only", type=int, default=0, help="the trial of that number")
    parser.add_argument("--seconds", type=float, default=120, help="after which a process hangs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="damage-", dir=in_memory()) as base:
        tally = campaign(
            Path(base), lambda line: print(line, flush=True), given.positions, given.state or STATES,
            given.kind or (), given.only, given.seconds,
        )  # fmt: skip
    print(table_of(tally))
    print(f"{sum(sum(counts.values()) for counts in tally.table.values())} trials, {len(tally.bad)} wrong")
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
