"""An engine for what the advisor is given: a file, a directory, a URL, a table, a description."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet

from ...errors import ConfigError, TraceError
from ...outputs import is_elsewhere, scratch_directory
from ..model.engine import Engine, LocalEngine
from ..spark.engine import SparkEngine
from ..spark.executors import watched_executors
from ..spark.session import kinds_of_spark_errors, reason_of, require_spark, spark_errors, spark_session
from ..spark.trace import prepare
from ..statistics.operations import build
from ..trace.table import conform, parquet_files, read_trace, trace_path, write_trace
from ..workload.generator import generate, generate_with_spark
from ..workload.workload import Workload
from .options import EngineName, RecommendOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Source: TypeAlias = str | Path | pa.Table | Workload
"""A trace's path on this machine, its URL, its rows, or the description of one."""

LOCAL_OPERATIONS_MAX = 10_000_000
"""The most that `auto` does in this process: some 4 GB of memory and half a minute, a fifth of what it takes Spark."""
LOCAL_OPERATION_BYTES = 400
"""Bytes of memory in this process, at most."""
_PARQUET = (".parquet", ".pq")


class EngineChoice(NamedTuple):
    """The engine that does the work, and why: the words behind `since`."""

    name: Literal["spark", "local"]
    why: str


def choose_engine(source: Source, engine: EngineName, master: str | None) -> EngineChoice:
    """Say who does the work. `auto`: Spark where a master is named, for other file systems, and for a large trace.

    How large a trace is can be told of Parquet, tables and descriptions beforehand; other files are read here anyway.
    Raises MissingExtraError where that comes to Spark, which is not installed.
    """
    if engine != "auto":
        return EngineChoice(engine, f"--engine {engine} asks for it")
    if master is not None:
        require_spark(f"--master {master}")
        return EngineChoice("spark", f"--master {master} asks for it")
    if is_elsewhere(source):
        require_spark(str(source))
        return EngineChoice("spark", f"{source} is on another file system")
    count, limit = _operations(source), f"{LOCAL_OPERATIONS_MAX:,} that this process takes by itself"
    if not count:
        return EngineChoice("local", "a file that is not Parquet is read by this process anyway")
    if count <= LOCAL_OPERATIONS_MAX:
        return EngineChoice("local", f"{count:,.0f} operations are within the {limit}")
    name = str(source) if isinstance(source, (str, Path)) else "the trace"
    require_spark(
        f"{name}, with {count:,.0f} operations more than the {limit},",
        f", or give --engine local and some {ceil(count * LOCAL_OPERATION_BYTES / 1e9):,} GB of memory",
    )
    return EngineChoice("spark", f"{count:,.0f} operations are more than the {limit}")


def _operations(source: Source) -> float:
    if isinstance(source, Workload):
        return source.operations
    if isinstance(source, pa.Table):
        return float(source.num_rows)
    path = trace_path(source)
    files = parquet_files(path) if path.is_dir() else [path] if path.name.lower().endswith(_PARQUET) else []
    try:
        return float(sum(pyarrow.parquet.read_metadata(file).num_rows for file in files))
    except (pa.ArrowException, OSError):
        return 0.0  # whoever reads it tells what is wrong


@contextmanager
def open_engine(
    source: Source, options: RecommendOptions, report: Callable[[str, float], None], **more: Any
) -> Iterator[Engine]:
    """Open a trace, checked, and keep it as long as the block lasts. Raises TraceError where it cannot be used. `more`
    goes to Spark's `prepare`."""
    name = str(source) if isinstance(source, (str, Path)) else "the trace"
    rules: dict[str, Any] = {
        "model": options.model,
        "clock": options.clock,
        "operations_per_second": options.operations_per_second,
        "sizes": options.sizes,
        "source": name,
    }
    if choose_engine(source, options.engine, options.master).name == "local":
        table = _table(source)
        report("read", 1.0)
        yield LocalEngine(build(table, **rules))
        return
    if not is_elsewhere(source) and isinstance(source, (str, Path)) and not trace_path(source).exists():
        raise TraceError(
            f"there is no trace at {source}; give a .parquet, .arrow or .csv file or a directory of Parquet"
        )
    report("start Spark", 0.0)
    with spark_errors(), scratch_directory(Path(tempfile.gettempdir()), "anabranch") as scratch:
        spark = spark_session(options.master)
        report("start Spark", 1.0)
        with watched_executors(spark):
            rows = _frame(spark, source, scratch)
            try:
                with closing(prepare(spark, rows, **rules, **more)) as trace:
                    report("read", 1.0)
                    yield SparkEngine(trace)
            finally:
                if isinstance(source, Workload):  # what is read from files may be kept by others
                    rows.unpersist()


def _table(source: Source) -> pa.Table:
    if isinstance(source, Workload):
        return generate(source)
    if isinstance(source, pa.Table):
        return conform(source)
    if is_elsewhere(source):
        raise ConfigError(
            [f"{source} is read by Spark alone; leave --engine local out, or copy the trace to this machine"]
        )
    return read_trace(source)


def _frame(spark: SparkSession, source: Source, scratch: Path) -> DataFrame:
    """Give Spark the trace as its workers read it. Anything but Parquet goes through this process, and a copy in
    `scratch`."""
    if isinstance(source, Workload):
        from pyspark import StorageLevel

        # Kept, since it is read several times, and making it costs more than reading it.
        return generate_with_spark(spark, source).persist(StorageLevel.DISK_ONLY)
    if isinstance(source, (str, Path)):
        if is_elsewhere(source):
            return _parquet(spark, str(source), directory=not str(source).lower().endswith(_PARQUET))
        path = trace_path(source).absolute()
        if path.is_dir() or path.name.lower().endswith(_PARQUET):
            return _parquet(spark, path.as_uri(), directory=path.is_dir())
    write_trace(_table(source), scratch / "trace.parquet")
    return spark.read.parquet((scratch / "trace.parquet").as_uri())


def _parquet(spark: SparkSession, url: str, *, directory: bool) -> DataFrame:
    from pyspark.errors import AnalysisException

    reader = spark.read
    if directory:  # as it is read in this process: all that is called so, at any depth
        reader = reader.option("recursiveFileLookup", "true").option("pathGlobFilter", "*.parquet")
    try:
        return reader.parquet(url)
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            raise TraceError(f"there is no trace at {url}; give a directory of Parquet, or a .parquet file") from None
        if error.getCondition() == "UNABLE_TO_INFER_SCHEMA":
            raise TraceError(f"{url} holds no .parquet file; give a directory of Parquet, or a file") from None
        raise TraceError(f"{url} cannot be read: {reason_of(error)}") from error
    except kinds_of_spark_errors() as error:
        raise TraceError(
            f"{url} cannot be read by Spark: {reason_of(error)}; check the URL, and that its file system is there"
        ) from error
