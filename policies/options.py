"""The options of each kind of store of ours, and of transactions: one frozen model each.

They live here and not with the adapters, so that checking a file imports none of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator

from .config_options import Directory, Duration, Options, Positive, Size
from .destination import Destination
from .durability import Sync
from .units import GIB, KIB, MIB


def _dead_letter(pattern: str) -> str:
    Destination.parse(dead_letter_name(pattern, "x"))
    return pattern


class StoreOptions(Options):
    """What every kind of ours lets be set; a third party's model may begin from it too."""

    priorities: Annotated[bool, Field(strict=True)] = False
    """Whether messages of a higher priority are received before those of a lower one. Else it is only kept."""
    dead_letter: Annotated[str, AfterValidator(_dead_letter)] | None = None
    """The queue for messages that are not delivered any more; `{name}` in it stands for the name of the destination
    they come from. None: expired ones are dropped, and counted."""
    max_deliveries: Positive | None = None
    """A message that has come back so often is not delivered again but put into `dead_letter`, which must be given."""
    duplicate_window: Annotated[int, Field(strict=True, ge=0, le=10_000_000)] = 10_000
    """How many of the latest message ids are remembered to store a repeated send once. 0: none."""
    max_leases: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 100_000
    """How many messages may be received and not yet acked or released at one time."""
    message_bytes_max: Annotated[int, Size(1)] = 100 * MIB
    """The largest message, headers included. A larger one is refused before anything is written."""
    max_messages: Positive | None = None
    """The most messages that the store holds; a send beyond it fails. None: no limit."""

    @field_validator("max_deliveries")
    @classmethod
    def _spent_ones_go_somewhere(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("dead_letter", "") is None:
            raise ValueError("expected a `dead_letter` queue beside it, such as `dead_letter: dlq`")
        return value


def dead_letter_name(pattern: str, name: str) -> str:
    """The dead-letter queue of a destination."""
    return pattern.replace("{name}", name)


# The journal ---------------------------------------------------------------------------------------------------------


class JournalOptions(StoreOptions):
    """A segmented append-only journal with an index: the default kind of store."""

    sync: Sync = Sync.ALWAYS
    """When work is forced to the disk: `always` before a call returns, `periodic` each sync_interval, `never`."""
    sync_interval: Annotated[float, Duration(0.001, 3600)] = 1.0
    """Under `sync: periodic`: the most that a power loss may cost, in seconds, beside one sync of work."""
    segment_size: Annotated[int, Size(64 * KIB, GIB)] = 32 * MIB
    """Bytes of one journal file. Disk space comes free in whole files, and files are preallocated at this size."""
    checkpoint_interval: Annotated[float, Duration(0.01, 3600)] = 5.0
    """The index is written out after this many seconds of work; what came later is replayed after a crash."""
    checkpoint_operations: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 20_000
    """The index is written out after this many operations even if the interval is not over."""
    batch_bytes_max: Annotated[int, Size(4 * KIB, GIB)] = MIB
    """The most bytes that are gathered into one write and one sync. A segment's size limits it too."""
    pool_files: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 2
    """How many released segment files are kept for use again instead of being deleted."""
    archive_directory: Directory | None = None
    """Released segments are moved here instead of being used again or deleted."""
    max_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of messages that the store holds; a send beyond it fails. None: until the disk is full."""


# SQL -----------------------------------------------------------------------------------------------------------------


class SqlOptions(StoreOptions):
    """Tables of a database, by SQLAlchemy: SQLite in the store's own directory, or a server such as PostgreSQL."""

    url: SecretStr | None = None
    """SQLAlchemy's URL of the database, such as postgresql+psycopg://user@host/name. None: SQLite in the store's
    directory. Never shown, since it may hold a password."""
    password: SecretStr | None = None
    """The password, where the URL has none; best given as `password_env: NAME`."""
    max_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of messages that the store holds; a send beyond it fails. None: no limit."""


# Memory --------------------------------------------------------------------------------------------------------------


class MemoryOptions(StoreOptions):
    """Memory alone: nothing survives a restart. Beyond `max_bytes` messages lie in swap files."""

    max_bytes: Annotated[int, Size(64 * KIB)] = 64 * MIB
    """The most bytes that messages take in memory, what the store needs to find them included; others are swapped."""
    roll_over_size: Annotated[int, Size(64 * KIB, GIB)] = 16 * MIB
    """Bytes of one swap file; it is deleted when all messages in it are gone."""
    max_stored_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of messages that the store holds, swapped ones included; a send beyond it fails. None: until the
    disk is full."""


class TransactionOptions(Options):
    """What holds for all transactions of a router."""

    sync: Annotated[Sync, Field(json_schema_extra={"enum": ["always", "never"]})] = Sync.ALWAYS
    """`always`: what makes a transaction over several stores atomic is forced to the disk whatever the stores' own
    policies say. `never`: only as they say; a power failure may then leave a part of one."""
    timeout: Annotated[float, Duration(0.001)] = 300.0
    """Seconds after which a transaction that was neither committed nor prepared is rolled back."""
    max_open: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 10_000
    """How many transactions may be open at one time, prepared ones included."""
    max_operations: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 100_000
    """How many sends and acks one transaction may hold."""
    max_bytes: Annotated[int, Size(1, GIB)] = 64 * MIB
    """How many bytes of messages one transaction may hold; they are kept in memory until it ends."""

    @field_validator("sync", mode="before")  # or a mistyped one would be told of periodic
    @classmethod
    def _always_or_never(cls, value: object) -> object:
        if value not in (Sync.ALWAYS, Sync.NEVER, Sync.ALWAYS.value, Sync.NEVER.value):
            raise ValueError("expected 'always' or 'never'")
        return value
