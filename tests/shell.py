"""Scripts of the pages, run by bash. `python` and `anabranch` are functions there, whose processes a server forks that
has imported the product (children.py): else most of a script's time would be that of imports."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Final

from .children import CONTEXT

FUNCTIONS: Final = """
called() {
    local code call=$BASHPID IFS=$'\\x1f'
    env -0 >"$CALLS/$call.environment"
    mkfifo "$CALLS/$call.code"
    printf '%s\\n' "$call$IFS$PWD${*:+$IFS$*}" >"$CALLS/calls"
    read -r code <"$CALLS/$call.code"
    rm "$CALLS/$call".*
    return "$code"
}
python() { called "$@"; }
anabranch() { called -m anabranch "$@"; }
"""


def run(script: str, where: Path, **environment: str) -> str:
    """Return what a script has said, which must end well."""
    with tempfile.TemporaryDirectory(prefix="anabranch-calls-") as path:
        calls = Path(path)
        os.mkfifo(calls / "calls")
        with (calls / "calls").open("r+b", buffering=0) as lines:  # it has no end while nobody writes
            serving = threading.Thread(target=_serve, args=(calls, lines))
            serving.start()
            done = subprocess.run(
                ["bash", "-ec", FUNCTIONS + script],
                cwd=where, env={**os.environ, **environment, "CALLS": path}, text=True, capture_output=True,
            )  # fmt: skip
            lines.write(b"\n")
            serving.join()
    assert done.returncode == 0, done.stderr
    return done.stdout


def _serve(calls: Path, lines: IO[bytes]) -> None:
    waiting = []
    while line := lines.readline().strip(b"\n").decode():
        shell, directory, *arguments = line.split("\x1f")
        called = CONTEXT.Process(target=_call, args=(calls, int(shell), directory, arguments))
        called.start()
        waiting.append(threading.Thread(target=_tell, args=(called, calls / f"{shell}.code")))
        waiting[-1].start()
    for thread in waiting:
        thread.join()


def _tell(called: BaseProcess, shell: Path) -> None:
    """Tell the shell how what it called has ended."""
    called.join()
    code = called.exitcode or 0
    called.close()
    shell.write_text(f"{code if code >= 0 else 128 - code}\n")


def _call(calls: Path, shell: int, directory: str, arguments: list[str]) -> None:
    os.chdir(directory)
    for descriptor in range(3):
        given = os.open(f"/proc/{shell}/fd/{descriptor}", os.O_WRONLY if descriptor else os.O_RDONLY)
        os.dup2(given, descriptor)
        os.close(given)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ.clear()
    for variable in (calls / f"{shell}.environment").read_text().split("\0")[:-1]:
        name, _, value = variable.partition("=")
        os.environ[name] = value
    sys.path[:0] = [directory]
    if arguments[:1] == ["-m"]:
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
