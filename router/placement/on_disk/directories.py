"""The directories of stores: what the configuration, the placement record and the disk say of them."""

from __future__ import annotations

import errno
import hashlib
import logging
import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ....adapters.system.files import FULL, make_directory, refused
from ....policies import config as configs
from ....policies.errors import ConfigError, StoreFailedError
from ....policies.names.destination import Destination
from ..record import StoreRow
from . import in_force

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ....policies.config import Config, StoreConfig

log: logging.Logger = logging.getLogger(__name__)

NAME_BYTES_MAX: Final = 120
_PLAIN: Final = frozenset(string.ascii_lowercase + string.digits + "_-.")
_DIGEST_CHARACTERS: Final = 24


class Place(NamedTuple):
    """A directory that a store may lie in. `config` is None where the configuration does not name it."""

    path: Path
    config: StoreConfig | None


class StoreDirectories:
    """The directories of one configuration. Touches the disk only to list them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        usage = config.usage.directory if config.usage is not None else None
        named = [config.directory, config.bindings, usage, *(store.directory for store in config.stores)]
        self._named = frozenset(path.absolute() for path in named if path is not None)
        """The directories that its user has chosen."""
        self.before: Config | None = None
        """The configuration that the stores were used with until now, where it is given. It says how to open stores
        that the configuration does not have."""
        self._written: str | None = None
        self.moving = False
        """True while stores are about to get the place of others (repartition.py)."""

    def remember_in_force(self) -> None:
        """Remember the configuration that the directory was opened under last, for `before` where that is not given.
        The text is read now, and parsed when it is needed."""
        try:
            self._written = in_force.text_of(self.config.directory)
        except OSError as error:
            log.warning("the last configuration of %s cannot be read: %s", self.config.directory, error)

    def _before(self) -> Config | None:
        written, self._written = self._written, None
        if self.before is None and written is not None:
            try:
                self.before = in_force.parsed(written, self.config.directory)
            except ConfigError as error:
                log.warning("the last configuration of %s is not known: %s", self.config.directory, error)
        return self.before

    def expected(self, store: StoreConfig, destination: Destination) -> Path:
        """Return where the store of a destination lies that is routed to `store`."""
        directory = self.config.directory_of(store)
        return directory / directory_name(destination) if store.per_destination else directory

    def name(self, store: StoreConfig, destination: Destination) -> str:
        """Return the name of that store: a store of one destination is `name:destination`."""
        return f"{store.name}:{destination}" if store.per_destination else store.name

    def path(self, row: StoreRow) -> Path:
        return self.config.directory / row.path

    def require_own(self, path: Path) -> None:
        """Raise ConfigError where a directory of ours, or one above it, is a symbolic link: up to the one that the
        configuration names, which may be."""
        path, ours = path.absolute(), list[Path]()
        while path not in self._named:
            if path == path.parent:
                return  # an earlier configuration named it
            ours.append(path)
            path = path.parent
        if link := next((one for one in ours if one.is_symlink()), None):
            raise ConfigError(
                [
                    f"{link} is a symbolic link, and nothing in a data directory may be one. Put its target there, "
                    "or name the target in the configuration: `directory` of the store or of `usage`, or "
                    "`bindings_directory`"
                ]
            )

    def recorded(self, path: Path) -> str:
        """Return a path as it is recorded: relative where it lies in the data directory, so that this can be moved."""
        try:
            return str(path.relative_to(self.config.directory))
        except ValueError:
            return str(path.absolute())

    def config_at(self, path: Path) -> StoreConfig | None:
        """Return the configured store whose directory, or one of whose directories, this is."""
        return _config_at(self.config, path)

    def options_of(self, row: StoreRow) -> StoreConfig:
        """Return the configuration to open a recorded store with: as it is configured, else defaults."""
        configured = self.configured(row)
        if configured is not None:
            return configured
        from ....policies.config.options import options_model  # needs pydantic, which takes long

        # Ids that it remembers, by a larger window than the default, are not to be forgotten by opening it.
        fields = options_model(row.kind).model_fields
        options: dict[str, Any] = {row.kind: {"duplicate_window": 10_000_000} if "duplicate_window" in fields else None}
        return configs.StoreConfig("unconfigured", [">"], **options)

    def configured(self, row: StoreRow) -> StoreConfig | None:
        """Return the configuration of a recorded store's directory, else of its name; None if there is neither. The one
        that it was used with until now goes before the one that it is to have."""
        name = row.name.partition(":")[0]
        at = _config_at(self.config, self.path(row))
        if at is not None and at.kind == row.kind:
            return at
        before = self._before()
        if before is not None:
            at = _config_at(before, self.path(row))
            if at is not None and at.kind == row.kind:
                return at
        for config in (*(before.stores if before is not None else ()), *self.config.stores):
            if config.name == name and config.kind == row.kind:
                return config
        return None

    def kind_at(self, path: Path, kind: str) -> str:
        """Return the kind of the store in a directory when it was opened last. Return `kind` where that is not known,
        or stores are moving: then new stores come to lie where others were."""
        before = None if self.moving else self._before()
        former = None if before is None else _config_at(before, path)
        return kind if former is None else former.kind

    def options(self, store: StoreConfig) -> BaseModel:
        """Return a store's options, with the mode of its files where it gives none itself."""
        if getattr(store.options, "file_mode", self.config.file_mode) is not None:
            return store.options
        return store.options.model_copy(update={"file_mode": self.config.file_mode})

    def places(self) -> Iterator[Place]:
        """Yield every directory that exists and may be a store's: the configured ones, then what else lies among
        them."""
        seen: set[Path] = set()
        for config in self.config.stores:
            directory = self.config.directory_of(config)
            for path in children(directory) if config.per_destination else [directory]:
                seen.add(path)
                yield Place(path, config)
            seen.add(directory)
        for path in children(self.config.directory / "stores"):
            if path not in seen:
                yield Place(path, None)
                yield from (Place(child, None) for child in children(path) if child not in seen)

    def former_places(self) -> Iterator[Place]:
        """Yield places of stores that the configuration had as one for all their destinations, or as one for each."""
        for config in self.config.stores:
            directory = self.config.directory_of(config)
            paths = [directory] if config.per_destination else children(directory)
            yield from (Place(path, None) for path in paths)


def _config_at(config: Config, path: Path) -> StoreConfig | None:
    for store in config.stores:
        directory = config.directory_of(store)
        if path == (directory if not store.per_destination else directory / path.name):
            return store
    return None


def children(directory: Path) -> list[Path]:
    """Return the directories in a directory, in order, without the hidden ones; none if it is not there."""
    try:
        return sorted(path for path in directory.iterdir() if path.name[0] != "." and path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def directory_name(destination: Destination) -> str:
    """Return the name of the directory of a destination's own store: no two destinations ever share one, and none
    escapes the directory it lies in.

    The name is percent-encoded, lower case only (some file systems fold case), at most 120 bytes. A longer one is cut
    and a hash of the whole appended after `~`, which no encoded name contains.
    """
    encoded = f"{destination.kind.name.lower()}." + "".join(
        character if character in _PLAIN else "".join(f"%{byte:02x}" for byte in character.encode())
        for character in destination.name
    )
    if len(encoded) <= NAME_BYTES_MAX:
        return encoded
    digest = hashlib.sha256(str(destination).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{encoded[: NAME_BYTES_MAX - _DIGEST_CHARACTERS - 1]}~{digest}"


def missing_directories(config: Config, stores: Iterable[StoreConfig] | None = None) -> list[str]:
    """Return a line for each missing directory that must not be made, among the data directory and those of these
    stores (None: of all)."""
    wanted = [] if config.create_directory else [("the data directory", config.directory)]
    if config.bindings_directory is not None and not config.create_directory:
        wanted.append(("the bindings directory", config.bindings_directory))
    wanted += [
        (f"the directory of store {store.name!r}", config.directory_of(store))
        for store in (config.stores if stores is None else stores)
        if not config._may_create(store)
    ]
    return [
        f"{what}, {path}, is not there, and create_directory is false. A disk that is not mounted looks just like "
        "that: mount it. If the directory is new, make it by hand once"
        for what, path in wanted
        if not path.is_dir()
    ]


def require_directories(config: Config, stores: Iterable[StoreConfig] | None = None) -> None:
    """Raise ConfigError for directories that are missing."""
    missing = missing_directories(config, stores)
    if missing:
        raise ConfigError(missing)


def take_directory(config: Config, acquire: Callable[[], None]) -> None:
    """Make the data directory if it is not there, and acquire its lock. Raises ConfigError for one that cannot be used,
    StoreFullError for one that has no room now, StoreFailedError where the disk fails, and what `acquire` raises."""
    directory = config.directory
    try:
        require_directories(config)
        make_directory(directory, config.file_mode)
        acquire()
    except OSError as error:
        if error.errno in FULL:
            raise refused(f"the data directory {directory} cannot be opened now: {error}", error) from error
        if error.errno == errno.EIO:
            what = f"the data directory {directory} cannot be opened now: {error}; see to the disk and try again"
            raise StoreFailedError(what) from error
        reason = "nothing can be made there" if error.errno == errno.ENOENT else f"{error.strerror} ({error.filename})"
        how = " with `directory:`" if config.file is not None else ""
        raise ConfigError(
            [f"the data directory {directory} cannot be used: {reason}; choose one{how} that this user may write in"]
        ) from error
