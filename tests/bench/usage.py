"""What the usage log costs: pairs of a send and an ack with it and without it, in turn, in one process.

    python -m tests.bench.usage --rounds 15

Told are medians over the rounds: processor time of the whole process, and time on the clock, of one pair; and of the
ratios of neighbours, which a machine that does other things besides disturbs least. What the log writes when it is
stopped is part of it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path

import anabranch


def measured(router: anabranch.Router, pairs: int, on: bool) -> tuple[float, float]:
    """Microseconds of processor time and on the clock, each for one pair."""
    queue, body = router.queue("orders"), bytes(200)
    gc.collect()
    if on:
        router.start_usage_log()
    processor, clock = time.process_time(), time.perf_counter()
    for _ in range(pairs):
        queue.send(body)
        message = queue.receive()
        assert message is not None
        message.ack()
    if on:
        router.stop_usage_log()
    return (time.process_time() - processor) / pairs * 1e6, (time.perf_counter() - clock) / pairs * 1e6


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--directory", type=Path, default=None, help="where its files lie for a while")
    parser.add_argument("--sync", choices=["always", "periodic", "never"], default="never")
    options = parser.parse_args()
    journal = anabranch.JournalOptions(sync=anabranch.Sync(options.sync))
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        config = anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=journal)])
        with anabranch.open(config) as router:
            measured(router, options.pairs // 4, True)
            rounds = [
                [measured(router, options.pairs, on) for on in ((False, True) if number % 2 else (True, False))][
                    :: 1 if number % 2 else -1
                ]
                for number in range(options.rounds)
            ]
    for at, what in enumerate(("processor time", "time on the clock")):
        off, on = ([found[which][at] for found in rounds] for which in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
        print(
            f"{what}: {statistics.median(off):.2f} us a pair without it, {statistics.median(on):.2f} with it; "
            f"{100 * (ratio - 1):+.1f} %"
        )


if __name__ == "__main__":
    main()
