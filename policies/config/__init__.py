"""The configuration file: YAML in, typed models out, with every error of the file at once.

    config = load("stores.yaml")
    store = config.routes().route(Destination.parse("orders.custom")).target
    print(store.name, store.options)

or without a file, with the same checks:

    config = Config("data", [StoreConfig("all", [">"], journal=JournalOptions(sync=Sync.PERIODIC))])

docs/configuration.md says what the file may say; `json_schema` says it to editors. Loading reads the one file and the
environment variables that it names; it creates nothing.

The names below are imported when they are asked for. What is imported with `anabranch` asks for them in its functions,
and for type checkers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fields import Duration, Options, Redelivery, Size
    from .limits import LimitOptions
    from .models import Config, KindOptions, StoreConfig
    from .options import JournalOptions, MemoryOptions, SqlOptions, StoreOptions, TransactionOptions, UsageOptions
    from .reading import as_plain_data, load, loads, warnings
    from .schema import json_schema
    from .writing import dump_yaml

__all__ = [
    "Config",
    "Duration",
    "JournalOptions",
    "KindOptions",
    "LimitOptions",
    "MemoryOptions",
    "Options",
    "Redelivery",
    "Size",
    "SqlOptions",
    "StoreConfig",
    "StoreOptions",
    "TransactionOptions",
    "UsageOptions",
    "as_plain_data",
    "dump_yaml",
    "json_schema",
    "load",
    "loads",
    "warnings",
]


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import the modules of the models, which need pydantic, when the first of their names is asked for. That is
        half of the time that `import anabranch` would take."""
        before = set(sys.modules)
        try:
            for module in ("options", "models", "reading", "writing", "schema") if name in __all__ else ():
                if (found := vars(import_module(f".{module}", __name__)).get(name)) is not None:
                    return found
        except BaseException:  # Ctrl-C. PyYAML cannot be imported once more beside those of its modules that are there.
            for left in sorted(sys.modules.keys() - before):
                if left.rpartition(".")[0] not in {*sys.modules, ""}:
                    del sys.modules[left]
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
