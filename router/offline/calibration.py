"""Calibration measures how long the disk of a directory takes for what a journal does under `sync: always`: to write a
little into a file that is there, and to sync it.

    found = calibrate(Path("data"))            # a file of its own is written there, and removed
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

from ...adapters.system.files import sync_data, write_all
from ...policies.errors import PlacementError

WRITES: Final = 500
SECONDS: Final = 5.0
"""At most so many writes, and for so long."""
BLOCK: Final = 4096
TOO_SHORT: Final = 15e-6
"""Seconds in which no disk that has to move or to burn anything can have synced."""
SHORT: Final = 2e-3
"""Seconds for which most callers may wait each time."""
CALLERS: Final = 32
"""Callers of the example who share a sync."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The result of a calibration. Times are seconds."""

    directory: str
    writes: int
    median: float
    p99: float
    longest: float
    doubt: str | None
    """Why the disk may not keep what it says that it has synced; None: nothing speaks for that."""
    configuration: str
    """The option for a journal here."""

    @property
    def alone_per_second(self) -> float:
        """Return how many messages a second one caller sends durably, who waits for each."""
        return 1 / self.median


def calibrate(directory: Path, writes: int = WRITES) -> Calibrated:
    """Measure the disk of a directory. Raises PlacementError where there is none, and OSError."""
    if not directory.is_dir():
        raise PlacementError(f"{directory} is no directory; give one on the disk that is to be measured")
    took = []
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".calibrate-", suffix=".tmp", buffering=0) as file:
        fd = file.fileno()
        write_all(fd, bytes(BLOCK * writes), 0)  # as a journal's files are: no block is allocated while it is measured
        sync_data(fd)
        until = perf_counter() + SECONDS
        for number in range(writes):
            began = perf_counter()
            write_all(fd, os.urandom(256), number * BLOCK)
            sync_data(fd)
            took.append(perf_counter() - began)
            if began > until:
                break
    took.sort()
    median = took[len(took) // 2]
    doubt = None
    if median < TOO_SHORT:
        doubt = (
            f"a sync takes {median * 1e6:.0f} us, in which no disk keeps anything: it is memory (tmpfs), or a disk, a "
            "controller or a virtual machine that keeps it in a cache. Unless that cache outlives a power failure, "
            "what is acknowledged may not"
        )
    choice = "sync: always" if median <= SHORT else "sync: periodic"
    return Calibrated(
        str(directory), len(took), median, took[len(took) * 99 // 100], took[-1], doubt, f"journal: {{{choice}}}"
    )
