"""The Spark session that the advisor runs in: the caller's own where one is active, else a local one.

Under `spark-submit`, or with a `master`, the session is the cluster's. A session that is made here is left running for
the next call, since starting one takes seconds; it ends with the process.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from ...errors import MissingExtraError, SparkError
from .cluster import check_master, is_local, told_to_wait
from .java import prepare_environment
from .jvm import gateway

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCAL = "local[*]"
_REASON_MAX = 500
_NO_MODULE = re.compile(r"No module named '(\w+)")
WORKERS_NEED = "numpy, pyarrow and numba, and for a workload this package"


def require_spark(what: str, otherwise: str = "") -> None:
    """Raise MissingExtraError, saying that `what` needs PySpark and what else could be done, where it is not there."""
    try:
        import pyspark  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs PySpark, which is not installed; run: pip install 'anabranch[recommend]'{otherwise}"
        ) from error


def spark_session(master: str | None = None, *, shuffle_partitions: int | None = None) -> SparkSession:
    """The active session, or a new one on `master` (default: all cores of this machine).

    `shuffle_partitions` holds for a session that is made here; default: twice the cores, 200 on a cluster. Raises
    ConfigError for what is no master, SparkError where the cluster is not there.
    """
    require_spark("the advisor's Spark pass")
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    master = master or os.environ.get("MASTER") or (None if submitted else _LOCAL)
    local = master is not None and is_local(master)
    if master is not None:
        check_master(master)
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
    waiting = told_to_wait(f"Spark's master {master} has not answered yet; still waiting for it")
    # The errors inside the gateway: they are asked for their reasons while its Java is there to tell them.
    failed = spark_errors(f"Spark could not be started on {master or 'the cluster'}")
    with _own_gateway(configuration), failed, _handler_of_interrupts(), nullcontext() if local else waiting:
        session = SparkSession.builder.appName("anabranch recommend").config(map=configuration).getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
    return session


@contextmanager
def spark_errors(
    what: str = "Spark did not finish its work",
    step: str = "mend that, or use --engine local, which needs no Spark",
) -> Iterator[None]:
    """Makes a SparkError of one line of what Spark and Py4J raise in the block. `what` begins it, `step` ends it.

    An interruption stays one: a call to Java that Ctrl-C meets fails while it is cleaned up, and so does the next.
    """
    try:
        yield
    except kinds_of_spark_errors() as error:
        met = error.__context__
        while met is not None and not isinstance(met, KeyboardInterrupt):
            met = met.__context__
        if met is not None:
            raise met from None
        reason = reason_of(error)
        if missing := _NO_MODULE.search(reason):
            step = f"install {missing[1]} for the Python of Spark's workers, which needs {WORKERS_NEED}"
        raise SparkError(f"{what}: {reason}; {step}") from error


def kinds_of_spark_errors() -> tuple[type[Exception], ...]:
    """What Spark and Py4J raise, a Java that has ended too; nothing where they are not installed."""
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
    except ImportError:
        return ()
    return Py4JError, PySparkException, ConnectionError


def reason_of(error: Exception) -> str:
    """What an error of the JVM says, in one line: its innermost cause."""
    told = ""
    try:
        java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
        while java is not None:
            told, java = str(java.toString()), java.getCause()
        told = told or str(error)
    except Exception:  # that JVM is gone; then what it said before is all there is
        told = told or "its Java has ended"
    lines = (told.strip() or type(error).__name__).splitlines()  # others are the stack, or advice, or a number
    lines = [line for line in lines if not line.strip().startswith("SQLSTATE:")] or lines
    # A Python of a worker tells its reason last.
    return lines[-1 if "Traceback" in lines[0] else 0].strip()[:_REASON_MAX]


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
