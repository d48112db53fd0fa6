"""Spark's Java ends with whoever started it, at whatever moment, and says nothing on the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext

from anabranch.policies.advisor.spark.session import spark_errors, spark_session, started_java
from anabranch.policies.errors import MissingExtraError, SparkError

from ..contract.disk import eventually

_START = """
from pyspark import SparkConf
from anabranch.policies.advisor.spark.session import started_java
with started_java(SparkConf()):
    pass
"""
_RECOMMEND = """
import os, signal, sys
from anabranch.policies.advisor import RecommendOptions, Workload, generate, recommend
from pyspark import SparkContext

def progress(stage, share):
    if stage == "summarise":
        pid = SparkContext._jvm.java.lang.ProcessHandle.current().pid()
        print(pid, flush=True)
        if "without java" in sys.argv:
            os.kill(pid, signal.SIGKILL)
            raise KeyboardInterrupt

trace = generate(Workload.parse("{duration: 1h, destinations: [{name: q, size: 9, arrival: {rate: 1}}]}"))
try:
    while True:
        recommend(trace, RecommendOptions(segment_bytes=65536, engine="spark"), progress)
except KeyboardInterrupt:
    print("interrupted")
"""


def fake_spark(home: Path, *script: str) -> None:
    submit = home / "bin" / "spark-submit"
    submit.parent.mkdir(parents=True)
    submit.write_text("\n".join(["#!/bin/sh", *script, ""]))
    submit.chmod(0o755)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_interrupted_while_it_starts_it_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    fake_spark(tmp_path, f"echo $$ > '{fifo}'", "exec cat > /dev/null")  # it ends when its input does, as Java
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", _START], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pid = int(fifo.read_text())
    said = b""
    while not said:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):  # a signal just after a fork is lost: Python's own hooks run then
            _, said = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said
    eventually(lambda: not is_alive(pid))  # the kernel takes its time
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "pid"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # PySpark does not close its input
def test_a_java_that_does_not_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_spark(tmp_path, "echo this is no Java >&2", "exit 3")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setattr(SparkContext, "_gateway", None)  # other tests have one
    with (
        pytest.raises(MissingExtraError, match=r"ended before it was ready.*engine local.*this is no Java"),
        started_java(SparkConf(loadDefaults=False)),
    ):
        pass
    assert "PYSPARK_GATEWAY_PORT" not in os.environ


def test_another_thread_gets_the_context_that_is_there(spark: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(spark_session, "local[2]").result().sparkContext is spark.sparkContext


@pytest.mark.parametrize("error", [Py4JError("empty answer"), ConnectionRefusedError()])
def test_interrupted_it_says_so_whatever_fails_after_it(error: Exception) -> None:
    """A call to Java that Ctrl-C meets fails while PySpark cleans up, and so does the next."""
    with pytest.raises(KeyboardInterrupt), spark_errors():
        try:
            raise KeyboardInterrupt
        finally:
            raise error
    with pytest.raises(SparkError, match="mend that"), spark_errors():
        raise error


@pytest.mark.campaign  # Spark, begun anew
def test_interrupted_at_work_it_ends_quietly_with_its_owner() -> None:
    process = subprocess.Popen([sys.executable, "-c", _RECOMMEND], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (out.splitlines()[-1], err, process.returncode) == ("interrupted", "", 0)
    eventually(lambda: not is_alive(pid))  # the kernel takes its time


@pytest.mark.campaign  # likewise
def test_interrupted_it_is_so_even_if_what_cleans_up_fails() -> None:
    """Ctrl-C in the middle of a call to Java leaves a connection on which the next one fails."""
    process = subprocess.run([sys.executable, "-c", _RECOMMEND, "without java"], capture_output=True, text=True)
    # PySpark's own thread tells of it too, on the terminal.
    assert (process.stdout.splitlines()[-1], process.returncode) == ("interrupted", 0), process.stderr
