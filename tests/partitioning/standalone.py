"""Spark's own standalone cluster on the loopback interface: a master, and workers that can be killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from pyspark.find_spark_home import _find_spark_home

from anabranch.policies.advisor.spark.java import java_home

_DEPLOY = "org.apache.spark.deploy"
_PLACE = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")


class Cluster:
    """The URL of its master, and what each worker runs in: a process group with its executors."""

    def __init__(self, master: str, workers: list[subprocess.Popen[str]]) -> None:
        self.master, self.workers = master, workers

    def kill(self, worker: int) -> None:
        """As when the machine goes: the worker, and its executors with all that they hold."""
        _kill(self.workers[worker])


@contextmanager
def standalone_cluster(directory: Path, workers: int) -> Iterator[Cluster]:
    """A cluster of so many workers of one core, which keep their files in `directory`."""
    with ExitStack() as stack:
        _, master = stack.enter_context(_daemon(["master.Master", *_PLACE], r"Starting Spark master at (\S+)"))
        processes = []
        for number in range(workers):
            own = str(directory / str(number))
            arguments = ["worker.Worker", *_PLACE, "-c", "1", "-m", "1g", "-d", own, master]
            process, _ = stack.enter_context(_daemon(arguments, "(Successfully registered) with master"))
            processes.append(process)
        yield Cluster(master, processes)


@contextmanager
def _daemon(arguments: list[str], ready: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of Spark's, once it has logged what `ready` matches; that, too."""
    name, *rest = arguments
    process = subprocess.Popen(
        [str(Path(_find_spark_home()) / "bin" / "spark-class"), f"{_DEPLOY}.{name}", *rest],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"JAVA_HOME": str(java_home()), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "128m"},
    )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(ready, line):
                break
        else:
            raise AssertionError(f"{name} ended: {''.join(said)}")
        reader = threading.Thread(target=_drain, args=(process.stderr,), daemon=True)
        reader.start()
        yield process, found[1]
    finally:
        _kill(process)


def _drain(stream: IO[str]) -> None:
    """Else who writes to it stands still once it is full."""
    with stream:
        for _ in stream:
            pass


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
