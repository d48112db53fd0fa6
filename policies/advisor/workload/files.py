"""A workload's trace as a directory of Parquet that Spark's workers write: none of it comes here."""

from __future__ import annotations

from pathlib import Path

from ...errors import SparkError
from ...outputs import is_elsewhere, local_path
from ..spark.executors import watched_executors
from ..spark.hadoop import file_system
from ..spark.session import require_spark, spark_errors, spark_session
from .generator import generate_with_spark
from .workload import Workload


def write_workload(workload: Workload, out: str | Path, *, master: str | None = None, overwrite: bool = False) -> int:
    """Write the trace of a workload to a directory, a path that all workers see or a URL. Return the operations.

    It appears whole or not at all, as far as its file system renames at once. With `overwrite` it takes the place of
    one that holds Parquet alone. Raises ConfigError where it would be in the way of something, or not this user's to
    write; SparkError where Spark fails.
    """
    require_spark("a trace that is written by Spark")
    from pyspark.errors import AnalysisException
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    url = str(out) if is_elsewhere(out) else local_path(out, "out").absolute().as_uri()
    with file_system(url, master) as files:
        files.check_new_directory(url, overwrite=overwrite)
        spark = spark_session(master)
        made = Observation()

        def write(place: str) -> None:
            trace = generate_with_spark(spark, workload)
            trace.observe(made, count(lit(1)).alias("rows")).write.option("compression", "zstd").parquet(place)
            # Workers that do not see the place write to disks of their own, and Spark calls that a success.
            try:
                there = spark.read.parquet(place).count()
            except AnalysisException:  # there is no file at all
                there = 0
            if there != made.get["rows"]:
                raise SparkError(
                    f"{out}: the workers made {made.get['rows']} operations, and {there} arrived; give a path that "
                    "each of them sees, or a URL"
                )

        with spark_errors(), watched_executors(spark):
            files.write_directory(url, write, overwrite=overwrite)
        return int(made.get["rows"])
