"""The summary that the search runs on stays small: longer buckets where messages stay long, and the same advice."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from anabranch.policies.advisor import RecommendOptions, Workload, generate, recommend
from anabranch.policies.advisor.search import confirm
from anabranch.policies.advisor.statistics import summary
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.statistics.summary import Summary, summarise

from .conftest import SEGMENT_BYTES


def rows(found: Summary) -> int:
    return len(found.byte_sum) + len(found.life_time)


def longer_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they ever are."""
    monkeypatch.setattr(summary, "ROWS_MAX", 0)
    monkeypatch.setattr(summary, "ROWS_A_DESTINATION", 0)


@pytest.mark.parametrize("model", ["anabranch", "kahadb"])
def test_longer_buckets_change_no_recommendation(
    shaped: tuple[str, pa.Table], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the six shapes, by the summary alone: without the last local search by exact figures."""
    _, table = shaped
    monkeypatch.setattr(confirm, "EXACT_OPERATIONS_MAX", 0)
    options = RecommendOptions(model=model, segment_bytes=SEGMENT_BYTES, engine="local")
    operations = build(table, model=model)
    short, before = summarise(operations, SEGMENT_BYTES), recommend(table, options).recommended
    longer_buckets(monkeypatch)
    long, after = summarise(operations, SEGMENT_BYTES), recommend(table, options).recommended
    assert 3 * len(long.bucket_start) < len(short.bucket_start)
    assert rows(long) < rows(short) / 2
    assert after == before


def test_rows_are_bounded_whatever_messages_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they stay so long that each bucket's are acked in all later ones."""
    loads = "\n".join(
        f"  - {{name: queue://q{i}, arrival: {{poisson: 2}}, size: 900, consumer: {{lag: {{mean: {60 * 4**i}}}}}}}"
        for i in range(6)
    )
    operations = build(generate(Workload.parse(f"duration: 3h\ndestinations:\n{loads}")))
    whole = summarise(operations, 4 << 10)
    monkeypatch.setattr(summary, "ROWS_A_DESTINATION", 0)
    for most in (100_000, 60_000):
        monkeypatch.setattr(summary, "ROWS_MAX", most)
        found = summarise(operations, 4 << 10)
        assert most / 2 < rows(found) <= most < rows(whole)
        assert summary.BUCKETS_LEAST < len(found.bucket_start) < len(whole.bucket_start)
    longer_buckets(monkeypatch)
    assert len(summarise(operations, 4 << 10).bucket_start) - 2 <= summary.BUCKETS_LEAST


def test_a_summary_that_is_small_enough_is_as_fine_as_it_was(shaped: tuple[str, pa.Table]) -> None:
    operations = build(shaped[1])
    count, total = len(operations), float(operations.size.sum())
    length = int(count / max(4 * total / SEGMENT_BYTES, 1024))
    assert len(summarise(operations, SEGMENT_BYTES).bucket_start) == -(-count // length) + 1
