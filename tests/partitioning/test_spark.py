"""The trace in Spark's hands against the same trace in this process: every figure the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from anabranch.policies.advisor import RecommendOptions, UsageEvent, from_events, generate, recommend, write_trace
from anabranch.policies.advisor.advice import opening
from anabranch.policies.advisor.advice.opening import choose_engine
from anabranch.policies.advisor.model.cost_model import CostModel, Partition, canonical
from anabranch.policies.advisor.model.engine import Engine, LocalEngine
from anabranch.policies.advisor.spark import trace as spark_trace
from anabranch.policies.advisor.spark.engine import SparkEngine
from anabranch.policies.advisor.spark.trace import prepare
from anabranch.policies.advisor.statistics import summary
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.statistics.summary import Summary
from anabranch.policies.advisor.workload.generator import chunk_count, generate_with_spark
from anabranch.policies.errors import ConfigError, TraceError

from ..shares import Share
from .conftest import EXAMPLES, SEGMENT_BYTES, shape


@contextmanager
def both(
    spark: Any, table: pa.Table, path: Path, rows_a_task: int, model: Any, clock: Any
) -> Iterator[tuple[Engine, Engine]]:
    """The trace here, and in Spark's hands, cut into ranges of about so many rows."""
    pyarrow.parquet.write_table(table, path / "t.parquet", row_group_size=max(table.num_rows // 2, 1))
    trace = prepare(
        spark, spark.read.parquet(str(path / "t.parquet")), model=model, clock=clock, rows_a_task=rows_a_task
    )
    try:
        yield LocalEngine(build(table, model=model, clock=clock)), SparkEngine(trace)
    finally:
        trace.close()


CAMPAIGN = (pytest.mark.campaign, pytest.mark.weight(0))


def assert_same(one: Summary, other: Summary) -> None:
    for field in dataclasses.fields(Summary):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


def assert_engines_agree(here: Engine, there: Engine, partitions: list[Partition], segment_bytes: int) -> None:
    for name in ("destinations", "totals", "transactions", "findings", "sizes", "count", "begin", "finish"):
        assert getattr(there, name) == getattr(here, name), name
    assert there.largest[0] == here.largest[0]
    assert_same(there.summary(segment_bytes), here.summary(segment_bytes))
    for a, b in zip(there.simulate(partitions, segment_bytes), here.simulate(partitions, segment_bytes), strict=True):
        for name in ("store", "start", "end"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for costs in (CostModel(segment_bytes, live_percent=0), CostModel(segment_bytes, min_segments=2)):
        assert there.measure(partitions, costs) == here.measure(partitions, costs)
        for found, expected in zip(there.courses(partitions, costs), here.courses(partitions, costs), strict=True):
            for one, other in zip(found, expected, strict=True):
                for name in ("level", "files"):
                    np.testing.assert_array_equal(getattr(one.course, name), getattr(other.course, name), err_msg=name)
                np.testing.assert_array_equal(one.time, other.time)
    if here.sizes.model == "kahadb":
        assert there.compacted_peaks(partitions, segment_bytes) == here.compacted_peaks(partitions, segment_bytes)


def assert_rows_agree(here: Engine, there: Engine) -> None:
    """Each operation is the same, and so is all that is worked out from them."""
    a, b = here.operations(), there.operations()
    for name in ("destination", "size", "time", "send", "ends", "seq"):
        np.testing.assert_array_equal(getattr(b, name), getattr(a, name), err_msg=name)


def divisions(width: int, random: np.random.Generator) -> list[Partition]:
    """All together, all separate, and one in between."""
    mixed: dict[int, list[int]] = {}
    for destination in range(width):
        mixed.setdefault(int(random.integers(0, 3)), []).append(destination)
    return [canonical([range(width)]), canonical([[d] for d in range(width)]), canonical(list(mixed.values()))]


@pytest.mark.parametrize(
    ("name", "model", "clock"),
    [pytest.param("transactions", "anabranch", "ts", marks=CAMPAIGN), ("topics", "kahadb", "ts")],
)
def test_every_figure_is_that_of_memory(
    spark: Any, tmp_path: Path, name: str, model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a summary with longer buckets, too."""
    # A trace that begins in the middle, and not at 0.
    table = generate(shape(name)).slice(2000)
    with both(spark, table, tmp_path, table.num_rows // 3, model, clock) as (here, there):
        partitions = divisions(len(here.destinations), np.random.default_rng(1))
        assert_engines_agree(here, there, partitions, SEGMENT_BYTES)
        monkeypatch.setattr(summary, "ROWS_MAX", 4000)
        monkeypatch.setattr(summary, "ROWS_A_DESTINATION", 0)
        found = here.summary(SEGMENT_BYTES)
        assert len(found.bucket_start) < 900
        assert_same(there.summary(SEGMENT_BYTES), found)


def kept(spark: Any) -> int:
    """How many frames are kept on workers' disks."""
    return int(spark.sparkContext._jsc.sc().getPersistentRDDs().size())


def test_nothing_stays_kept_after_an_error(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = generate(shape("topics", "5m"))
    before = kept(spark)
    options = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="spark")

    def fails(*_: object) -> None:
        assert kept(spark) > before
        raise TraceError("as if it were wrong")

    # While it is checked, and when all of it is there; of a workload its rows are kept too.
    with monkeypatch.context() as patch, pytest.raises(TraceError, match="as if"):
        patch.setattr(spark_trace, "_check_order", fails)
        recommend(table, options)
    assert kept(spark) == before
    with monkeypatch.context() as patch, pytest.raises(TraceError, match="as if"):
        patch.setattr(SparkEngine, "summary", fails)
        recommend(shape("topics", "5m"), options)
    assert kept(spark) == before


@pytest.mark.weight(0)
def test_two_traces_at_once_in_one_session(spark: Any, tmp_path: Path, share: Share) -> None:
    """Neither is mixed up with the other, and the caller's session has no name that it had not."""
    tables = [generate(shape(name, "5m")) for name in ("topics", "transactions")]
    for number, table in enumerate(tables):
        (tmp_path / str(number)).mkdir()
        assert table.num_rows
    spark.range(3).createOrReplaceTempView("anabranch_rows")
    with (
        both(spark, tables[0], tmp_path / "0", 500, "kahadb", "ts") as (here, there),
        both(spark, tables[1], tmp_path / "1", 500, "kahadb", "seq") as (other_here, other_there),
    ):
        partitions = divisions(len(other_here.destinations), np.random.default_rng(1))
        assert_engines_agree(other_here, other_there, partitions, SEGMENT_BYTES)
        if share.whole:
            partitions = divisions(len(here.destinations), np.random.default_rng(1))
            assert_engines_agree(here, there, partitions, SEGMENT_BYTES)
        assert_rows_agree(here, there)
    assert [view.name for view in spark.catalog.listTables()] == ["anabranch_rows"]
    assert spark.table("anabranch_rows").count() == 3
    spark.catalog.dropTempView("anabranch_rows")


def odd_trace(seed: int) -> pa.Table:
    """Rows out of order, gaps in seq, clocks that jump, ids sent twice, acks early, late, too many and of nothing."""
    random = np.random.default_rng(seed)
    count = int(random.integers(60, 900))
    rows = []
    seq = int(random.integers(-(10**6), 10**6))
    stamp = 1.7e9
    for _ in range(count):
        seq += int(random.choice([1, 1, 1, 7, 10**12]))
        stamp += float(random.choice([0.0, 0.1, 3.0, -20.0], p=[0.4, 0.3, 0.25, 0.05]))
        topic = bool(random.integers(0, 4) == 0)
        name = f"topic://t{random.integers(0, 2)}" if topic else random.choice(["a", "queue://a", "b", "c.d", "e"])
        send = bool(random.random() < 0.55)
        rows.append(
            UsageEvent(
                seq, stamp, "send" if send else "ack", str(name), str(random.integers(0, count // 2)),
                None if random.random() < 0.1 else int(random.choice([0, 60, 300, 5000])),  # type: ignore[arg-type]
                None if random.random() < 0.7 else f"x{random.integers(0, count // 3)}",
                int(random.integers(0, 4)) if topic else 1,
                None,
                int(random.integers(0, 700)) if send and random.random() < 0.6 else None,
            )
        )  # fmt: skip
    order = random.permutation(count)
    return from_events(rows[i] for i in order)


@pytest.mark.weight(0)
def test_what_is_lost_is_made_again_and_is_the_same(spark: Any, tmp_path: Path, share: Share) -> None:
    """Ranges, above all: carries and clocks are told by their numbers. With gaps in seq they are cut by a sample.

    Each figure makes all of it once more. A share asks for the rows, the summary, and what one division keeps.
    """
    table = generate(shape("transactions", "30m"))
    seq = np.arange(table.num_rows) ** 2
    table = table.set_column(0, "seq", pa.array(seq))
    write_trace(table, tmp_path / "t.parquet")
    trace = prepare(spark, spark.read.parquet(str(tmp_path / "t.parquet")), rows_a_task=table.num_rows // 4)
    there, here = SparkEngine(trace), LocalEngine(build(table))
    counts = trace.facts["count"].to_numpy()
    assert len(counts) >= 4 and counts.max() < 1.1 * table.num_rows / 4
    trace.close()  # so that all of it is made anew, by other plans
    partitions = divisions(len(here.destinations), np.random.default_rng(1))
    if share.whole:
        assert_engines_agree(here, there, partitions, SEGMENT_BYTES)
    assert_rows_agree(here, there)
    assert_same(there.summary(SEGMENT_BYTES), here.summary(SEGMENT_BYTES))
    costs = CostModel(SEGMENT_BYTES, min_segments=2)
    assert there.measure(partitions[-1:], costs) == here.measure(partitions[-1:], costs)


@pytest.mark.parametrize(
    ("seed", "model", "clock"),
    [
        pytest.param(2, "anabranch", "ts", marks=CAMPAIGN),
        pytest.param(3, "kahadb", "seq", marks=CAMPAIGN),
        pytest.param(4, "kahadb", "ts", marks=CAMPAIGN),
    ],
)
def test_odd_traces_too(spark: Any, tmp_path: Path, seed: int, model: Any, clock: Any) -> None:
    table = odd_trace(seed)
    with both(spark, table, tmp_path, table.num_rows // 4, model, clock) as (here, there):
        partitions = divisions(len(here.destinations), np.random.default_rng(seed))
        assert_engines_agree(here, there, partitions, 4097 if model == "kahadb" else 8192)
        assert_rows_agree(here, there)


@pytest.mark.parametrize("model", [pytest.param("anabranch", marks=CAMPAIGN), "kahadb"])
def test_recommendation_is_the_same_either_way(spark: Any, toymaker: pa.Table, model: Any) -> None:
    local = RecommendOptions(model=model, segment_bytes=512 << 10, engine="local")
    with_spark = dataclasses.replace(local, engine="spark")
    a, b = recommend(toymaker, local), recommend(toymaker, with_spark)
    assert a.candidates == b.candidates
    assert a.findings == b.findings


def test_bad_traces(spark: Any, tmp_path: Path) -> None:
    """What is wrong is told with a row and its file, and what to do."""
    good = {"op": "send", "destination": "a", "message_id": "1", "ts": 1.7e9, "size": 10}
    columns = "seq long, op string, destination string, message_id string, ts double, size long"

    def refused(*rows: dict[str, Any], schema: str = columns) -> str:
        with pytest.raises(TraceError) as caught:
            prepare(spark, spark.createDataFrame(list(rows), schema), source="t")
        return str(caught.value)

    assert refused(schema="seq long, op string").startswith("t lacks the columns destination, message_id")
    assert "holds no operation" in refused()
    assert refused({**good, "seq": 1}, {**good, "seq": 2, "op": "SEND"}) == (
        "t: seq 2: column op is 'SEND'; only 'send' and 'ack' are known"
    )
    assert "column seq repeats a value 1 time, first 7" in refused({**good, "seq": 7}, {**good, "seq": 7})
    assert "divide milliseconds by 1000" in refused({**good, "seq": 1, "ts": 1.7e12})
    write_trace(from_events([UsageEvent(5, 1.0, "sent", "a", "1", 10)]), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=r"seq 5 of t\.parquet: column op is 'sent'"):
        recommend(tmp_path / "t.parquet", RecommendOptions(engine="spark"))


def test_a_directory_by_url_and_the_same_from_a_workload(spark: Any, tmp_path: Path) -> None:
    workload = shape("topics", "20m")
    table = generate(workload)
    (tmp_path / "trace" / "day=1").mkdir(parents=True)
    write_trace(table.slice(500), tmp_path / "trace" / "day=1" / "b.parquet")
    write_trace(table.slice(0, 500), tmp_path / "trace" / "a.parquet")
    options = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="spark")
    here = recommend(table, dataclasses.replace(options, engine="auto"))
    # Through Hadoop's own file system, as hdfs:// would be.
    there = recommend(f"file://{tmp_path}/trace", options)
    generated = recommend(workload, options)
    assert there.candidates == here.candidates == generated.candidates
    assert there.findings == here.findings == generated.findings
    with pytest.raises(TraceError, match=r"^elsewhere://host/trace cannot be read.*elsewhere"):
        recommend("elsewhere://host/trace", options)
    with pytest.raises(TraceError, match=r"holds no \.parquet file"):
        (tmp_path / "empty").mkdir()
        recommend(tmp_path / "empty", options)


def test_a_workload_by_spark_is_the_same_trace(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.policies.advisor import Workload

    workload = Workload.load(EXAMPLES / "toymaker_workload.yaml").model_copy(update={"duration": 10 * 86400.0})
    assert chunk_count(workload) > 1
    here = generate(workload)
    there = generate_with_spark(spark, workload, 3).toArrow().sort_by("seq")
    assert there.equals(here.cast(there.schema))


def test_who_does_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = generate(shape("topics", "2m"))
    write_trace(table, tmp_path / "t.parquet")
    (tmp_path / "bad.parquet").write_text("no Parquet")
    assert choose_engine(tmp_path / "t.parquet", "auto", None).name == "local"
    assert choose_engine(tmp_path / "bad.parquet", "auto", None).name == "local"
    assert choose_engine("hdfs://namenode/usage", "auto", None).name == "spark"
    assert choose_engine(table, "auto", "spark://host:7077").name == "spark"
    assert choose_engine("hdfs://namenode/usage", "local", None).name == "local"
    monkeypatch.setattr(opening, "LOCAL_OPERATIONS_MAX", table.num_rows - 1)
    for source in (table, tmp_path / "t.parquet", str(tmp_path)):
        assert choose_engine(source, "auto", None).name == ("local" if source == str(tmp_path) else "spark")
    (tmp_path / "bad.parquet").unlink()
    assert choose_engine(str(tmp_path), "auto", None).name == "spark"
    assert choose_engine(table, "local", None).name == "local"
    with pytest.raises(ConfigError, match="hdfs://namenode/usage is read by Spark alone"):
        recommend("hdfs://namenode/usage", RecommendOptions(engine="local"))
