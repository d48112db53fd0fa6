"""What compaction costs those who send: the time of each send of a store that compacts, beside one that does not, and
beside one that only releases segments, in turn, each on a directory of its own.

    python -m tests.bench.compaction --sync never --threads 1 --rounds 5

    kept         one message of 50 stays and nothing is compacted: no segment is ever released
    reclaimed    no message stays and nothing is compacted: segments are released as they are
    compacted    one message of 50 stays, and what stays is copied, before the segments are released

Each thread sends 50 messages, of which each send is timed, and then acks those that do not stay, which is not. Told are
medians over the rounds of the percentiles of a round's sends, in microseconds. Send at most `--rate` messages a second,
if you give one: as fast as they can, threads keep the interpreter, and any thread more in the background makes them
wait for it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import threading
import time
from array import array
from pathlib import Path
from typing import Final

import anabranch

MODES: Final = ("kept", "reclaimed", "compacted")
TOGETHER: Final = 50
"""Sends of a thread until it acks."""
BODY: Final = bytes(1024)
PERCENTILES: Final = (50, 99, 99.9)


def latencies(
    router: anabranch.Router, number: int, sends: int, stays: bool, rate: float, barrier: threading.Barrier
) -> array[int]:
    """Nanoseconds of each send of one thread."""
    clock, taken = time.perf_counter_ns, array("q")
    kept, goes = router.queue("kept"), router.queue(f"goes-{number}")
    barrier.wait()
    started = time.perf_counter()
    for first in range(0, sends, TOGETHER):
        for at in range(TOGETHER):
            send = kept.send if stays and not at else goes.send
            before = clock()
            send(BODY)
            taken.append(clock() - before)
            if rate:
                time.sleep(max(started + (first + at + 1) / rate - time.perf_counter(), 0))
        with router.transaction() as tx:
            for message in goes.receive_many(TOGETHER):
                tx.ack(message)
    return taken


def measured(directory: Path, mode: str, options: argparse.Namespace) -> tuple[list[float], int]:
    """The percentiles of one round, in microseconds, and how often messages were compacted meanwhile."""
    journal = anabranch.JournalOptions(
        sync=anabranch.Sync(options.sync), segment_size=options.segment_bytes,
        compact_live_percent=50 if mode == "compacted" else 0,
    )  # fmt: skip
    taken: list[array[int]] = []
    barrier = threading.Barrier(options.threads)
    each = options.sends // options.threads // TOGETHER * TOGETHER
    with anabranch.open(anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=journal)])) as router:

        def work(number: int) -> None:
            rate = options.rate / options.threads
            taken.append(latencies(router, number, each, mode != "reclaimed", rate, barrier))

        gc.collect()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(options.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        compactions = router.stats().stores["all"].compactions
    ordered = sorted(ns for part in taken for ns in part)
    return [ordered[int((len(ordered) - 1) * percent / 100)] / 1000 for percent in PERCENTILES], compactions


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sends", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="sends a second, of all threads (0: no limit)")
    parser.add_argument("--segment-bytes", type=int, default=1 << 20)
    parser.add_argument("--directory", type=Path, default=None, help="where its files lie for a while")
    parser.add_argument("--sync", choices=["always", "periodic", "never"], default="never")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    compactions: dict[str, list[int]] = {mode: [] for mode in MODES}
    for turn in range(options.rounds):
        for mode in (*MODES[turn % 3 :], *MODES[: turn % 3]):
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                percentiles, count = measured(Path(directory), mode, options)
            found[mode].append(percentiles)
            compactions[mode].append(count)
    for mode in MODES:
        medians = [statistics.median(column) for column in zip(*found[mode], strict=True)]
        told = ", ".join(f"p{percent} {value:.0f} us" for percent, value in zip(PERCENTILES, medians, strict=True))
        print(f"{mode}: {told}; compacted {statistics.median(compactions[mode]):.0f} times")


if __name__ == "__main__":
    main()
