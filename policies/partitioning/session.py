"""The Spark session that the advisor runs in: the caller's own where one is active, else a local one.

Under `spark-submit`, or with a `master`, the session is the cluster's. A session that is made here is left running for
the next call, since starting one takes seconds; it ends with the process.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from ..errors import MissingExtraError
from .java import prepare_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCAL = "local[*]"


def spark_session(master: str | None = None, *, shuffle_partitions: int | None = None) -> SparkSession:
    """The active session, or a new one on `master` (default: all cores of this machine).

    `shuffle_partitions` holds for a session that is made here; default: twice the cores, 200 on a cluster.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingExtraError(
            "the advisor's Spark pass needs pyspark; run: pip install 'anabranch[recommend]'"
        ) from error
    # Said once a module, of parts that are not used here.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    master = master or os.environ.get("MASTER") or (None if submitted else _LOCAL)
    local = master is not None and master.startswith("local")
    prepare_environment(local=local)
    builder = (
        SparkSession.builder.appName("anabranch recommend")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
    )
    if master is not None:
        builder = builder.master(master)
    if local:
        builder = (
            builder.config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "4g")
            .config("spark.sql.shuffle.partitions", str(shuffle_partitions or 2 * (os.cpu_count() or 1)))
        )
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
