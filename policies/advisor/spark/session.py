"""The Spark session that the advisor runs in: the caller's own where one is active, else a local one.

Under `spark-submit`, or with a `master`, the session is the cluster's. A session that is made here is left running for
the next call, since starting one takes seconds. PySpark starts its Java, which ends when its standard input does: with
the process, however that ends.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, Any

from ...errors import MissingExtraError, SparkError
from .cluster import check_master, is_local, warned_of_waiting
from .java import environment

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

_LOCAL = "local[*]"
_REASON_MAX = 500
_END_TIMEOUT_S = 5
_QUOTED_BYTES = 8000
_QUOTED_LINES = 6
_FRAME = re.compile(r"\s+at |\s+\.\.\. \d+ more")
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


def spark_session(master: str | None = None) -> SparkSession:
    """Return the active session, or a new one on `master` (default: all cores of this machine).

    Raises ConfigError for what is no master, SparkError where the cluster is not there.
    """
    require_spark("the advisor's Spark pass")
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    master = master or os.environ.get("MASTER") or (None if submitted else _LOCAL)
    local = master is not None and is_local(master)
    if master is not None:
        check_master(master)
    configuration = _configuration(master, local)
    waiting = warned_of_waiting(f"Spark's master {master} has not answered yet; still waiting for it")
    failed = spark_errors(f"Spark could not be started on {master or 'the cluster'}")
    conf = SparkConf().setAll([*configuration.items()])
    # The errors inside the Java's block: they are asked for their reasons while it is there to tell them.
    with environment(local=local), started_java(conf) as java, failed, _handler_of_interrupts():
        with nullcontext() if local else waiting:
            if java is not None:
                SparkContext(conf=conf, gateway=java)
            session = SparkSession.builder.config(map={**configuration}).getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        return session


def _configuration(master: str | None, local: bool) -> dict[str, str]:
    configuration: dict[str, str] = {
        "spark.app.name": "anabranch recommend",
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
            "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
        }
    return configuration


@contextmanager
def spark_errors(
    what: str = "Spark did not finish its work", step: str = "mend that, or use --engine local, which needs no Spark"
) -> Iterator[None]:
    """Make a SparkError of one line of what Spark and Py4J raise in the block. `what` begins it, `step` ends it.

    An interruption stays one: a call to Java that Ctrl-C meets fails while it is cleaned up, and so does the next.
    Py4J's lines, which go to the root logger itself, are kept from the log as long as the block lasts.
    """
    root, py4j = logging.getLogger(), logging.getLogger("py4j")
    propagated = py4j.propagate

    def is_not_of_py4j(record: logging.LogRecord) -> bool:
        return not str(record.msg).endswith("while sending command.")

    root.addFilter(is_not_of_py4j)
    py4j.propagate = False
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
    finally:
        root.removeFilter(is_not_of_py4j)
        py4j.propagate = propagated


def kinds_of_spark_errors() -> tuple[type[Exception], ...]:
    """Return the kinds of errors that Spark and Py4J raise, also for a Java that has ended; none without them."""
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
    except ImportError:
        return ()
    return Py4JError, PySparkException, ConnectionError


def reason_of(error: Exception) -> str:
    """Say what an error of the JVM says, in one line: its innermost cause."""
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
def started_java(conf: SparkConf) -> Iterator[Any]:
    """Give a new Java for the SparkContext that is made in the block, None where PySpark has one.

    Its output is kept off the terminal. It is ended if the block does not end. Raises MissingExtraError, with what the
    Java said, where it does not start.
    """
    from pyspark import SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        yield None
        return
    with tempfile.TemporaryFile() as said:
        try:
            # In a session of its own Ctrl-C in a terminal does not reach it, nor what ends a group of processes.
            launch: Any = launch_gateway
            java = launch(conf, {"stdout": said, "stderr": said, "start_new_session": True})
        except PySparkRuntimeError as error:
            raise MissingExtraError(
                "Spark's Java ended before it was ready; set JAVA_HOME to another one, or use the engine local, which "
                f"needs none. It said: {_end_of(said) or 'nothing'}"
            ) from error
    try:
        yield java
    except BaseException:
        # It may be waiting for a master that does not answer: the next call gets another.
        SparkContext._gateway = SparkContext._jvm = None
        if java.proc is not None:  # else spark-submit started it
            _end(java.proc)
        raise


def _end_of(said: IO[bytes]) -> str:
    """Give the last lines, in one, without the frames of stacks: those say nothing to a user."""
    said.seek(max(said.seek(0, os.SEEK_END) - _QUOTED_BYTES, 0))
    lines = said.read().decode(errors="replace").split("\n")
    return " | ".join([line for line in lines if not _FRAME.match(line)][-_QUOTED_LINES:]).strip(" |")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a Java; it is asked first, since one that is killed leaves its scratch directories behind."""
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _handler_of_interrupts() -> Iterator[None]:
    """Put back what handles Ctrl-C: PySpark's handler calls the JVM in the middle of another call to it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
