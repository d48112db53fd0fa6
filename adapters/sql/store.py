"""SqlStore: the core's store over the tables of a database. With the option `shared` it is a SharedStore instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from ...policies.config.options import SqlOptions
from ...policies.errors import MissingExtraError, PlacementError
from ..core.store import Store
from ..core.store_types import Progress
from .backend import SqlBackend
from .directory import NODE

if TYPE_CHECKING:
    from .shared import SharedStore


def _shared() -> type[SharedStore]:
    try:
        from .shared import SharedStore
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"a shared store needs {error.name}, which is not installed: pip install 'anabranch[postgres]'"
        ) from None
    return SharedStore


class SqlStore(Store):
    """A store in tables of its own. Threads: all. Forks: a child's calls raise ClosedError (rule D4)."""

    backend_type: ClassVar[type[SqlBackend]] = SqlBackend
    options_model: ClassVar[type[SqlOptions]] = SqlOptions

    def __new__(cls, name: str, directory: Path, options: SqlOptions, index_directory: Path | None = None) -> Self:
        """Return the store that these options ask for."""
        return cast("Self", _shared()(name, directory, options)) if options.shared else super().__new__(cls)

    def open(self, progress: Progress | None = None) -> None:
        """Open the store, as Store.open."""
        if (self.directory / NODE).exists():
            raise PlacementError(
                f"store {self.name!r} in {self.directory} was made with `shared: true`, and its tables are many "
                "routers'; say so again, or give the store another name, and run `anabranch repartition`"
            )
        super().open(progress)

    @classmethod
    def check_options(cls, options: SqlOptions) -> None:
        """Raise ConfigError and MissingExtraError for what `create` would refuse before it connects."""
        (_shared() if options.shared else SqlBackend).check_options(options)

    @classmethod
    def create(cls, name: str, directory: Path, options: SqlOptions) -> bytes:
        """Make an empty store, as Store.create. A shared one may be there: then this is one more router of it."""
        create = _shared().create if options.shared else super().create
        return create(name, directory, options)

    @classmethod
    def is_shared(cls, options: SqlOptions) -> bool:
        """Return whether other processes may use the same tables, at the same time or in turn."""
        return options.shared or super().is_shared(options)

    @classmethod
    def peek(cls, directory: Path, options: SqlOptions, store_id: bytes, transaction: bytes) -> bool | None:
        """Return whether the store has committed a transaction, as Store.peek."""
        peek: Any = _shared().peek if options.shared else super().peek
        answer: bool | None = peek(directory, options, store_id, transaction)
        return answer
