"""The configuration in force: the one that a data directory was opened under last, in the directory itself.

    config = configuration_of("data")       # what anabranch.open takes: a Config, a file, a directory

`in-force.yaml` is for whoever has the directory and not the file: the command line, and `anabranch.open("data")`. Its
paths start from the directory, which can be moved; it holds no secret (policies/config/writing.py). The file is written
at each open that finds it otherwise. Nothing else is lost with it: without it a file has to be given.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ....adapters.system.files import DENIED, read_file, replace_file, require_no_link
from ....policies import config as configs
from ....policies.config.durability import Sync
from ....policies.errors import ConfigError, Problem
from ....policies.paths import from_home

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ....policies.config import Config

log: logging.Logger = logging.getLogger(__name__)

NAME: Final = "in-force.yaml"
FILE: Final = "stores.yaml"
"""The user's own file, which goes before the written one."""
_HEAD: Final = (
    "# Written by Anabranch at each open: the configuration that this directory was opened under last.\n"
    f"# Not to be edited, since it is written anew; a {FILE} beside it goes before it.\n"
)
_ENDS: Final = (".yaml", ".yml")
"""The ends of a configuration file's name."""
_OTHER_ENDS: Final = frozenset((".json", ".toml", ".ini", ".conf", ".cfg"))
"""The ends of other programs' configuration files."""
_MARKS: Final = ("router.lock", "placement.records", "placement.mdb", "bindings.id", NAME)
"""Files, any of which is in each data directory that was ever opened."""
_ALL: Final = "all"
"""The name of the store in a directory for which nobody has given a configuration."""
_MAKING: Final = f"{NAME}.tmp"
"""The file while it is written."""
_OTHERS: Final = frozenset(("lost+found", "clients", "serve.starting", "serve.successor", "serve.log", _MAKING))
"""What may be there before a data directory is made: clients of one that is shared wait for its first owner."""
_SHOWN: Final = 3
_WAYS: Final = (
    'anabranch.open("data") for a directory, anabranch.open("stores.yaml") for a configuration file, or '
    "anabranch.open(anabranch.Config(...))"
)


def configuration_of(source: str | PathLike[str] | Config | None) -> Config:
    """Return the configuration that a source names; nothing is created. Raises ConfigError, and TypeError for what is
    neither a path nor a Config."""
    if isinstance(source, configs.Config):
        return source
    if source is None:
        raise TypeError(f"anabranch.open needs to know what to open: {_WAYS}")
    text = os.fspath(source) if isinstance(source, str | PathLike) else source
    if not isinstance(text, str):
        raise TypeError(f"a source is a path as str or pathlib.Path, not {type(source).__name__}: {source!r}; {_WAYS}")
    if not text.strip() or "\0" in text:
        raise ConfigError([f"{text!r} is no path; {_WAYS}"])
    path = from_home(text)
    try:
        if path.is_dir():
            return of_directory(path)
        if path.suffix.lower() in _ENDS:
            return configs.load(path)
        if path.exists():
            return _of_file(path)
        if _is_named_as_a_file(path):
            raise ConfigError(
                [
                    f"{path} does not exist, and is named as a configuration file, which ends in .yaml or .yml; if it "
                    "is to be a data directory, make it first"
                ]
            )
        return of_directory(path)
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        step = "; give this user the right to read and write there, or choose another" if error.errno in DENIED else ""
        raise ConfigError([f"{path} cannot be opened: {error.strerror}{where}{step}"]) from None


def _of_file(path: Path) -> Config:
    """Return the configuration in a file that is not named as one, and may be something else. Raises ConfigError."""
    try:
        return configs.load(path)
    except ConfigError as error:
        step = "it is a file, and was read as a configuration: give a data directory, or the file of a configuration"
        raise ConfigError([*error.problems, step], str(path)) from None


def _is_named_as_a_file(path: Path) -> bool:
    """Return whether a path ends as configurations do, or nearly so: `stores.ymal`, `stores.toml`,
    `stores.yaml.bak`."""
    *others, last = [suffix.lower() for suffix in path.suffixes] or [""]
    is_near = len(last) >= len(".yml") and bool(difflib.get_close_matches(last, _ENDS, n=1, cutoff=0.75))
    return is_near or last in _OTHER_ENDS or any(suffix in _ENDS for suffix in others)


def file_of(path: Path) -> Path:
    """Return the file that says how a directory is opened. For a file return that file."""
    return next((path / name for name in (FILE, NAME) if (path / name).is_file()), path)


def bytes_of(source: str) -> bytes | None:
    """Return the bytes that `configuration_of` would parse; None if there is no file yet, or it cannot be read."""
    with suppress(OSError):
        return read_file(file_of(from_home(source)))
    return None


def of_directory(directory: Path) -> Config:
    """Return the configuration of a data directory, existing or new. Raises ConfigError, OSError."""
    directory = Path(os.path.abspath(directory))  # noqa: PTH100  `..` too
    if (directory / FILE).is_file():
        return _own(directory)
    in_force = read_in_force(directory)
    if in_force is not None:
        return in_force
    _require_ours_or_empty(directory)
    options = configs.JournalOptions(sync=Sync.ALWAYS)
    return configs.Config(directory, [configs.StoreConfig(_ALL, [">"], journal=options)])


def _own(directory: Path) -> Config:
    """Return the configuration in the file that the user has put into the directory."""
    file = directory / FILE
    config = configs.load(file)
    if config.directory.resolve() != directory.resolve():
        raise ConfigError(
            [
                f"{file} is in the directory that was given, and is about another: `directory:` says "
                f"{config.directory}. Give the file, {file}; or that directory; or write `directory: .` into the file"
            ]
        )
    return config


def read_in_force(directory: Path) -> Config | None:
    """Return the configuration that a data directory was opened under last; None where that is not known. Raises
    OSError, and ConfigError for a text that does not parse, or needs a variable of the environment that is not set."""
    text = text_of(directory)
    return None if text is None else parsed(text, directory)


def parsed(text: str, directory: Path, *, names_suffice: bool = False) -> Config:
    """Return the configuration in the text of a directory. Raises ConfigError; `names_suffice` as in `load`."""
    try:
        return configs.loads(text, directory, names_suffice=names_suffice)
    except ConfigError as error:
        problems: list[Problem | str] = [*error.problems]
        if not all(problem.of_variable for problem in error.problems):  # else the file is as it was written
            step = "no secret is written there, and it may be damaged: give the file that"
            problems.append(f"{step} {directory} is used with instead")
        raise ConfigError(problems, str(directory / NAME)) from None


def known_configuration(directory: Path) -> Config | None:
    """Return the configuration that a directory has of itself, for callers that open no store: secrets need not be
    there. None where there is none, or it does not parse."""
    with suppress(ConfigError, OSError):
        text = text_of(directory)
        return None if text is None else parsed(text, directory, names_suffice=True)
    return None


def write_in_force(config: Config) -> None:
    """Write the configuration down, durably, if it differs from what is there. Errors are logged: without it a file has
    to be given, and nothing else is lost."""
    path = config.directory / NAME
    try:
        require_no_link(path)
        text, before = _HEAD + configs.dump_yaml(config, config.directory), text_of(config.directory)
        if text != before:
            replace_file(path, text.encode(), config.file_mode)
            if before is not None:
                _tell(before, config)
    except OSError as error:
        with suppress(OSError):
            path.with_name(_MAKING).unlink(missing_ok=True)
        log.warning("the configuration in force is not written to %s: %s", path, error)


KEPT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "file_mode": "files that are there keep theirs",
        "segment_size": "files that are there keep theirs",
        "index_directory": "the index is made anew; that of before may be removed",
        "archive_directory": "what is archived stays where it is",
        "large_message_size": "bodies that are there stay as they are",
        "chunk_size": "bodies that are there stay as they are",
        "usage.directory": "what was recorded stays where it is",
    }
)
"""Options whose change applies to new files alone, and what becomes of those that are there."""


def _tell(before: str, config: Config) -> None:
    """Log one line about changes that leave something as it was."""
    try:
        former = parsed(before, config.directory, names_suffice=True)
    except ConfigError:  # damaged, and told by who reads it
        return
    changes = list(_changes("", former, config))
    if former.usage is not None and config.usage is not None:
        changes += _changes("usage.", former.usage, config.usage)
    stores = {store.name: store for store in former.stores}
    for store in config.stores:
        known = stores.get(store.name)
        if known is not None and known.kind == store.kind:
            found = [*_changes("", known, store), *_changes("", known.options, store.options)]
            changes += [f"store {store.name!r}: {change}" for change in found]
    if changes:
        log.info("%s: changed since it was opened last: %s", config.directory, "; ".join(changes))


def _changes(prefix: str, before: BaseModel, now: BaseModel) -> Iterator[str]:
    for key in type(now).model_fields:
        if prefix + key in KEPT and (was := getattr(before, key)) != (value := getattr(now, key)):
            yield f"{prefix}{key} was {was}, and is {value} ({KEPT[prefix + key]})"


def text_of(directory: Path) -> str | None:
    """Return the text of `in-force.yaml`; None if there is none. Raises OSError for a file that is there and cannot be
    read."""
    try:
        return read_file(directory / NAME).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        return "\0"  # which is no configuration


def _require_ours_or_empty(directory: Path) -> None:
    """Raise ConfigError for a directory of something else."""
    try:
        found = sorted(path.name for path in directory.iterdir() if path.name[0] != "." and path.name not in _OTHERS)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError([f"{directory} cannot be opened as a data directory: {error.strerror}"]) from None
    if any(name in _MARKS for name in found):
        _require_nothing_else(directory)
        return
    if not found:
        return
    shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    what = "is one store's; give the data directory that it is in" if "store.id" in found else (
        "is in use for something else; give a data directory, a new or an empty directory, or a configuration file"
    )  # fmt: skip
    raise ConfigError([f"{directory} holds {shown}, and no data of a router: it {what}"])


def _require_nothing_else(directory: Path) -> None:
    """Raise ConfigError for a data directory that somebody has used, and that does not say with which stores."""
    stores = directory / "stores"
    others = [path.name for path in stores.iterdir() if path.name[0] != "."] if stores.is_dir() else []
    if (directory / "bindings.id").exists() or any(name != _ALL for name in others):
        what = f"stores {', '.join(sorted(others)[:_SHOWN])}" if others else "a bindings directory"
        raise ConfigError(
            [
                f"{directory} has {what}, and no {NAME} that says how they are configured, as one of a version before "
                "this. Give the file that it is used with; it is opened by its own name from then on"
            ]
        )
