"""The peak expected of an ActiveMQ broker, against those that ActiveMQ 5.17 was seen to have."""

from __future__ import annotations

import pytest

from anabranch.policies.partitioning.broker import broker_peak

SEGMENT = 512 << 10
MEASURED = [
    # workload; the model's peak in files, without the ack rule, stores; measured least and most of three, in files.
    # With several stores an adapter for all other destinations was beside them.
    ("batch", 6, 6, 1, 7.36, 7.36),
    ("batch", 2, 2, 2, 3.0, 4.0),
    ("burst", 3, 3, 1, 4.0, 4.01),
    ("dlq", 30, 16, 1, 26.87, 28.19),
    ("dlq", 2, 2, 2, 3.0, 4.0),
    ("equal", 1, 1, 1, 2.0, 2.0),
    ("growing", 18, 18, 1, 19.25, 19.25),
    ("growing", 6, 6, 2, 7.0, 7.0),
    ("large", 7, 7, 1, 7.0, 7.0),
    ("offline", 14, 14, 1, 14.16, 14.31),
    ("offline", 4, 4, 2, 6.0, 6.0),
    ("random", 21, 21, 1, 22.11, 22.23),
    ("random", 17, 17, 2, 19.1, 19.12),
    ("spanning", 10, 10, 1, 11.17, 11.51),
    ("speeds", 7, 7, 1, 8.16, 8.17),
    ("speeds", 3, 3, 2, 5.17, 5.17),
    ("topical", 24, 24, 1, 25.0, 25.0),
    ("topical", 11, 11, 3, 12.01, 13.0),
    ("toymaker", 44, 18, 1, 36.37, 38.02),
    ("toymaker", 6, 6, 2, 8.67, 8.67),
    ("trickle", 38, 29, 1, 35.84, 36.02),
    ("trickle", 2, 2, 2, 4.0, 4.0),
]


@pytest.mark.parametrize(("files", "compacted", "stores", "least", "most"), [row[1:] for row in MEASURED])
def test_what_a_broker_had_is_in_the_range(files: int, compacted: int, stores: int, least: float, most: float) -> None:
    peak = broker_peak(files, compacted, stores, SEGMENT, catch_all_beside=stores > 1)
    assert peak.low_bytes <= least * SEGMENT <= most * SEGMENT <= peak.high_bytes


def test_a_store_that_takes_all_others_too_saves_a_file() -> None:
    """The toy maker in two stores: measured 7.67 files where one took all others, 8.67 where a third adapter did."""
    taking, beside = (broker_peak(6, 6, 2, SEGMENT, catch_all_beside=one) for one in (False, True))
    for peak, measured in ((taking, 7.67), (beside, 8.67)):
        assert abs(peak.bytes - measured * SEGMENT) < SEGMENT
        assert peak.low_bytes <= measured * SEGMENT <= peak.high_bytes


def test_where_nothing_is_compacted_the_figure_is_near() -> None:
    """Within a file: a tenth, from ten files on."""
    for name, files, compacted, stores, least, most in MEASURED:
        if files == compacted:
            expected = broker_peak(files, compacted, stores, SEGMENT, catch_all_beside=stores > 1).bytes
            assert abs(expected - (least + most) / 2 * SEGMENT) <= SEGMENT, name
