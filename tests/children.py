"""Programs of ours in processes of their own, which a server forks that has imported the product: a start takes some
milliseconds instead of most of a second. Nothing of the tests' process is in them but its environment."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

CONTEXT: Final[ForkServerContext] = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["pytest", "anabranch", "anabranch.adapters.sql", "anabranch.router.cli.queues", "tests.crash.power.workloads"]
)


def run_module(
    module: str, *arguments: str, seconds: float | None = None, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Run `python -m module`. Return its exit code, None where it did not end in so many seconds and was killed, and
    what it printed."""
    return _told(_run_module, (module, arguments), seconds, environment or {})


def run_program(
    source: str, *arguments: str, seconds: float | None = None, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Run `python -c source`, as run_module."""
    return _told(_run_program, (source, arguments), seconds, environment or {})


def _told(
    run: Callable[..., None], what: tuple[object, ...], seconds: float | None, environment: dict[str, str]
) -> tuple[int | None, str]:
    with tempfile.NamedTemporaryFile("r", prefix="anabranch-told-") as told:
        process = CONTEXT.Process(target=_run, args=(run, what, told.name, environment))
        process.start()
        process.join(seconds)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        process.close()
        return code, told.read()


def started(module: str, *arguments: str, stdin: str = os.devnull, out: str, err: str) -> BaseProcess:
    """Start `python -m module` where this process is, in a session of its own, with these files: the path of a terminal
    makes it the session's."""
    process = CONTEXT.Process(target=_start, args=(module, arguments, str(Path.cwd()), (stdin, out, err)))
    process.start()
    return process


def _start(module: str, arguments: tuple[str, ...], directory: str, files: tuple[str, str, str]) -> None:
    os.setsid()
    os.chdir(directory)
    for descriptor, path in enumerate(files):
        given = os.open(path, (os.O_WRONLY if descriptor else os.O_RDONLY) | os.O_CREAT)
        os.dup2(given, descriptor)
        os.close(given)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run_module(module, arguments)


def _run(run: Callable[..., None], what: tuple[object, ...], told: str, environment: dict[str, str]) -> None:
    with Path(told).open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ |= environment
    run(*what)


def _run_module(module: str, arguments: tuple[str, ...]) -> None:
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_program(source: str, arguments: tuple[str, ...]) -> None:
    sys.argv[:] = ["-c", *arguments]
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
