"""The loading of what is in the tables, at open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.engine import Connection

from ...policies.errors import CorruptionError, PlacementError
from ...policies.names.destination import Destination, Kind
from ..core.backend import Found
from ..core.state.duplicates import Key
from ..core.state.states import Catalog
from ..core.store_types import Progress, Subscription
from .database.columns import unescaped
from .database.statements import Statements
from .effects import load_counts


class Loader:
    """A loader that fills a catalog that is new. Raises SQLAlchemyError, CorruptionError, PlacementError."""

    def __init__(
        self, connection: Connection, statements: Statements, catalog: Catalog, priorities: bool, where: str
    ) -> None:
        """Make a loader for one catalog. `where` is what a damage is said to be in."""
        self._connection, self._statements, self._catalog = connection, statements, catalog
        self._priorities, self._where = priorities, where
        self.batch: int = 0
        """The value of STORE.BATCH."""
        self.next_expiry: int = 0
        """The earliest time (ms) at which a message expires; 0: none does."""
        self.ids: list[tuple[int, Key]] = []
        """The ids of the duplicate window with the numbers of their rows, oldest first."""
        self.last_id: int = 0
        """The highest number of a row in DUPLICATES."""
        self.branches: dict[bytes, int] = {}
        """The ID of the row in XALOG of each prepared transaction."""

    def _all(self, name: str, **parameters: Any) -> Sequence[Any]:
        return self._connection.execute(self._statements[name], parameters).all()

    def load(self, owner: str, progress: Progress | None) -> Found:
        """Fill the catalog, and return what is there beside destinations and subscriptions. `owner` is the store's id
        in hex."""
        rows = self._all("select.store", owner=owner)
        if not rows:  # they were looked at before this, but nothing was in them
            raise PlacementError(
                f"the tables in {self._where} have just been taken over by another store; give this one another "
                "schema_prefix or database"
            )
        _, self.batch, last_seq, last_number = rows[0]
        self._destinations()
        self._subscriptions()
        self._counts(progress)
        catalog = self._catalog
        catalog.last_number = max(catalog.last_number, last_number)
        self.next_expiry = self._all("select.expiry")[0][0] or 0
        return Found(
            last_seq=max(last_seq, self._all("select.last")[0][0] or 0),
            ids=self._duplicates(),
            prepared=self._prepared(),
            committed=[bytes.fromhex(xid) for (xid,) in self._all("select.committed")],
        )

    def _destinations(self) -> None:
        for number, kind, name in self._all("select.destinations"):
            self._catalog.load(number, Destination(Kind(kind), name))

    def _subscriptions(self) -> None:
        redelivered = {number for (number,) in self._all("select.redelivered.durables")}
        for number, client, name, topic, selector, no_local, destination, start in self._all("select.durables"):
            state = self._catalog.by_number.get(destination)
            if state is None or state.destination.name != topic:
                raise self._damage(f"the subscription {number} in DURABLES is of topic {topic!r}, which is not there")
            subscription = Subscription(
                state.destination, unescaped(name), unescaped(client),
                None if selector is None else unescaped(selector), bool(no_local),
            )  # fmt: skip
            subscriber = self._catalog.load_subscription(number, state, subscription, max(start - 1, 0))
            subscriber.own = number in redelivered

    def _counts(self, progress: Progress | None) -> None:
        rows_by_number: dict[int, list[Any]] = {}
        for number, *counts in self._all("select.counts"):
            rows_by_number.setdefault(number, []).append(counts)
        for place, (number, rows) in enumerate(rows_by_number.items()):
            state = self._catalog.by_number.get(number)
            if state is None:
                raise self._damage(f"MESSAGES holds messages of destination {number}, which is not there")
            load_counts(self._catalog, state, rows, self._priorities)
            for subscriber in state.subscriptions.values():
                subscriber.count = self._all(
                    "select.count.durable", destination=number, durable=subscriber.number, start=subscriber.start + 1
                )[0][0]
            if progress is not None:
                progress("counting messages", place + 1, len(rows_by_number))
        self._waiting()

    def _waiting(self) -> None:
        for number, count in self._all("select.waiting"):
            state = self._catalog.by_number[number]
            state.delayed = count
            for subscriber in state.subscriptions.values():
                subscriber.delayed = self._all(
                    "select.count.waiting.durable", destination=number, durable=subscriber.number,
                    start=subscriber.start + 1,
                )[0][0]  # fmt: skip
        for number, count in self._all("select.waiting.durables"):
            if number in self._catalog.subscriptions:
                self._catalog.subscriptions[number].delayed += count

    def _duplicates(self) -> list[tuple[Key, int]]:
        ids = []
        for number, destination, message_id, seq in self._all("select.duplicates"):
            self.last_id = number
            if destination in self._catalog.by_number:
                key = (destination, unescaped(message_id).encode())
                self.ids.append((number, key))
                ids.append((key, seq))
        return ids

    def _prepared(self) -> list[tuple[bytes, bytes]]:
        prepared = []
        for row, xid, content in self._all("select.xalog"):
            if content is None:
                content = b"".join(bytes(part) for (part,) in self._all("select.chunks", message=row))
            transaction = bytes.fromhex(xid)
            self.branches[transaction] = row
            prepared.append((transaction, bytes(content)))
        return prepared

    def _damage(self, what: str) -> CorruptionError:
        error = CorruptionError(self._where, 0, what, "restore the tables from a backup")
        held: dict[str, int | None] = {}
        for number, _, count, *_ in self._all("select.counts"):  # one row for each priority
            state = self._catalog.by_number.get(number)
            if state is not None:
                name = str(state.destination)
                held[name] = (held.get(name) or 0) + count
        error._name_held(held, "these tables")
        return error
