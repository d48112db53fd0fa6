"""The options of a store that the core has to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....policies.config.when_full import WhenFull

if TYPE_CHECKING:
    from ....policies.config import LimitOptions, Redelivery, StoreOptions


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a store that the core has to know."""

    priorities: bool = False
    duplicate_window: int = 100_000
    max_leases: int = 100_000
    max_deliveries: int | None = None
    count_on_receive: bool = False
    """A delivery is counted before a message is handed out, instead of when it comes back."""
    lease_timeout: float | None = None
    """Seconds for which a message is leased where its receiver says nothing else; None: without an end."""
    redelivery: Redelivery | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    max_bytes_option: str = "max_bytes"
    """The name by which users know `max_bytes`."""
    min_free_disk: int | None = None
    when_full: WhenFull = WhenFull.FAIL
    block_timeout: float = 30.0
    limits: Sequence[LimitOptions] = ()
    nonpersistent_max_messages: int | None = None
    nonpersistent_max_bytes: int | None = None
    nonpersistent_memory: int = 64 << 20
    roll_over_size: int = 16 << 20
    """Bytes of a swap file of theirs."""
    message_bytes_max: int = 1 << 30
    large_message_size: int = 1 << 20
    """A body that is read from a file and is longer (bytes) is kept apart from its message."""
    ticket_bytes_max: int = 1 << 20
    """Bytes that are written together of a send of many."""
    batch_changes_max: int = 1000
    """The most changes that share one write of a thread of the store's own."""
    gather_seconds: float = 0.0
    """How long such a write waits for more changes."""
    promise_max: int = 0
    """The most bytes that are kept free for the outcome of one prepared branch."""
    outcome_timeout: float = 0.0
    """Seconds for which a caller waits to be told whether a write took effect whose outcome was unknown at first."""

    @classmethod
    def of(cls, options: StoreOptions, **others: Any) -> Settings:
        """Make the settings from what every kind's options have; `others` are fields of this class."""
        return cls(
            priorities=options.priorities,
            duplicate_window=options.duplicate_window,
            max_leases=options.max_leases,
            max_deliveries=options.max_deliveries,
            count_on_receive=options.count_deliveries == "on_receive",
            lease_timeout=options.lease_timeout,
            redelivery=options.redelivery,
            max_messages=options.max_messages,
            min_free_disk=options.min_free_disk,
            when_full=options.when_full,
            block_timeout=options.block_timeout,
            limits=options.limits,
            nonpersistent_max_messages=options.nonpersistent_max_messages,
            nonpersistent_max_bytes=options.nonpersistent_max_bytes,
            nonpersistent_memory=options.nonpersistent_memory,
            roll_over_size=options.roll_over_size,
            message_bytes_max=options.message_bytes_max,
            large_message_size=options.large_message_size,
            **others,
        )
