"""What a real ActiveMQ broker has on disk at the peak beside the files that the retention model keeps.

The model follows messages and acks. A broker adds what depends on its own clock, so that the same operations do not
give the same figure twice:

    the file behind      cleanups find a file free some time after it is; up to one more for each store
    the catch-all        an adapter of its own for all other destinations has a file of its own
    ack compaction       after ten cleanups in vain, acks that hold files are written again at the end: files go that
                         the ack rule would keep, and a small one comes

Fitted to 13 workloads of 10,000 to 47,000 operations that ActiveMQ 5.17 replayed three times each, in one KahaDB and,
where the advisor recommends one, as an mKahaDB: docs/advisor.md has them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokerPeak:
    """Bytes of journal files at the peak: what is to be expected, and between which it was always found."""

    bytes: int
    low_bytes: int
    high_bytes: int


def broker_peak(
    files: int, files_compacted: int, stores: int, segment_bytes: int, *, catch_all_beside: bool
) -> BrokerPeak:
    """The peak of a broker with so many stores: one is a KahaDB, several are an mKahaDB.

    `files` is the model's peak, `files_compacted` what it is if every ack were out of the way. `catch_all_beside`:
    whether what the stores do not take has an adapter of its own.
    """
    return BrokerPeak(
        (files + 1 + catch_all_beside) * segment_bytes,
        files_compacted * segment_bytes,
        (files + stores + catch_all_beside + 1) * segment_bytes,
    )
