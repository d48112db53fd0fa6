"""Damage to every file of a data directory with every kind of store, and what is found then (invariant 9).

    python -m tests.crash.damage [--positions 24] [--state closed] [--kind segment] [--only 417] [--share 1/61]

A directory holds journals of each sync policy, SQLite, a memory store that has swapped, dead letters, subscriptions,
external transactions that nobody has decided, decisions and a record of placement; one is closed in order, one is left
by a kill. Each trial copies it, damages one file, and opens it in a process of its own, since a damaged LMDB file may
well kill the process. All of the file's damages are made: a bit flipped, a page zeroed or filled with noise, at places
spread over all of it and over what is used of it; cut short, made longer, emptied, removed, and replaced by a file of
its kind from another store. Then everything is read and received, and one more message is sent to each store.

Outcomes that are right: `right`, all is as it was; `named`, an error of ours that names the file or its store, and what
is shown beside it is right; `ours`, an error of ours that names neither. `known` are limits that docs/limits.md tells.
Everything else is wrong: `lost`, `wrong`, `foreign` (another error), a signal's name, `hangs`. A line for each, and a
table of kinds of files and outcomes at the end; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
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
from ..shares import Share, add_options, of_options
from ..taking import take
from .damaging import HANGS_AFTER, Trial, answers, outcomes
from .ledger import body_of, identity_of, violations

STATES: Final = ("closed", "killed")
JOURNALS: Final = ("always", "periodic", "never")
STORES: Final = (*JOURNALS, "sql", "other", "memory")
FORMAT: Final = 7
SENT: Final = 90
PAGE: Final = 4096
RIGHT: Final = ("right", "named", "ours", "known")
KINDS: Final = {
    "*.seg": "segment", "*.free": "pool", "index.mdb": "index", "index.sums": "checksums",
    "placement.records": "placement", "store.id": "id", "watermark": "watermark",
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
    return take(queue)


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
    found.counted[name] = source.depth()
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


def verdict(found: Found, right: Found, victim: Path) -> tuple[str, str]:
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


# Damage --------------------------------------------------------------------------------------------------------------


def damages(victim: Path, data: bytes, others: dict[str, bytes], positions: int) -> Iterator[Trial]:
    """All that is done to a file, in order; `others` are what it is replaced by."""
    size, used = len(data), len(data.rstrip(b"\0"))

    def noise(data: bytes, at: int, length: int) -> bytes:
        return data[:at] + random.Random(at).randbytes(min(length, len(data) - at)) + data[at + length :]

    def longer(data: bytes, by: int) -> bytes:
        return data + random.Random(by).randbytes(by)

    if size:
        for at in places(used, positions) + places(size, positions // 4):
            yield Trial(victim, f"flip {at}", lambda d, at=at: d[:at] + bytes([d[at] ^ 1 << at % 8]) + d[at + 1 :])  # type: ignore[misc]
        pages = sorted({at - at % PAGE for at in places(used, max(2, positions // 2))})
        for at in pages:
            yield Trial(victim, f"zero {at}", lambda d, at=at: d[:at] + bytes(len(d[at : at + PAGE])) + d[at + PAGE :])  # type: ignore[misc]
        for at in pages[:: max(1, len(pages) // 4)]:
            yield Trial(victim, f"noise {at}", partial(noise, at=at, length=PAGE))
        cuts = {0, used // 2, used - 1, size // 2 - size // 2 % PAGE, size - 1, max(0, size - PAGE), min(size, PAGE)}
        for at in sorted(cuts - {size}):
            yield Trial(victim, f"cut {at}", lambda d, at=at: d[:at])  # type: ignore[misc]
    for more in (1, PAGE):
        yield Trial(victim, f"longer {more}", partial(longer, by=more))
    yield Trial(victim, "remove", lambda d: None)
    for name, other in others.items():
        yield Trial(victim, f"replace {name}", lambda d, other=other: other)  # type: ignore[misc]


def places(size: int, count: int) -> list[int]:
    """So many places of a file of that size, the first byte and the last among them."""
    if size <= count:
        return list(range(size))
    return sorted({number * (size - 1) // max(1, count - 1) for number in range(count)})


def kind_of(path: Path) -> str:
    kind = next((kind for pattern, kind in KINDS.items() if path.match(pattern)), path.name)
    return f"decisions' {kind}" if "decisions" in path.parts else kind


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def known(trial: Trial, file: File, outcome: str, state: str) -> bool:
    """Limits that docs/limits.md tells of: no checksum covers SQLite's files, and nothing vouches for what was written
    last before a kill."""
    if outcome not in ("lost", "wrong"):
        return False
    if file.kind in ("database", "wal", "shm"):
        return True
    newest = file.newest and state == "killed" and not trial.what.startswith("remove")
    return file.kind in ("segment", "decisions' segment") and newest


# The campaign --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was found."""

    table: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    bad: list[str] = field(default_factory=list)
    done: int = 0
    trials: int = 0


def campaign(
    base: Path,
    report: Callable[[str], None],
    share: Share,
    every: int = 1,
    positions: int = 24,
    states: Sequence[str] = STATES,
    kinds: Sequence[str] = (),
    only: int = 0,
    seconds: float = HANGS_AFTER,
) -> Tally:
    """Every damage to every file, or a share of them; of `kinds` alone, or `only` one."""
    tally = Tally()
    for state in states:
        source = base / state
        ((ended, _),) = answers([partial(fill, source, state)])
        if ended not in ("", "SIGKILL"):
            raise RuntimeError(f"filling the directory: {ended}")
        shutil.copytree(source, base / "right")
        ((ended, answer),) = answers([lambda: asdict(look(base / "right"))])
        shutil.rmtree(base / "right")
        right = None if ended else Found(**answer)
        if right is None or right.errors or right.checked or right.foreign or right.bodies or len(right.waiting) != 3:
            raise RuntimeError(f"undamaged, {state}: {ended} {right}")
        number = tally.trials
        files = {path.relative_to(source): _file(path, source) for path in files_of(source)}
        files = {victim: file for victim, file in files.items() if not kinds or file.kind in kinds}
        trials = [t for victim, file in files.items() for t in damages(victim, file.data, file.others, positions)]
        tally.trials += len(trials)
        numbers = {trial: number for number, trial in enumerate(trials, number + 1)}
        chosen = [t for t in trials if numbers[t] == only] if only else share.of(trials, every)
        judge = partial(_judged, right, files, state)
        for trial, outcome, text in outcomes(source, base / "trial", chosen, judge, seconds):
            tally.done += 1
            tally.table[files[trial.victim].kind][outcome] += 1
            line = f"{numbers[trial]}: {state}, {trial}: {outcome} {text}"
            if outcome not in RIGHT:
                tally.bad.append(line)
            if outcome not in RIGHT or only:
                report(line)
        shutil.rmtree(source)
    return tally


@dataclass(frozen=True)
class File:
    """One that is damaged."""

    kind: str
    data: bytes
    others: dict[str, bytes]
    """What it is replaced by: others of its kind."""
    newest: bool
    """Of its kind, in its directory."""


def _file(path: Path, source: Path) -> File:
    kind = kind_of(path)
    alike = [other for other in files_of(source) if kind_of(other) == kind and other != path]
    beside = [other for other in alike if other.parent == path.parent]
    others = [other for other in alike if other.parent != path.parent][:2] + beside[:1]
    contents = {f"{other.parent.name}/{other.name}": other.read_bytes() for other in others}
    return File(kind, path.read_bytes(), contents, path == max([*beside, path]))


def _judged(right: Found, files: dict[Path, File], state: str, directory: Path, trial: Trial) -> tuple[str, str]:
    outcome, text = verdict(look(directory), right, directory / trial.victim)
    if outcome not in RIGHT and known(trial, files[trial.victim], outcome, state):
        outcome = "known"
    return outcome, text


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
    add_options(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="damage-", dir=in_memory()) as base:
        tally = campaign(
            Path(base), partial(print, flush=True), *of_options(given), given.positions, given.state or STATES,
            given.kind or (), given.only,
        )  # fmt: skip
    print(table_of(tally))
    print(f"{tally.done} of {tally.trials} trials, {len(tally.bad)} wrong")
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
