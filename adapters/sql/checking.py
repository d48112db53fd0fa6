"""What must hold between the tables, and between them and the state in memory (Store.check)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy.engine import Connection

from .database import Database
from .state import State

PAGE = 5000


def violations(state: State, database: Database) -> list[str]:
    """Each violation, in words. While nothing is written. Raises StoreFailedError."""
    with state.lock:
        return database.read(lambda connection: list(_Check(state, connection).found()))


class _Check:
    def __init__(self, state: State, connection: Connection) -> None:
        self._state, self._connection = state, connection

    def _all(self, name: str, **parameters: Any) -> Any:
        return self._connection.execute(self._state.statements[name], parameters).all()

    def found(self) -> list[str]:
        problems: list[str] = []
        self._counts(problems)
        self._subscriptions(problems)
        self._store(problems)
        self._holds(problems)
        return problems

    def _counts(self, problems: list[str]) -> None:
        state = self._state
        found: dict[int, list[Any]] = defaultdict(list)
        for number, *rest in self._all("select.counts"):
            found[number].append(rest)
        staged = sum(row[1] for row in found.pop(0, []))
        if staged > sum(len(branch.sends) for branch in state.prepared.values() if branch.stage):
            problems.append(f"MESSAGES holds {staged} messages of destination 0, more than are prepared")
        problems += [
            f"MESSAGES holds messages of destination {number}, which is not there"
            for number in sorted(found.keys() - state.by_number.keys())
        ]
        for number, known in state.by_number.items():
            rows = found.get(number, [])
            for what, column, value in (
                ("messages", 1, known.count),
                ("bytes", 2, known.size),
                ("that expire", 3, known.expiring),
            ):
                there = sum(int(row[column]) for row in rows)
                if there != value:
                    problems.append(f"{known.destination} counts {value} {what}; MESSAGES holds {there}")
        total = sum(int(row[1]) for rows in found.values() for row in rows)
        if total != state.messages:
            problems.append(f"the store counts {state.messages} messages; MESSAGES holds {total}")

    def _subscriptions(self, problems: list[str]) -> None:
        state = self._state
        rows = {row[0]: row for row in self._all("select.durables")}
        if rows.keys() != state.durables.keys():
            problems.append(f"DURABLES holds the numbers {sorted(rows)}; the store knows {sorted(state.durables)}")
        for number, durable in state.durables.items():
            destination = durable.feed.owner.number
            there = self._all("select.count.durable", destination=destination, durable=number, start=durable.start)[0][
                0
            ]
            if there != durable.count:
                problems.append(f"{durable.subscription} counts {durable.count} to ack; the tables say {there}")
        for name, what in (
            ("select.orphans.acks", "ACKS has rows of what is not there, or lies before the subscription's start"),
            ("select.orphans.redeliveries", "REDELIVERIES has rows of what is not there"),
            ("select.orphans.chunks", "CHUNKS has rows of what is not there"),
        ):
            orphans = self._all(name, most=10)
            if orphans:
                problems.append(f"{what}: {[tuple(row) for row in orphans]}")
        for (seq,) in self._all("select.finished", most=10):
            problems.append(f"message {seq} of a topic was acked by all, and is still in MESSAGES")

    def _store(self, problems: list[str]) -> None:
        state = self._state
        highest = self._all("select.last")[0][0] or 0
        if highest > state.last_seq and not state.wrapped:
            problems.append(f"MESSAGES has the id {highest}, beyond the highest that was given out, {state.last_seq}")
        rows = {bytes.fromhex(row[1]) for row in self._all("select.xalog")}
        if rows != state.prepared.keys():
            problems.append(f"XALOG holds {len(rows)} prepared transactions, the store knows {len(state.prepared)}")

    def _holds(self, problems: list[str]) -> None:
        state = self._state
        for key, (feed, _) in list(state.delivery.held.items()):
            seq = key - feed.base
            if state.row(seq) is None:
                problems.append(f"message {seq} of {feed.owner.destination} is held and is not in MESSAGES")
