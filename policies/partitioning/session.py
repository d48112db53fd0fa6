"""The Spark session that the advisor runs in: the caller's own where one is active, else a local one.

Under `spark-submit`, or with a `master`, the session is the cluster's. A session that is made here is left running for
the next call, since starting one takes seconds; it ends with the process.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import MissingExtraError
from .java import prepare_environment
from .jvm import gateway

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
    configuration: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
    }
    if master is not None:
        configuration["spark.master"] = master
    if local:
        configuration |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "4g",
            "spark.sql.shuffle.partitions": str(shuffle_partitions or 2 * (os.cpu_count() or 1)),
        }
    with _own_gateway(configuration), _handler_of_interrupts():
        session = SparkSession.builder.appName("anabranch recommend").config(map=configuration).getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
    return session


@contextmanager
def _own_gateway(configuration: Mapping[str, object]) -> Iterator[None]:
    """A gateway that ends with us, where there is none yet; PySpark's own way where process groups are unknown."""
    from pyspark import SparkContext

    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ or os.name != "posix":
        yield
        return
    try:
        with gateway(configuration):
            yield
    except BaseException:
        # Else the next call would talk to the one that was killed.
        SparkContext._gateway = SparkContext._jvm = None
        raise


@contextmanager
def _handler_of_interrupts() -> Iterator[None]:
    """Puts back what handles Ctrl-C: PySpark's handler calls the JVM in the middle of another call to it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
