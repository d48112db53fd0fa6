"""Which files of a configuration more users may read or write than it says."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ...adapters.files import directory_mode
from ...policies.config import Config
from ...policies.errors import Problem


def too_open(config: Config) -> list[Problem]:
    """One warning for each directory in which something is there with a mode beyond `file_mode`, which was made by
    hand, or by an earlier version. Looks at modes alone; what cannot be looked at is passed over."""
    return [
        Problem(
            f"{root}: {len(found)} of the files and directories here may be read or written by more users than "
            f"file_mode {mode:04o} says, such as {found[0]}; what exists is left as it is. "
            f"Change it with: {_remedy(root, mode)}"
        )
        for root, mode in _roots(config).items()
        if (found := [path for path in _below(root, _roots(config)) if _is_beyond(path, mode)])
    ]


def _roots(config: Config) -> dict[Path, int]:
    """The directories whose files are ours, and the mode of these."""
    roots = {config.directory: config.file_mode}
    for store in config.stores:
        mode = getattr(store.options, "file_mode", None) or config.file_mode
        roots[config.directory_of(store)] = mode
        for directory in (store.index_directory, getattr(store.options, "archive_directory", None)):
            if directory is not None:
                roots.setdefault(directory, mode)
    return roots


def _below(root: Path, roots: dict[Path, int]) -> Iterator[Path]:
    """A directory and all in it, without what is another root's."""
    for directory, names, files in os.walk(root):
        here = Path(directory)
        yield here
        names[:] = sorted(name for name in names if here / name not in roots)
        yield from (here / name for name in sorted(files))


def _is_beyond(path: Path, file_mode: int) -> bool:
    try:
        found = path.lstat().st_mode
    except OSError:
        return False  # it has gone meanwhile
    if stat.S_ISDIR(found):
        return bool(found & 0o777 & ~directory_mode(file_mode))
    return stat.S_ISREG(found) and bool(found & 0o777 & ~file_mode)


def _remedy(root: Path, file_mode: int) -> str:
    parts = []
    for who, shift in (("u", 6), ("g", 3), ("o", 0)):
        bits = file_mode >> shift
        parts.append(f"{who}={'r' * bool(bits & 4)}{'w' * bool(bits & 2)}{'X' * bool(bits & 4)}")
    return f"chmod -R {','.join(parts)} {root}"
