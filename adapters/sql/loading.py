"""At open: the state as the tables say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.engine import Connection

from ...policies.destination import Destination, Kind
from ...policies.errors import CorruptionError, PlacementError
from ..base import Progress, Subscription
from ..delivery import Feed, feeds_of
from .applying import load_counts
from .branches import Branch, branch_of
from .destinations import DestinationState, Durable
from .messages import unescaped
from .room import Room
from .state import State


class Loader:
    """Fills a state that is new. Raises SQLAlchemyError, CorruptionError, PlacementError."""

    def __init__(self, state: State, connection: Connection, store_id: bytes, where: str) -> None:
        """`where`: what a damage is said to be in."""
        self._state, self._connection, self._store_id, self._where = state, connection, store_id, where

    def _all(self, name: str, **parameters: Any) -> Sequence[Any]:
        return self._connection.execute(self._state.statements[name], parameters).all()

    def load(self, progress: Progress | None) -> None:
        state = self._state
        rows = self._all("select.store", owner=self._store_id.hex())
        if not rows:  # they were looked at before this, but nothing was in them
            raise PlacementError(
                f"the tables in {self._where} have just been taken over by another store; give this one another "
                "schema_prefix or database"
            )
        row = rows[0]
        state.batch, state.last_seq, state.last_number = row[1], row[2], row[3]
        self._destinations()
        self._durables()
        self._counts(progress)
        self._duplicates()
        state.last_seq = max(state.last_seq, self._all("select.last")[0][0] or 0)
        state.committed = dict.fromkeys(bytes.fromhex(xid) for (xid,) in self._all("select.committed"))
        state.next_expiry = self._all("select.expiry")[0][0] or 0

    def _destinations(self) -> None:
        state = self._state
        for number, kind, name in self._all("select.destinations"):
            destination = DestinationState(Destination(Kind(kind), name), number)
            state.destinations[destination.destination] = destination
            state.by_number[number] = destination
            state.last_number = max(state.last_number, number)

    def _durables(self) -> None:
        state = self._state
        redelivered = {number for (number,) in self._all("select.redelivered.durables")}
        for number, client, name, topic, selector, no_local, destination, start in self._all("select.durables"):
            owner = state.by_number.get(destination)
            if owner is None or owner.destination.name != topic:
                raise self._damage(f"the subscription {number} in DURABLES is of topic {topic!r}, which is not there")
            subscription = Subscription(
                owner.destination, unescaped(name), unescaped(client),
                None if selector is None else unescaped(selector), bool(no_local),
            )  # fmt: skip
            durable = Durable(subscription, number, start, Feed(owner, number, subscription.key))
            durable.redelivered = number in redelivered
            owner.durables[subscription.key] = state.durables[number] = durable
            state.last_number = max(state.last_number, number)

    def _counts(self, progress: Progress | None) -> None:
        state = self._state
        found: dict[int, list[tuple[int, ...]]] = {}
        for number, *counts in self._all("select.counts"):
            if not number:
                continue  # staged by a branch: it is nowhere yet
            found.setdefault(number, []).append(tuple(counts))
        for place, (number, rows) in enumerate(found.items()):
            owner = state.by_number.get(number)
            if owner is None:
                raise self._damage(f"MESSAGES holds messages of destination {number}, which is not there")
            load_counts(state, owner, rows)
            for durable in owner.durables.values():
                durable.count = self._all(
                    "select.count.durable", destination=number, durable=durable.number, start=durable.start
                )[0][0]
            if progress is not None:
                progress("counting messages", place + 1, len(found))

    def _duplicates(self) -> None:
        state = self._state
        rows = self._all("select.duplicates")
        kept = rows[len(rows) - state.window.limit :] if state.window.limit else ()
        if rows:
            state.window.number = rows[-1][0]
        state.window.add(
            (number, (state.by_number[destination].destination, unescaped(message_id)), seq)
            for number, destination, message_id, seq in kept
            if destination in state.by_number
        )

    def prepared(self, room: Room) -> None:
        """What is prepared: its acks are claimed again (rule X6), its room is reserved."""
        state = self._state
        for number, xid, content in self._all("select.xalog"):
            if content is None:
                content = b"".join(row[0] for row in self._all("select.chunks", message=number))
            branch = branch_of(bytes.fromhex(xid), bytes(content), state.note_of)
            branch.id = number
            branch.reservation = room.hold((len(branch.sends), sum(sending.size for sending in branch.sends)))
            self._claim(branch)
            state.prepared[branch.transaction] = branch
            state.last_seq = max(state.last_seq, number)

    def _claim(self, branch: Branch) -> None:
        state = self._state
        kept = []
        for note, seq in branch.acks:
            feeds = feeds_of(note)
            place = state.place(feeds[0], seq)
            if place is None:
                continue  # its subscription or destination was removed in spite of it
            for feed in feeds:
                state.places[feed.base + seq] = place
            kept.append((note, seq))
        branch.acks = kept
        state.delivery.claim_again(kept)

    def _damage(self, what: str) -> CorruptionError:
        error = CorruptionError(self._where, 0, what, "restore the tables from a backup")
        held: dict[str, int | None] = {}
        for number, _, count, *_ in self._all("select.counts"):  # one row for each priority
            if number in self._state.by_number:
                name = str(self._state.by_number[number].destination)
                held[name] = (held.get(name) or 0) + count
        error.name_held(held, "these tables")
        return error
