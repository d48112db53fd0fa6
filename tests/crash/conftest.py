"""A real full disk needs a file system of its own, which only root may mount: elsewhere the modules that fill one are
left out."""

from __future__ import annotations

import subprocess
import tempfile


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as place:
        try:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return False
        subprocess.run(["umount", place], check=True)
    return True


collect_ignore = [] if _can_mount() else ["test_full_disk.py", "test_emptying.py"]
