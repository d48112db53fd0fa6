"""Bits, pages and ends of a journal store's index are damaged, one trial each: what is read is right all the same.

    python -m tests.crash.index [--step 97]

A trial damages `index.mdb` or `index.sums` of a closed store, opens the store and reads everything. The index is
derived from the journal, so everything must be there: no other answer, no error, no death of the process, no hang.
`--step 1` flips one bit of every byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anabranch

from .sigkill import reaped

PAGE: Final = 4096
SENT: Final = 240
Damage = tuple[str, str, Callable[[bytes], bytes]]
"""What it is, the file's suffix, and what becomes of its bytes."""


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
        found["violations"] = [text for store in router.places.open_stores() for text in store.check()]
        for name, source in sources.items():
            received = []
            while (message := source.receive()) is not None:
                received.append(message.seq)
            found[f"received from {name}"] = received
        return found


def damages(files: dict[str, bytes], earlier: dict[str, bytes], step: int) -> Iterator[Damage]:
    def flipped(at: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:at] + bytes([data[at] ^ 1 << at // step % 8]) + data[at + 1 :]

    def replaced(at: int, by: bytes) -> Callable[[bytes], bytes]:
        return lambda data: data[:at] + by + data[at + len(by) :]

    def cut(at: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:at]

    for suffix, data in files.items():
        for at in range(0, len(data), step if suffix == ".mdb" else max(1, step // 20)):
            yield f"flip at {at}", suffix, flipped(at)
    index, old = files[".mdb"], earlier[".mdb"]
    for at in range(0, len(index), PAGE * max(1, step // 200)):
        other = (at + 3 * PAGE) % len(index)
        yield f"zeros at {at}", ".mdb", replaced(at, bytes(PAGE))
        yield f"page of {other} at {at}", ".mdb", replaced(at, index[other : other + PAGE])
        yield f"an older page at {at}", ".mdb", replaced(at, old[at : at + PAGE])
        yield f"cut at {at}", ".mdb", cut(at)
    for suffix, data in files.items():
        yield "the file of before", suffix, lambda _, before=earlier[suffix]: before  # type: ignore[misc]
        yield "nothing in it", suffix, lambda _: b""
        yield "one byte less", suffix, lambda data: data[:-1]
        yield "a byte more", suffix, lambda data: data + b"\0"
        yield "half of it", suffix, cut(len(data) // 2)


def campaign(base: Path, step: int, report: Callable[[str], None]) -> tuple[int, int]:
    """Trials, and how many went wrong."""
    good = base / "good"
    earlier = prepare(good)
    files = {path.suffix: path.read_bytes() for path in index_files(good)}
    shutil.copytree(good, base / "truth")
    truth = look(base / "truth")
    trials = list(damages(files, earlier, step))
    bad = done = 0
    while done < len(trials):
        before, said = done, base / "report"
        said.write_text("")
        pid = os.fork()
        if pid == 0:  # a damaged index may well kill the process
            _try_all(good, base / "data", trials[done:], truth, said)
        code = reaped(pid, 10 + 0.5 * (len(trials) - done))
        results = [json.loads(line) for line in said.read_text().splitlines()]
        for (what, suffix, _), wrong in zip(trials[done:], results, strict=False):
            bad += bool(wrong)
            if wrong:
                report(f"index{suffix}, {what}: {wrong}")
        done += len(results)
        if done < len(trials):
            what, suffix, _ = trials[done]
            died = "it hangs" if code is None else f"killed by {signal.Signals(-code).name}" if code < 0 else "it ends"
            report(f"index{suffix}, {what}: {died}")
            bad, done = bad + 1, done + 1
        assert done > before
    return len(trials), bad


def _try_all(good: Path, directory: Path, trials: list[Damage], truth: dict[str, Any], said: Path) -> None:
    """In a process of its own: a line for each, empty if all was right."""
    with said.open("w") as lines:
        for _, suffix, change in trials:
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(good, directory)
            (path,) = (path for path in index_files(directory) if path.suffix == suffix)
            path.write_bytes(change(path.read_bytes()))
            try:
                found = look(directory)
                wrong = ", ".join(f"{key}: {found.get(key)}"[:200] for key in truth if found.get(key) != truth[key])
            except BaseException:
                wrong = traceback.format_exc()[-300:]
            lines.write(json.dumps(wrong) + "\n")
            lines.flush()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage a journal store's index in every way, one after the other.")
    parser.add_argument("--step", type=int, default=97)
    arguments = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # what is simulated needs no disk
    with tempfile.TemporaryDirectory(prefix="index-", dir=memory) as base:
        trials, bad = campaign(Path(base), arguments.step, lambda line: print(line, flush=True))
    print(f"{trials} trials, {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
