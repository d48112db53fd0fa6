"""A transaction over several stores while it is in memory: what it does in each, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..adapters.base import Change, Message, Outgoing, Receipt, Store
from ..policies.destination import Destination
from ..policies.errors import ClosedError, OutcomeUnknownError, StoreFailedError, UnknownMessageError
from .xid import Xid

if TYPE_CHECKING:
    from .store_registry import StoreRegistry


class Part:
    """What a transaction does in one store."""

    __slots__ = ("acks", "changes", "first", "room", "sends", "store", "work")

    def __init__(self, store: Store, first: Destination) -> None:
        self.store = store
        self.first = first
        """A destination in it: one that was closed for being idle is opened again by it."""
        self.sends: list[tuple[Destination, Outgoing]] = []
        self.acks: list[Message] = []
        self.changes: list[Change] = []
        self.room: object = None
        self.work: Work | None = None
        """The transaction that it has become part of."""

    def commit(self, places: StoreRegistry) -> list[Receipt]:
        """By its store alone. After any error but OutcomeUnknownError its messages are free again."""
        try:
            return places.with_store(self, lambda store: store.commit(self.sends, self.acks, changes=self.changes))
        except OutcomeUnknownError:
            raise
        except Exception:
            self.unclaim()
            raise

    def unclaim(self) -> None:
        """Nothing was prepared, or it failed: the messages are free again."""
        unclaim(self.store, self.acks)


def unclaim(store: Store, messages: Sequence[Message]) -> None:
    """Free those of these messages that are claimed still."""
    if messages:
        try:
            store.unclaim(messages)
        except UnknownMessageError:  # some were freed before, by a failed commit or a rollback to a savepoint
            for message in messages:
                try:
                    store.unclaim([message])
                except (StoreFailedError, ClosedError, UnknownMessageError):
                    pass
        except (StoreFailedError, ClosedError):
            pass  # the store's leases and claims are gone with it


class Work:
    """A transaction on its way through the two phases. `phase` moves by single assignments, so that another thread can
    take over from one that was interrupted."""

    __slots__ = ("alone", "id", "parts", "phase", "xid")

    def __init__(self, transaction: bytes, parts: Sequence[Part], xid: Xid | None, alone: Part | None = None) -> None:
        self.id = transaction
        self.parts = parts
        """Those that are prepared."""
        self.xid = xid
        self.alone = alone
        """The part whose own commit decides for the others, which are volatile (rule T7)."""
        self.phase = "preparing"

    @property
    def participants(self) -> list[bytes]:
        """The ids of the stores that have to remember. Volatile ones take part in visibility only (rule T7)."""
        return [part.store.store_id for part in self.parts if not part.store.volatile]

    @property
    def stores(self) -> list[str]:
        return [part.store.name for part in self.parts]
