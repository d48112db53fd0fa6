"""Steps of transactions over a journal and SQLite, spoiled one after the other (steps.py), a few of them here."""

from __future__ import annotations

import subprocess
import sys


def test_no_spoiled_step_leaves_a_part_of_a_transaction() -> None:
    command = [sys.executable, "-m", "tests.crash.steps", "--share", "1/220"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
