"""Types of the values that the constructors of options take, as in a file: a size may be `32MiB`, a duration `500ms`.
tests/policies/test_option_values.py compares them with the models' fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import SecretStr

from .durability import OnCorruption, Sync
from .fields import Redelivery
from .limits import Full, LimitOptions
from .when_full import WhenFull

Size = int | str
Duration = float | str
Mode = int | str
Place = str | Path


class StoreValues(TypedDict, total=False):
    """The values that every kind of store of ours takes."""

    priorities: bool
    dead_letter: str | None
    max_deliveries: int | None
    count_deliveries: Literal["on_return", "on_receive"]
    redelivery: Redelivery | Mapping[str, Any] | None
    duplicate_window: int
    max_leases: int
    lease_timeout: Duration | None
    message_bytes_max: Size
    large_message_size: Size
    max_messages: int | None
    min_free_disk: Size | None
    when_full: WhenFull | Full
    block_timeout: Duration
    limits: Iterable[LimitOptions | Mapping[str, Any]]
    nonpersistent_max_messages: int | None
    nonpersistent_max_bytes: Size | None
    nonpersistent_memory: Size
    roll_over_size: Size
    file_mode: Mode | None


class JournalValues(StoreValues, total=False):
    """The values that `JournalOptions` takes."""

    sync: Sync | Literal["always", "periodic", "never"]
    sync_interval: Duration
    segment_size: Size
    checkpoint_interval: Duration
    checkpoint_operations: int
    batch_bytes_max: Size
    pool_files: int
    min_files: int
    compact_live_percent: int
    compact_min_segments: int
    on_corruption: OnCorruption | Literal["refuse", "salvage"]
    archive_directory: Place | None
    archive_max_bytes: Size | None
    archive_max_age: Duration | None
    max_bytes: Size | None


class SqlValues(StoreValues, total=False):
    """The values that `SqlOptions` takes."""

    untested_database: bool
    url: str | SecretStr | None
    username: str | None
    password: str | SecretStr | None
    creator: Any | None
    pool_min: int
    pool_max: int
    pool_timeout: Duration
    pool_idle_timeout: Duration
    keepalive_interval: Duration
    keepalive_statement: str
    response_timeout: Duration
    lease_expiration: Duration | None
    lease_renewal: Duration | None
    lease_wait: Duration
    shared: bool
    router_timeout: Duration
    max_bytes: Size | None
    schema_prefix: str
    table_names: Mapping[str, str]
    create_tables: bool
    statements: Mapping[str, str]
    chunk_size: Size
    sync_period: Duration
    batch_operations_max: int
    outcome_timeout: Duration


class MemoryValues(StoreValues, total=False):
    """The values that `MemoryOptions` takes."""

    max_bytes: Size
    max_stored_bytes: Size | None


class UsageValues(TypedDict, total=False):
    """The values that `UsageOptions` takes."""

    directory: Place | None
    destinations: Iterable[str]
    sample: float
    max_bytes: Size
    flush_interval: Duration


class TransactionValues(TypedDict, total=False):
    """The values that `TransactionOptions` takes."""

    sync: Sync | Literal["always", "never"]
    timeout: Duration
    max_open: int
    max_operations: int
    max_bytes: Size
