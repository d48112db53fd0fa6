"""The configuration file: YAML in, typed models out, with every error of the file at once.

    config = load("stores.yaml")
    store = config.routes().route(Destination.parse("orders.custom")).target
    print(store.name, store.options)

or without a file, with the same checks:

    config = Config("data", [StoreConfig("all", [">"], journal=JournalOptions(sync=Sync.PERIODIC))])

docs/configuration.md says what the file may say; `json_schema` says it to editors. Loading reads the one file and the
environment variables that it names; it creates nothing.
"""

from __future__ import annotations

from .fields import Duration, Options, Size
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
    "MemoryOptions",
    "Options",
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
