"""The place of the placement record and the decision log: the data directory, or a `bindings_directory`.

The two directories know each other by an id, in the file `bindings.id` of both. Without it an unmounted disk, or a
configuration without the key, would look like a new data directory, its messages out of sight (invariant 6). The file
of the data directory says also where the other one was, for commands that have no configuration.

    <id: 32 hexadecimal digits>
    <the bindings directory>          in the data directory alone, as what follows
    new                               until the other one has the id
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...adapters.system.files import disk_errors, make_directory, read_file, replace_file
from ...policies.errors import PlacementError
from .record import RECORD

if TYPE_CHECKING:
    from ...policies.config import Config

MARK: Final = "bindings.id"
DECISIONS: Final = "decisions"
NEW: Final = "new"


def place_of(directory: Path) -> Path:
    """Return where the record and the log of this data directory are, as it says itself."""
    lines = _read(directory)
    return Path(lines[1]) if len(lines) > 1 else directory


def take(config: Config) -> None:
    """Make the bindings directory, if that is configured and new. The data directory is locked. Raises as `require`,
    and OSError."""
    require(config, may_be_new=True)
    bindings = config.bindings_directory
    if bindings is None or (bindings / MARK).exists():
        return
    known = _read(config.directory)
    name = known[0] if known else os.urandom(16).hex()
    mark = f"{name}\n{bindings.absolute()}\n"
    replace_file(config.directory / MARK, f"{mark}{NEW}\n".encode(), config.file_mode)
    make_directory(bindings, config.file_mode)
    replace_file(bindings / MARK, f"{name}\n".encode(), config.file_mode)
    replace_file(config.directory / MARK, mark.encode(), config.file_mode)


def require(config: Config, may_be_new: bool = False) -> None:
    """Raise PlacementError if the configuration would not find the record that there is. Nothing is changed."""
    directory, bindings = config.directory, config.bindings_directory
    known = _read(directory)
    if bindings is None:
        if known:
            raise PlacementError(
                f"{directory} was used with `bindings_directory: {known[1]}`, where its {RECORD} and {DECISIONS}/ are; "
                f"give that in the configuration. Or move these two from there to {directory}, and remove "
                f"{directory / MARK}"
            )
        return
    found = _read(bindings)
    if known and found and found[0] == known[0]:
        return
    if not known:
        for name in (RECORD, DECISIONS):
            if (directory / name).exists():
                raise PlacementError(
                    f"{directory / name} is there, and the configuration has `bindings_directory: {bindings}`; while "
                    f"nothing has {directory} open move {RECORD} and {DECISIONS}/ to {bindings}, or leave the key out"
                )
        if found:
            raise PlacementError(
                f"{bindings} is the bindings directory of another data directory, not of {directory}; choose another"
            )
        return
    if not found and may_be_new and NEW in known[2:]:
        return
    what = "is another one's" if found else "is empty" if bindings.is_dir() else "is missing"
    raise PlacementError(
        f"{bindings}, where the {RECORD} and {DECISIONS}/ of {directory} are to be, {what}; it was {known[1]}. "
        "Mount its disk, or restore it"
    )


def _read(directory: Path) -> list[str]:
    with disk_errors(f"{directory / MARK} cannot be read"):
        try:
            return read_file(directory / MARK).decode(errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []
