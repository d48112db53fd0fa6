"""A real full disk needs a file system of its own, which only root may mount; errors of the C library need Linux and
the compiled appender. The modules that ask for them are left out elsewhere."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import anabranch


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as place:
        try:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return False
        subprocess.run(["umount", place], check=True)
    return True


collect_ignore = [] if _can_mount() else ["test_full_disk.py", "test_emptying.py"]
if sys.platform != "linux" or "appender" not in anabranch.accelerated:
    collect_ignore.append("test_native.py")
