"""Programs of ours in processes of their own, which a server forks that has imported the product: a start takes some
milliseconds instead of most of a second. Nothing of the tests' process is in them but its environment."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Final

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["anabranch", "anabranch.adapters.sql", "tests.crash.power.workloads"])


def run_module(
    module: str, *arguments: str, seconds: float | None = None, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Run `python -m module`. Return its exit code, None where it did not end in so many seconds and was killed, and
    what it printed."""
    with tempfile.NamedTemporaryFile("r", prefix="anabranch-told-") as told:
        process = _CONTEXT.Process(target=_run, args=(module, arguments, told.name, environment or {}))
        process.start()
        process.join(seconds)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        process.close()
        return code, told.read()


def _run(module: str, arguments: tuple[str, ...], told: str, environment: dict[str, str]) -> None:
    with Path(told).open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ |= environment
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
