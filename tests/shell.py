"""Scripts of the pages, run by bash with the Python of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

FUNCTIONS: Final = """
python() { "$PYTHON" "$@"; }
anabranch() { "$PYTHON" -m anabranch "$@"; }
"""


def run(script: str, where: Path, **environment: str) -> str:
    """Return what a script has said, which must end well."""
    done = subprocess.run(
        ["bash", "-ec", FUNCTIONS + script],
        cwd=where, env={**os.environ, **environment, "PYTHON": sys.executable}, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
