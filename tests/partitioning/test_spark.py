"""The Spark passes against the same work in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anabranch.policies.errors import TraceError
from anabranch.policies.partitioning import RecommendOptions, UsageEvent, from_events, generate, recommend, write_trace
from anabranch.policies.partitioning.generator import chunk_count, generate_with_spark
from anabranch.policies.partitioning.operations import build
from anabranch.policies.partitioning.spark_summary import summarise_with_spark
from anabranch.policies.partitioning.summary import Summary, summarise

from .conftest import EXAMPLES, SEGMENT_BYTES, shape


def assert_same(one: Summary, other: Summary) -> None:
    for field in dataclasses.fields(Summary):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_allclose(a, b, rtol=1e-12, err_msg=field.name)
        else:
            assert a == b, field.name


@pytest.mark.parametrize(
    ("name", "model", "clock"),
    [("transactions", "anabranch", "ts"), ("topics", "kahadb", "ts"), ("never-acked", "kahadb", "seq")],
)
def test_summary_is_that_of_memory(spark: Any, tmp_path: Path, name: str, model: Any, clock: Any) -> None:
    table = generate(shape(name))
    # A trace that begins in the middle, and not at 0.
    table = table.slice(2000)
    write_trace(table, tmp_path / "t.parquet")
    here = summarise(build(table, model=model, clock=clock), SEGMENT_BYTES)
    stages: list[float] = []
    there = summarise_with_spark(
        spark,
        spark.read.parquet(str(tmp_path / "t.parquet")),
        SEGMENT_BYTES,
        model=model,
        clock=clock,
        progress=lambda stage, share: stages.append(share),
    )
    assert_same(there, here)
    assert stages == sorted(stages)
    assert stages[-1] == 1.0


def test_topics_repeated_sends_and_missing_columns(spark: Any) -> None:
    """Messages with some, none, all and too many of their acks; a bare name; one size, the others not known."""
    rows = [
        ("send", "topic://t", "1", 2), ("send", "topic://t", "2", 2), ("send", "topic://t", "3", 2),
        ("send", "topic://t", "4", 0), ("send", "q", "1", 1), ("ack", "topic://t", "1", 1),
        ("ack", "topic://t", "2", 1), ("ack", "topic://t", "2", 1), ("ack", "queue://q", "1", 1),
        ("ack", "q", "1", 1), ("send", "q", "5", 1), ("ack", "q", "unknown", 1),
    ]  # fmt: skip
    table = from_events(
        UsageEvent(10 + 3 * i, float(i), op, name, message, 0 if i else 300, None, needed)
        for i, (op, name, message, needed) in enumerate(rows)
    )
    frame = spark.createDataFrame(table.select(["seq", "ts", "op", "destination", "message_id", "size", "acks_needed"]))
    here = summarise(build(table, model="kahadb"), 4096)
    assert_same(summarise_with_spark(spark, frame, 4096, model="kahadb"), here)


def test_recommendation_is_the_same_either_way(spark: Any, toymaker: pa.Table) -> None:
    local = RecommendOptions(model="kahadb", segment_bytes=512 << 10, engine="local")
    with_spark = dataclasses.replace(local, engine="spark")
    a, b = recommend(toymaker, local), recommend(toymaker, with_spark)
    assert a.candidates == b.candidates


def test_bad_traces(spark: Any) -> None:
    frame = spark.createDataFrame([(1, "send")], "seq long, op string")
    with pytest.raises(TraceError, match="lacks the columns destination, message_id"):
        summarise_with_spark(spark, frame, 4096)
    empty = spark.createDataFrame([], "seq long, op string, destination string, message_id string, ts double")
    with pytest.raises(TraceError, match="holds no operation"):
        summarise_with_spark(spark, empty, 4096)


def test_a_workload_by_spark_is_the_same_trace(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.policies.partitioning import Workload

    workload = Workload.load(EXAMPLES / "toymaker_workload.yaml").model_copy(update={"duration": 10 * 86400.0})
    assert chunk_count(workload) > 1
    here = generate(workload)
    there = generate_with_spark(spark, workload, 3).toArrow().sort_by("seq")
    assert there.equals(here.cast(there.schema))
