"""Processes that begin to work at once: each says that it is ready, waits for a line, and prints what it has done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence


def worked(module: str, arguments: Sequence[Sequence[str]], look: Callable[[], object] = lambda: None) -> list[str]:
    """Run a module once with each of these arguments, together; return the line that each has printed. `look` is
    called when all are ready, and when all have done it."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, "--worker", *each], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for each in arguments
    ]
    pipes = [(worker.stdin, worker.stdout) for worker in workers if worker.stdin and worker.stdout]
    try:
        for _, output in pipes:
            output.readline()
        look()
        for told, _ in pipes:
            told.write("\n")
            told.flush()
        lines = [output.readline() for _, output in pipes]
        look()
        return lines
    finally:
        for worker in workers:
            worker.communicate()
