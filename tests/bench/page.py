"""The table of docs/performance.md, from runs of its own: Anabranch, its peers in Python and the bare disk, in turn.

    python -m tests.bench.page --dir /a/disk              # every row, medians of three rounds: a quarter of an hour
    python -m tests.bench.page --rows drain,import --rounds 5 --scale 0.1

Each run prints its JSON line to stderr as `python -m tests.bench` does, and the table in Markdown goes to stdout, below
a line that says on what machine. A run takes a second or two at `--scale 1`. The bare disk is `raw`. `import` is
processor time, in a new process that has imported nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from . import runner
from .__main__ import names_of, positive

OURS = "anabranch"
PYTHON = ("sqlite3", "persist-queue", "huey")
BARE = "raw"
IMPORT = "import"
IMPORTED = {OURS: OURS, "persistqueue": "persist-queue", "huey.storage": "huey"}
"""Peers by their modules; sqlite3 is a part of Python."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: a scenario with so many threads and operations, and what is to be reached."""

    work: str
    target: str
    scenario: str
    n: int
    threads: int = 1


ROWS = (
    Row("durable send, 1 thread", "0.95 of the bare disk, 1.7 times KahaDB", "send-sync", 8_000),
    Row("the same, 8 threads", "1.8 times KahaDB", "send-sync", 16_000, 8),
    Row("the same, 32 threads", "2.0 times KahaDB", "send-sync", 19_200, 32),
    Row("unsynced send, 1 thread", "4 times KahaDB and the best in Python", "send-nosync", 100_000),
    Row("the same, 8 threads", "5 times the best in Python", "send-nosync", 80_000, 8),
    Row("unsynced `send_many` of 1,000", "1.5 times sqlite3", "send-many", 400_000),
    Row("unsynced send, receive and ack, 1 thread", "2.5 times KahaDB", "send+ack-nosync", 40_000),
    Row("the same, 8 threads on one queue", "0.9 of one thread", "send+ack-nosync", 24_000, 8),
    Row("transaction of 10 sends, one store, 1 thread", "3 times KahaDB", "tx-single-store", 3_000),
    Row("the same, 8 threads", "2.5 times KahaDB", "tx-single-store", 4_800, 8),
    Row("transaction over two stores, 1 thread", "2.5 times mKahaDB", "tx-cross-store-2", 1_200),
    Row("the same, 8 threads", "1.5 times mKahaDB", "tx-cross-store-2", 2_000, 8),
    Row("transaction over four stores, 1 thread", "3 times mKahaDB", "tx-cross-store-4", 800),
    Row("the same, 8 threads", "1.5 times mKahaDB", "tx-cross-store-4", 1_200, 8),
    Row("read in order", "as fast as sqlite3", "drain", 60_000),
    Row("`import`", "250 ms", IMPORT, 1),
)
HEAD = ("work", "target", "Anabranch", "p99", "best in Python", "ratio", "bare disk", "ratio")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.page", description="The table of docs/performance.md.")
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="where to work; must be a disk")
    parser.add_argument("--rows", type=names_of({row.scenario: row for row in ROWS}), help="scenarios (default: all)")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the operations of each run")
    options = parser.parse_args(arguments)
    if not runner.is_on_disk(options.dir):
        return 2
    found: dict[Row, list[dict[str, Any]]] = {}
    for row in ROWS:
        if options.rows is None or row.scenario in options.rows:
            lines = found[row] = []
            for line in runs(row, options.dir, options.rounds, max(1, round(row.n * options.scale))):
                print(json.dumps(line), file=sys.stderr, flush=True)
                lines.append(line)
    machine = f"{os.cpu_count()} processors ({platform.machine()}), {runner.filesystem(options.dir)}"
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    print(f"{machine}, {system}, medians of {options.rounds} rounds\n")
    print(table(found))
    return 0


def runs(row: Row, base: Path, rounds: int, n: int) -> Iterator[dict[str, Any]]:
    """The lines of one row: in each round each peer once, who goes first turns."""
    if row.scenario != IMPORT:
        yield from runner.runs(row.scenario, [OURS, *PYTHON, BARE], base, rounds, n, row.threads)
        return
    for module in IMPORTED:
        seconds_to_import(module)  # its bytecode is written
    for _ in range(rounds):
        for module, peer in IMPORTED.items():
            seconds = seconds_to_import(module)
            yield {"peer": peer, "scenario": IMPORT, "seconds": seconds, "per_second": 1 / seconds, "p99_us": None}


def seconds_to_import(module: str) -> float:
    """Processor time, in a process of its own."""
    program = f"import time; before = time.process_time(); import {module}; print(time.process_time() - before)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return float(run.stdout)


def table(found: Mapping[Row, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown. A ratio above 1: Anabranch is faster."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for row, runs in found.items():
        speeds = {run["peer"]: _median(runs, run["peer"], "per_second") for run in runs}
        ours, late = speeds[OURS], _median(runs, OURS, "p99_us")
        best = max((peer for peer in PYTHON if peer in speeds), key=speeds.__getitem__, default="")
        cells = [row.work, row.target, _speed(row, ours), f"{late / 1000:.1f} ms" if late else ""]
        for peer, name in ((best, f"{best} "), (BARE, "")):
            cells += [name + _speed(row, speeds[peer]), f"{ours / speeds[peer]:.2f}"] if peer in speeds else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _speed(row: Row, per_second: float) -> str:
    return f"{1000 / per_second:.0f} ms" if row.scenario == IMPORT else f"{per_second:,.0f}/s"


def _median(runs: Sequence[Mapping[str, Any]], peer: str, key: str) -> float:
    return median(run[key] or 0.0 for run in runs if run["peer"] == peer)


if __name__ == "__main__":
    sys.exit(main())
