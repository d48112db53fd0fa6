"""The kinds of stores: the names under which adapters are registered in the entry-point group `anabranch.adapters`.

A third party's adapter class carries the model of its options as `options_model`:

    class MongoOptions(StoreOptions):
        url: str
        password: SecretStr | None = None        # the file may say `password_env: NAME` instead
        batch: Annotated[int, Size(1024)] = 65536

    class MongoStore:
        options_model = MongoOptions

Adapters are found by name and imported only when a store is of their kind.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from ..errors import MissingExtraError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ADAPTERS_GROUP = "anabranch.adapters"
DEFAULT_KIND = "journal"
OURS: Final = (DEFAULT_KIND, "sql", "memory")


@lru_cache(maxsize=1)
def _adapters(_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the registered adapters; sys.path decides. Asking takes a millisecond, too much for each of 500 stores."""
    from importlib.metadata import entry_points  # a slow start

    return {entry.name: entry for entry in entry_points(group=ADAPTERS_GROUP)}


def known_kinds() -> list[str]:
    """Return the names of the registered adapters, sorted. No adapter is imported."""
    return sorted({*OURS, *_adapters(tuple(sys.path))})


def kind_in(store: Mapping[Any, Any]) -> str:
    """Return the kind of a store that has these keys."""
    return next((kind for kind in known_kinds() if kind in store), DEFAULT_KIND)


def load_adapter(kind: str) -> Any:
    """Import the adapter class of a kind: a Store (core/store.py). Raises ValueError, which says why not, and
    MissingExtraError where the adapter says itself what to install."""
    entry = _adapters(tuple(sys.path)).get(kind)
    if entry is None:
        raise ValueError(f"no adapter {kind!r} is installed; there are: {', '.join(known_kinds())}")
    try:
        return entry.load()
    except MissingExtraError:
        raise
    except Exception as error:
        # Third-party code: whatever its import raises, the file's author needs to know which line asked for it.
        raise ValueError(f"the adapter {kind!r} ({entry.value}) cannot be loaded: {error}") from error
