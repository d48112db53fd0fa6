"""Every system call of a scripted workload spoiled, one after the other (faults.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .faults import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_no_spoiled_call_loses_doubles_or_hangs_anything(kind: str) -> None:
    command = [sys.executable, "-m", "tests.crash.faults", "--kind", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
