"""Bits, pages and ends of a journal store's index are damaged, one trial each: what is read is right all the same.

    python -m tests.crash.index [--share 1/97] [--seconds 60]

A trial damages `index.mdb` or `index.sums` of a closed store, opens the store and reads everything. The index is
derived from the journal, so everything must be there: no other answer, no error, no death of the process, no hang.
The whole flips one bit of every byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import anabranch

from ..places import in_memory
from ..shares import Share, add_options, of_options
from .damaging import Trial, outcomes

PAGE: Final = 4096
SENT: Final = 240


def config(directory: Path) -> anabranch.Config:
    options = anabranch.JournalOptions(
        segment_size=64 * 1024, checkpoint_interval=3600.0, max_deliveries=9, dead_letter="dlq"
    )
    return anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=options)])


def prepare(directory: Path) -> dict[str, bytes]:
    """Make the store; returns the index's files as an earlier life left them, by suffix."""
    earlier: dict[str, bytes] = {}
    for life in range(3):
        with anabranch.open(config(directory)) as router:
            queues = [router.queue(name) for name in ("a", "b")]
            topic = router.topic("t")
            subscriptions = [topic.subscribe(name) for name in "xy"]
            for number in range(SENT // 3):
                queues[number % 2].send(b"%d.%d" % (life, number), message_id=f"{life}.{number}" * (1 + number % 9))
                if number % 5 == 0:
                    topic.send(b"t%d.%d" % (life, number))
                if number % 7 == 0:
                    queues[0].send(bytes(2000), expires_in=86_400)
                if number % 3 == 0:
                    for source in (*queues, *subscriptions):
                        message = source.receive()
                        if message is not None and number % 2:
                            message.ack()
                        elif message is not None:
                            message.release()
        if life == 1:
            earlier = {path.suffix: path.read_bytes() for path in index_files(directory)}
    return earlier


def index_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("index.*"))


def look(directory: Path) -> dict[str, Any]:
    """All that is there: browsed, counted and received."""
    with anabranch.open(config(directory)) as router:
        sources: dict[str, Any] = {name: router.queue(name) for name in ("a", "b")}
        sources |= {s.subscription.name: s for s in router.topic("t").subscriptions()}
        found: dict[str, Any] = {
            name: [[m.seq, m.body.hex(), m.message_id, m.deliveries] for m in source.browse()]
            for name, source in sources.items()
        }
        stats = router.stats().stores["all"]
        found["counts"] = sorted([str(name), count] for name, count in stats.destinations.items())
        found["subscriptions"] = sorted([str(name), count] for name, count in stats.subscriptions.items())
        found["violations"] = [text for store in router._registry.open_stores() for text in store.check()]
        for name, source in sources.items():
            received = []
            while (message := source.receive()) is not None:
                received.append(message.seq)
            found[f"received from {name}"] = received
        return found


def damages(files: dict[str, bytes], earlier: dict[str, bytes], victims: dict[str, Path], every: int) -> list[Trial]:
    """All trials, or one of every so many bytes and pages of each file."""
    found: list[Trial] = []

    def add(what: str, suffix: str, change: Callable[[bytes], bytes]) -> None:
        found.append(Trial(victims[suffix], what, change))

    def flipped(at: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:at] + bytes([data[at] ^ 1 << at // every % 8]) + data[at + 1 :]

    def replaced(at: int, by: bytes) -> Callable[[bytes], bytes]:
        return lambda data: data[:at] + by + data[at + len(by) :]

    def cut(at: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:at]

    for suffix, data in files.items():
        for at in range(0, len(data), every if suffix == ".mdb" else max(1, every // 20)):
            add(f"flip at {at}", suffix, flipped(at))
    index, old = files[".mdb"], earlier[".mdb"]
    for at in range(0, len(index), PAGE * max(1, every // 200)):
        other = (at + 3 * PAGE) % len(index)
        add(f"zeros at {at}", ".mdb", replaced(at, bytes(PAGE)))
        add(f"page of {other} at {at}", ".mdb", replaced(at, index[other : other + PAGE]))
        add(f"an older page at {at}", ".mdb", replaced(at, old[at : at + PAGE]))
        add(f"cut at {at}", ".mdb", cut(at))
    for suffix, data in files.items():
        add("the file of before", suffix, lambda _, before=earlier[suffix]: before)  # type: ignore[misc]
        add("nothing in it", suffix, lambda _: b"")
        add("one byte less", suffix, lambda data: data[:-1])
        add("a byte more", suffix, lambda data: data + b"\0")
        add("half of it", suffix, cut(len(data) // 2))
    return found


def campaign(base: Path, report: Callable[[str], None], share: Share, every: int) -> int:
    """How many trials went wrong."""
    good = base / "good"
    earlier = prepare(good)
    paths = {path.suffix: path for path in index_files(good)}
    shutil.copytree(good, base / "truth")
    truth = look(base / "truth")

    def judge(directory: Path, _: Trial) -> tuple[str, str]:
        found = json.loads(json.dumps(look(directory)))
        wrong = ", ".join(f"{key}: {found.get(key)}"[:200] for key in truth if found.get(key) != truth[key])
        return "wrong" if wrong else "right", wrong

    every = share.every(every)
    victims = {suffix: path.relative_to(good) for suffix, path in paths.items()}
    files = {suffix: path.read_bytes() for suffix, path in paths.items()}
    trials = damages(files, earlier, victims, every)
    done = bad = 0
    for trial, outcome, text in outcomes(good, base / "data", share.of(trials), judge):
        done += 1
        if outcome != "right":
            bad += 1
            report(f"{trial}: {outcome} {text}")
    report(f"{done} of {len(trials)} trials, {bad} wrong")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage a journal store's index in every way, one after the other.")
    add_options(parser)
    share, every = of_options(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="index-", dir=in_memory()) as base:
        bad = campaign(Path(base), partial(print, flush=True), share, every)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
