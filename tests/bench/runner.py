"""Runs a scenario's peers in turn, each in a process and a directory of its own."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from . import peers
from .scenarios import SCENARIOS, Run


def left_out(scenario: str, names: Sequence[str]) -> dict[str, list[str]]:
    """The peers that cannot do a scenario, each with the calls that it lacks."""
    lacking = {name: SCENARIOS[scenario].lacking(peers.load(name)) for name in names}
    return {name: calls for name, calls in lacking.items() if calls}


def runs(
    scenario: str, names: Sequence[str], base: Path, rounds: int, n: int | None = None, threads: int = 1
) -> Iterator[dict[str, Any]]:
    """One line for each round and peer. The peers take turns, and who goes first turns from round to round."""
    unfit = left_out(scenario, names)
    fit = [name for name in names if name not in unfit]
    threads = threads if SCENARIOS[scenario].threads else 1
    n = max(n or SCENARIOS[scenario].n, threads)
    for turn in range(rounds if fit else 0):
        first = turn % len(fit)
        for peer in fit[first:] + fit[:first]:
            yield in_process(peer, scenario, base, n, threads)


def in_process(peer: str, scenario: str, base: Path, n: int, threads: int) -> dict[str, Any]:
    """One run in a process of its own: no peer inherits another's threads, caches or garbage."""
    directory = Path(tempfile.mkdtemp(prefix=f"{scenario}-{peer}-", dir=base))
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(measure, peer, scenario, directory, n, threads).result()
    finally:
        shutil.rmtree(directory)


def measure(peer: str, scenario: str, directory: Path, n: int, threads: int) -> dict[str, Any]:
    result = SCENARIOS[scenario].run(Run(peers.load(peer), directory, n, threads))
    return result.line(peer, scenario, threads)


def is_on_disk(directory: Path) -> bool:
    """Makes the directory, and tells whoever runs a benchmark if that is in memory."""
    directory.mkdir(parents=True, exist_ok=True)
    on_disk = filesystem(directory) not in {"tmpfs", "ramfs"}
    if not on_disk:
        print(f"{directory} is in memory, where a sync costs nothing: give a --dir on a disk", file=sys.stderr)
    return on_disk


def filesystem(directory: Path) -> str:
    """The type of the file system that a directory is on; empty where the system does not tell."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    path, found = directory.resolve(), ("", "")
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, after.split()[0])
    return found[1]
