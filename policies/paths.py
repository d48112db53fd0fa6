"""Paths as users write them, and the mode of files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
"""The mode of files where nothing else is said: their owner alone reads and writes them."""
URL_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""The beginning of a URL. One slash is enough: pathlib leaves one of two."""


def from_home(path: str | os.PathLike[str]) -> Path:
    """Return the path that a shell makes of it: a leading `~` is the home directory, `~name` that of a user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  Path's raises RuntimeError for a user there is not
