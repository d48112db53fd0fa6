"""A copy of one store while it is used, as it is at one moment: what its backend copies, its id, and its large bodies.

Bodies that are there at that moment stay until they are copied. Later ones may come along: whoever opens the copy finds
that nothing names them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ....policies.errors import PlacementError
from ...system.files import new_directory, sync_directory, sync_file
from ..record.large import BODY, DIRECTORY

if TYPE_CHECKING:
    from ..store import Store


class StoreCopier:
    """Copies one store, once. The contexts are those of a backend's Copier."""

    def __init__(self, store: Store) -> None:
        """Make a copier. Raises PlacementError for a store that cannot be copied while it is used."""
        copier = store.backend.copier()
        if copier is None:
            raise PlacementError(
                f"store {store.name!r}, of kind {store.backend.kind}, cannot be copied while it is used: it lies in a "
                "database elsewhere, or its kind does not know how. Close the router, and copy both by their own means"
            )
        self._copier, self._directory, self._bodies = copier, store.directory, store._engine.bodies

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let nothing go that is copied."""
        if self._bodies is None:
            with self._copier.kept():
                yield
            return
        with self._bodies.held(), self._copier.kept():
            yield

    def still(self) -> AbstractContextManager[None]:
        """Return the context of the moment that is copied."""
        return self._copier.still()

    def copy(self, directory: Path, file_mode: int) -> int:
        """Make a directory with the store as it was. Returns bytes; durable once the directory's own name is. Raises
        AnabranchError, OSError."""
        new_directory(directory, file_mode)
        size = self._copier.copy(directory)
        shutil.copy2(self._directory / "store.id", directory / "store.id")
        bodies = list((self._directory / DIRECTORY).glob(f"*{BODY}"))
        if bodies:
            new_directory(directory / DIRECTORY, file_mode)
        for path in bodies:
            copy = directory / DIRECTORY / path.name
            shutil.copy2(path, copy)
            with copy.open("rb") as file:
                sync_file(file.fileno())
            size += copy.stat().st_size
        if bodies:
            sync_directory(directory / DIRECTORY)
        sync_directory(directory)
        return size
