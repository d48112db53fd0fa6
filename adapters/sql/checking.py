"""Checks of what must hold between the tables, and between them and what the store knows in memory (Store.check)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy.engine import Connection

from ..core.record.place import is_volatile
from ..core.state.states import Catalog
from .database import dialects
from .database.statements import Statements


def violations(
    connection: Connection,
    catalog: Catalog,
    statements: Statements,
    branches: Mapping[bytes, int],
    last_seq: int,
) -> list[str]:
    """Return each violation, in words. Called while nothing is written. Raises SQLAlchemyError."""
    check = _Check(connection, catalog, statements)
    return [
        *dialects.damages(connection),
        *check.counts(),
        *check.subscriptions(),
        *check.store(branches, last_seq),
        *check.holds(),
    ]


class _Check:
    def __init__(self, connection: Connection, catalog: Catalog, statements: Statements) -> None:
        self._connection, self._catalog, self._statements = connection, catalog, statements

    def _all(self, name: str, **parameters: Any) -> Any:
        return self._connection.execute(self._statements[name], parameters).all()

    def counts(self) -> Iterator[str]:
        """Yield the violations in the counts of destinations."""
        by_number: dict[int, list[Any]] = defaultdict(list)
        for number, *rest in self._all("select.counts"):
            by_number[number].append(rest)
        for number in sorted(by_number.keys() - self._catalog.by_number.keys()):
            yield f"MESSAGES holds messages of destination {number}, which is not there"
        for number, state in list(self._catalog.by_number.items()):
            rows = by_number.get(number, [])
            for what, column, value in (("messages", 1, state.count), ("bytes", 2, state.bytes)):
                there = sum(int(row[column]) for row in rows)
                if there != value:
                    yield f"{state.destination} counts {value} {what}; MESSAGES holds {there}"
            waiting = self._all("select.count.waiting", destination=number)[0][0]
            if waiting != state.delayed:
                yield f"{state.destination} counts {state.delayed} messages that wait; MESSAGES holds {waiting}"

    def subscriptions(self) -> Iterator[str]:
        """Yield the violations in what subscriptions have to ack, and in the tables that hang on them."""
        rows = {row[0] for row in self._all("select.durables")}
        subscriptions = self._catalog.subscriptions
        if rows != subscriptions.keys():
            yield f"DURABLES holds the numbers {sorted(rows)}; the store knows {sorted(subscriptions)}"
        for number, one in list(subscriptions.items()):
            parameters = {"destination": one.topic.number, "durable": number, "start": one.start + 1}
            there = self._all("select.count.durable", **parameters)[0][0]
            if there != one.count:
                yield f"{one.subscription} counts {one.count} to ack; the tables say {there}"
            there = self._all("select.count.waiting.durable", **parameters)[0][0]
            there += self._all("select.count.waits", durable=number)[0][0]
            if there != one.delayed:
                yield f"{one.subscription} counts {one.delayed} that wait; the tables say {there}"
        for name, what in (
            ("select.orphans.acks", "ACKS has rows of what is not there, or lies before the subscription's start"),
            ("select.orphans.redeliveries", "REDELIVERIES has rows of what is not there"),
            ("select.orphans.chunks", "CHUNKS has rows of what is not there"),
        ):
            orphans = self._all(name, most=10)
            if orphans:
                yield f"{what}: {[tuple(row) for row in orphans]}"
        for number, key in self._all("select.keys.twice", most=10):
            yield f"MESSAGES has two values of key {bytes(key)!r} of destination {number}"
        for (seq,) in self._all("select.finished", most=10):
            yield f"message {seq} of a topic was acked by all, and is still in MESSAGES"

    def store(self, branches: Mapping[bytes, int], last_seq: int) -> Iterator[str]:
        """Yield the violations in ids, and in what is prepared."""
        highest = self._all("select.last")[0][0] or 0
        if highest > last_seq:
            yield f"MESSAGES has the id {highest}, beyond the highest that was given out, {last_seq}"
        rows = {bytes.fromhex(row[1]) for row in self._all("select.xalog")}
        if rows != branches.keys():
            yield f"XALOG holds {len(rows)} prepared transactions, the store knows {len(branches)}"

    def holds(self) -> Iterator[str]:
        """Yield each held message that is not there."""
        for channel in self._catalog.channels():
            for seq, lease in list(channel.held.items()):
                if not is_volatile(lease.place) and not self._all("select.place", message=seq):
                    yield f"message {seq} of {channel.state.destination} is held and is not in MESSAGES"
