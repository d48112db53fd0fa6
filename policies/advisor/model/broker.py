"""The disk that a real ActiveMQ broker takes at the peak beside the files that the retention model keeps.

The model follows messages and acks. The view of a broker depends on its own clock too, so that the same operations do
not give the same figure twice:

    when one looks       a number of files that lasts for a moment is found by few looks, between two of which
                         `LOOK_SEGMENTS` are written: expected is the most that they find on average
    the catch-all        an adapter of its own for all other destinations has a file of its own
    ack compaction       after ten cleanups in vain, acks that hold files are written again, into a small file: files go
                         that the ack rule would keep, or none does, and the small one comes
    its own records      at each checkpoint, some 1.2 KB a store that was sent to: files end a little earlier

`BESIDE_FILES` stands for the last two: it is what 8 workloads had more than is expected, on average. These and 7 others
are in docs/advisor.md: ActiveMQ 5.17 replayed each six times, in one KahaDB and, where the advisor recommends one, as
an mKahaDB. No number was fitted to the 7, but how looks are counted was chosen after all 15 had been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..trace.arrays import Floats
from .cost_model import open_at, stretches

LOOK_SEGMENTS = 0.5
BESIDE_FILES = 1 / 6
COMPACTION_FILES = 1 / 16
"""Small files of compacted acks beside each file, at most, where there is something to compact."""


@dataclass(frozen=True, slots=True)
class BrokerPeak:
    """Bytes of journal files at the peak: what is to be expected, and between which it was always found."""

    bytes: int
    low_bytes: int
    high_bytes: int


def broker_peak(
    files: float, files_most: int, files_compacted: int, stores: int, segment_bytes: int, *, catch_all_beside: bool
) -> BrokerPeak:
    """Estimate the peak of a broker with so many stores: one is a KahaDB, several are an mKahaDB.

    `files` is `expected_files`, `files_most` the model's most at any moment, `files_compacted` its peak if every ack
    were out of the way. `catch_all_beside`: whether what the stores do not take has an adapter of its own.
    """
    small = files_most * COMPACTION_FILES if files_compacted < files_most else 0.0
    least = max(stores, files_compacted - 1)  # an adapter has a file from the broker's start, whenever one looks
    return BrokerPeak(
        round((max(files, least) + BESIDE_FILES + catch_all_beside) * segment_bytes),
        least * segment_bytes,
        round((files_most + small + stores + catch_all_beside) * segment_bytes),
    )


def expected_files(start: Floats, end: Floats, interval: float) -> float:
    """Estimate how many of these files looks so far apart find at most. Each is there from `start` to `end`.

    A number of files that lasts as long is found for sure; each shorter spell of it by chance, independently: where
    files end at even intervals, looks at even ones would depend on how both fall together.
    """
    at, level = open_at(start, end)
    expected = 0.0
    for number in range(1, int(level.max(initial=0)) + 1):
        lengths = stretches(at, level >= number)
        expected += 1.0 - float(np.prod(1.0 - np.minimum(lengths / interval, 1.0)))
    return expected
