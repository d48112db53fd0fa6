"""Finds the files of a configuration that more users may read or write than it says."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...adapters.system.files import directory_mode
from ...policies.config import Config
from ...policies.errors import Problem


class Root(NamedTuple):
    """A directory that files of ours lie in."""

    path: Path
    file_mode: int
    suffix: str = ""
    """The end of our files' names in a directory that others may use too; empty: all files there are ours."""

    def remedy(self) -> str:
        """Return the command that sets the modes."""
        if self.suffix:
            return f"find {self.path} -name '*{self.suffix}' -exec chmod {self.file_mode:04o} {{}} +"
        parts = []
        for who, shift in (("u", 6), ("g", 3), ("o", 0)):
            bits = self.file_mode >> shift
            parts.append(f"{who}={'r' * bool(bits & 4)}{'w' * bool(bits & 2)}{'X' * bool(bits & 4)}")
        return f"chmod -R {','.join(parts)} {self.path}"


def too_open(config: Config) -> list[Problem]:
    """Return one warning for each directory in which something has a mode beyond `file_mode`, which was made by hand,
    or by an earlier version. Looks at modes alone; paths that cannot be looked at are skipped."""
    roots = list(_roots(config))
    warnings = []
    for root in roots:
        found = [path for path in _ours(root, {other.path for other in roots}) if _is_beyond(path, root.file_mode)]
        if found:
            warnings.append(
                Problem(
                    f"{root.path}: {len(found)} of the files and directories here may be read or written by more users "
                    f"than file_mode {root.file_mode:04o} says, such as {found[0]}; none of them was changed. "
                    f"Change it with: {root.remedy()}"
                )
            )
    return warnings


def _roots(config: Config) -> Iterator[Root]:
    yield Root(config.directory, config.file_mode)
    for store in config.stores:
        mode = getattr(store.options, "file_mode", None) or config.file_mode
        yield Root(config.directory_of(store), mode)
        if store.index_directory is not None:
            yield Root(store.index_directory, mode, ".mdb")
            yield Root(store.index_directory, mode, ".sums")
        archive = getattr(store.options, "archive_directory", None)
        if archive is not None:
            yield Root(archive, mode, ".seg")


def _ours(root: Root, others: set[Path]) -> Iterator[Path]:
    """Yield a directory and all that is ours in it, without what is another root's."""
    for directory, names, files in os.walk(root.path):
        here = Path(directory)
        if not root.suffix:
            yield here
        names[:] = sorted(name for name in names if here / name not in others)
        yield from (here / name for name in sorted(files) if name.endswith(root.suffix))


def _is_beyond(path: Path, file_mode: int) -> bool:
    try:
        found = path.lstat().st_mode
    except OSError:
        return False  # it has gone meanwhile
    if stat.S_ISDIR(found):
        return bool(found & 0o777 & ~directory_mode(file_mode))
    return stat.S_ISREG(found) and bool(found & 0o777 & ~file_mode)
