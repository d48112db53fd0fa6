"""The Ctrl-C storms of sigint.py with small counts."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("sync", ["always", "never"])
@pytest.mark.parametrize("threads", [1, 8, 32])
def test_a_storm_of_interrupts_leaves_everything_in_order(threads: int, sync: str) -> None:
    storm("--threads", str(threads), "--sync", sync)


@pytest.mark.parametrize("sync", ["always", "never"])
def test_a_storm_over_two_stores(sync: str) -> None:
    storm("--threads", "8", "--sync", sync, "--across")


@pytest.mark.parametrize("kinds", ["memory", "sql", "journal,memory", "journal,sql"])
def test_a_storm_over_other_kinds_of_stores(kinds: str) -> None:
    storm("--threads", "8", "--stores", kinds, *(["--across"] if "," in kinds else []))


def storm(*options: str) -> None:
    command = [sys.executable, "-m", "tests.crash.sigint", "--signals", "250", "--seed", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
