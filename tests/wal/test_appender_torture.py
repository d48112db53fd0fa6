"""Many threads on one appender of C, with calls that fail, under ThreadSanitizer and AddressSanitizer.

A run takes a tenth of a second; the campaign makes a thousand of each.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "adapters" / "wal" / "appending"
RUNS = 8


def built(directory: Path, sanitizer: str) -> Path | None:
    """The program; None without a compiler, where there is no appender of C either."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    program = directory / "torture"
    command = [compiler, "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", f"-I{SOURCES}"]
    files = [str(HERE / "appender_torture.c"), str(SOURCES / "appender.c")]
    subprocess.run([*command, *files, "-o", str(program), "-lpthread"], check=True)
    return program


def torture(program: Path, seeds: range, threads: int = 32, rounds: int = 60) -> None:
    for seed in seeds:
        command = [str(program), str(threads), str(rounds), str(seed), str(program.with_name("file"))]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (run.returncode, run.stderr) == (0, ""), f"seed {seed}: {run.stderr}"


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_thread_reads_what_another_writes_and_nothing_is_lost(tmp_path: Path, sanitizer: str) -> None:
    program = built(tmp_path, sanitizer)
    if program is not None:
        torture(program, range(RUNS))


@pytest.mark.campaign
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_a_thousand_runs(tmp_path: Path, sanitizer: str) -> None:
    program = built(tmp_path, sanitizer)
    assert program is not None
    torture(program, range(RUNS, RUNS + 1000))
