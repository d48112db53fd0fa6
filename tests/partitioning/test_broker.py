"""The peak expected of an ActiveMQ broker, against those that ActiveMQ 5.17 was seen to have."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import yaml

from anabranch.policies.advisor import Workload
from anabranch.policies.advisor.model.broker import BrokerPeak, broker_peak, expected_files

SEGMENT = 512 << 10
WORKLOADS = Path(__file__).parent / "broker_workloads.yaml"
FITTED = ("tenants", "stages", "retries", "reports", "imports", "checkout", "forgotten", "ladder")
MEASURED = [
    # workload; files that looks are expected to find, the model's most, its peak without the ack rule, stores; measured
    # least, mean and most of six, in files. The mKahaDBs have no adapter beside the stores.
    ("tenants", 7.00, 7, 7, 1, 6.0, 6.86, 7.14),
    ("tenants", 3.09, 4, 3, 2, 3.13, 3.46, 4.0),
    ("stages", 8.00, 8, 8, 1, 8.0, 8.00, 8.0),
    ("stages", 5.00, 5, 5, 2, 5.19, 5.21, 5.23),
    ("retries", 6.00, 6, 6, 1, 6.0, 6.17, 6.21),
    ("retries", 3.00, 3, 2, 2, 3.0, 3.00, 3.0),
    ("reports", 7.00, 7, 7, 1, 7.0, 7.12, 7.35),
    ("reports", 4.11, 5, 4, 2, 4.0, 4.21, 4.32),
    ("imports", 11.00, 11, 10, 1, 11.0, 11.00, 11.0),
    ("checkout", 9.00, 9, 9, 1, 9.0, 9.05, 9.28),
    ("checkout", 6.01, 7, 6, 2, 6.22, 6.27, 6.36),
    ("forgotten", 28.79, 29, 27, 1, 28.64, 28.96, 29.22),
    ("forgotten", 2.32, 3, 2, 2, 3.0, 3.00, 3.0),
    ("ladder", 12.00, 12, 12, 1, 12.22, 12.30, 12.47),
    ("ladder", 4.00, 4, 4, 2, 4.11, 4.17, 4.35),
    ("toymaker", 44.00, 44, 18, 1, 43.87, 45.83, 46.92),
    ("toymaker", 7.00, 7, 6, 2, 6.67, 7.50, 7.67),
    ("alike", 1.95, 2, 1, 1, 1.0, 1.83, 2.0),
    ("nightly", 5.15, 6, 5, 1, 5.0, 5.50, 6.0),
    ("slower", 8.00, 8, 8, 1, 8.0, 8.00, 8.0),
    ("slower", 5.26, 6, 5, 2, 5.08, 5.71, 6.0),
    ("uploads", 3.65, 4, 3, 1, 3.0, 3.00, 3.0),
    ("trickle", 29.36, 30, 16, 1, 29.59, 30.12, 30.39),
    ("trickle", 2.09, 3, 2, 2, 2.0, 2.17, 3.0),
    ("regions", 5.05, 6, 5, 1, 5.0, 5.19, 6.0),
    ("regions", 6.00, 6, 5, 2, 6.0, 6.10, 6.15),
]
SMALL = {("forgotten", 2), ("alike", 1), ("uploads", 1)}
"""Of two or three files: one more or less is much of them."""


def expected(files: float, most: int, compacted: int, stores: int) -> BrokerPeak:
    return broker_peak(files, most, compacted, stores, SEGMENT, catch_all_beside=False)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0]}-{row[4]}")
def test_what_a_broker_had_is_as_expected(row: tuple[str, float, int, int, int, float, float, float]) -> None:
    """In the range each time, and within a tenth on average."""
    name, files, most, compacted, stores, least, mean, highest = row
    peak = expected(files, most, compacted, stores)
    assert peak.low_bytes <= least * SEGMENT <= highest * SEGMENT <= peak.high_bytes
    off = 0.85 * SEGMENT if (name, stores) in SMALL else 0.1 * mean * SEGMENT
    assert abs(peak.bytes - mean * SEGMENT) <= off


def test_what_nothing_was_fitted_to_is_no_worse() -> None:
    def errors(*, fitted: bool) -> list[float]:
        return [abs(expected(*row[1:5]).bytes / SEGMENT / row[6] - 1) for row in MEASURED
                if (row[0] in FITTED) is fitted and (row[0], row[4]) not in SMALL]  # fmt: skip

    assert sorted(errors(fitted=False))[-1] <= 0.06 + sorted(errors(fitted=True))[-1]
    assert len(errors(fitted=False)) == 9


def test_the_figure_lies_within_its_range() -> None:
    """Of a short trace looks find few files; a store has one nonetheless."""
    peak = broker_peak(4.4, 5, 5, 5, SEGMENT, catch_all_beside=False)
    assert peak.low_bytes == 5 * SEGMENT <= peak.bytes <= peak.high_bytes


def test_an_adapter_for_all_others_has_a_file_of_its_own() -> None:
    taking, beside = (broker_peak(6.0, 7, 6, 2, SEGMENT, catch_all_beside=one) for one in (False, True))
    assert beside.bytes - taking.bytes == beside.high_bytes - taking.high_bytes == SEGMENT


def test_the_workloads_are_all_there() -> None:
    """Each can be made again as it was replayed; the toy maker's operations lie in examples/."""
    found = [Workload.parse(yaml.safe_dump(one)) for one in yaml.safe_load_all(WORKLOADS.read_text())]
    assert {one.name for one in found} | {"toymaker"} == {row[0] for row in MEASURED}
    assert all(15_000 < one.operations < 50_000 for one in found)


def test_looks_find_what_lasts_and_by_chance_what_does_not() -> None:
    """Beside looks that fall anywhere: a thousand ways, of files that come and go at random."""
    chance = random.Random(1)
    for count in (1, 5, 40):
        start = np.array(sorted(chance.uniform(0, 100) for _ in range(count)))
        end = start + np.array([chance.expovariate(1 / 12) for _ in range(count)])
        for interval in (0.5, 3.0, 11.0):
            phases = [chance.uniform(0, interval) for _ in range(1000)]
            looks = np.array(phases)[:, None] + np.arange(0, 200, interval)
            begun, gone = np.searchsorted(start, looks, "right"), np.searchsorted(np.sort(end), looks, "right")
            found = (begun - gone).max(axis=1)
            assert expected_files(start, end, interval) == pytest.approx(float(np.mean(found)), abs=0.45)


def test_what_is_there_for_long_is_found_whole() -> None:
    start, end = np.array([0.0, 1.0, 2.0]), np.array([10.0, 10.0, 2.5])
    assert expected_files(start, end, 1.0) == pytest.approx(2.5)
    assert expected_files(start, end, 0.5) == 3.0
    assert expected_files(np.empty(0), np.empty(0), 1.0) == 0.0
