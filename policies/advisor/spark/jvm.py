"""Starts Spark's Java so that it ends with us and keeps quiet.

PySpark can start it too, but an interruption meanwhile leaves that one running, and what it says goes to the terminal.
Here it gets a process group of its own, which Ctrl-C in a terminal does not reach and which is killed when starting is
given up; what it says goes to a file without a name, whose end is quoted when it does not start.

What PySpark relies on stays: the gateway writes its port and secret into a file that it is told of, and ends when its
standard input does, so also when this process is killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import struct
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from ...errors import MissingExtraError
from ...outputs import scratch_directory

_POLL_S: Final = 0.05
_END_TIMEOUT_S: Final = 10
_ASKED_TIMEOUT_S: Final = 5
_QUOTED_BYTES: Final = 8000
_QUOTED_LINES: Final = 6
_FRAME: Final = re.compile(r"\s+at |\s+\.\.\. \d+ more")
_started = False
"""Whether this process has begun to start one."""
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"


@contextmanager
def gateway(configuration: Mapping[str, object]) -> Iterator[None]:
    """A JVM for the SparkContext that is made in the block; killed with all its children if the block does not end.

    After the block it lives until this process exits. `configuration`: what has to be on Spark's command line, such as
    the driver's memory. Raises MissingExtraError where it does not start.
    """
    global _started
    _started = True
    # The JVM writes to the file as long as it lives; here it is only read until that is ready.
    with (
        tempfile.TemporaryFile() as said,
        scratch_directory(Path(tempfile.gettempdir()), "anabranch") as directory,
    ):
        process = _start(configuration, directory / "gateway", said)
        try:
            port, secret = _connection(process, directory / "gateway", said)
            os.environ |= {_PORT: str(port), _SECRET: secret}
            try:
                yield
            finally:
                # Whoever finds them takes this process for one that spark-submit started.
                del os.environ[_PORT], os.environ[_SECRET]
        except BaseException:
            _kill(process)
            raise
    atexit.register(_end, process, os.getpid())


@contextmanager
def quiet_py4j() -> Iterator[None]:
    """Keeps from the log the tracebacks that Py4J writes when Ctrl-C meets a call; the exceptions go through.

    For good where the JVM is ours: what is left of such a call may be collected at any time until the process ends, and
    tells the JVM so.
    """
    root, py4j = logging.getLogger(), logging.getLogger("py4j")
    propagated = py4j.propagate
    root.addFilter(_is_not_of_py4j)
    py4j.propagate = False
    try:
        yield
    finally:
        if not _started:
            root.removeFilter(_is_not_of_py4j)
            py4j.propagate = propagated


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return not str(record.msg).endswith("while sending command.")


def _start(configuration: Mapping[str, object], path: Path, said: IO[bytes]) -> subprocess.Popen[bytes]:
    from pyspark.find_spark_home import _find_spark_home

    command = [str(Path(_find_spark_home()) / "bin" / "spark-submit")]
    for key, value in configuration.items():
        command += ["--conf", f"{key}={value}"]
    return subprocess.Popen(
        [*command, "pyspark-shell"],
        stdin=subprocess.PIPE,
        stdout=said,
        stderr=said,
        env=os.environ | {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(path)},
        start_new_session=True,
    )


def _connection(process: subprocess.Popen[bytes], path: Path, said: IO[bytes]) -> tuple[int, str]:
    """Port and secret of the gateway, once it has written them: the file is renamed into place whole."""
    while not path.exists():
        if process.poll() is not None:
            size = said.seek(0, os.SEEK_END)
            said.seek(max(size - _QUOTED_BYTES, 0))
            lines = said.read().decode(errors="replace").split("\n")
            # The frames of a stack say nothing to a user, and push out what does.
            quoted = " | ".join([line for line in lines if not _FRAME.match(line)][-_QUOTED_LINES:]).strip(" |")
            raise MissingExtraError(
                f"Spark's Java ended with code {process.returncode} before it was ready; set JAVA_HOME to another one, "
                f"or use the engine local, which needs none. It said: {quoted or 'nothing'}"
            )
        time.sleep(_POLL_S)
    content = path.read_bytes()
    port, length = struct.unpack_from(">ii", content)
    return port, content[8 : 8 + length].decode()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it and its children; asked first, since a Java that is killed leaves its scratch directories behind."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ASKED_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """At exit: let it remove its scratch files, but not for long, and not from a fork."""
    if os.getpid() != owner:
        return
    from pyspark import SparkContext

    try:
        if SparkContext._active_spark_context is not None:
            # First, since PySpark's own threads complain when the other side goes away.
            with quiet_py4j(), suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # it warns that an interrupted JVM did not answer
                SparkContext._active_spark_context.stop()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(_END_TIMEOUT_S)
    except BaseException:
        _kill(process)
        raise
