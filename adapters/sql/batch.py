"""One database transaction for what many callers asked for: what it will do, put together in the order of the queue,
then written with as few statements as may be, then applied to the state in memory.

B1  What a ticket does is all in the batch or none of it. One that is refused leaves nothing, the others go on.
B2  A seq is given out here, in the order of the commits. No later batch begins before this one is applied.
B3  Sends and acks of a batch do not meet: nothing is acked that was not received, hence committed, before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy.engine import Connection

from ...policies.destination import Destination
from ...policies.errors import (
    AnabranchError,
    StoreFailedError,
)
from ..base import SubscriptionKey
from ..delivery import Feed, Place, feeds_of
from . import alone
from .branches import Branch, payload_of
from .destinations import DestinationState, Durable
from .messages import Sending, Staged, chunks, escaped, message_values
from .room import Room
from .state import LAST, PAGE, PARTS, State
from .tickets import (
    ACK,
    COMMIT,
    DELETE,
    DELIVERED,
    FORGET,
    PREPARE,
    PURGE,
    ROLLBACK,
    SEND,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Ticket,
)

_ORDER: Final = (
    "insert.destination", "insert.message", "insert.chunk", "update.staged", "update.staged.chunks",
    "delete.message", "delete.chunks", "insert.xalog", "update.delivered", "delete.redelivery",
    "insert.redelivery", "insert.ack", "insert.committed", "delete.committed", "insert.duplicate",
)  # fmt: skip
"""The statements that are gathered, in the order in which they are run."""
GAP: Final = 1000
"""Acks of a topic's messages that lie closer together than this are counted by one query."""


class Batch:
    """Made, filled, written and applied by the one thread that writes."""

    def __init__(self, state: State, room: Room, connection: Connection) -> None:
        self.state, self.room = state, room
        self.statements = state.statements
        self.connection = connection
        self.tickets: list[Ticket] = []
        self.number = state.batch + 1
        self.last_seq, self.last_number = state.last_seq, state.last_number
        self.free_until, self.wrapped = state.free_until, state.wrapped
        self.duplicates: list[tuple[int, tuple[Destination, str], int]] = []
        self._fresh: dict[tuple[Destination, str], int] = {}
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.numbers: dict[DestinationState, int] = {}
        """Of destinations that are new."""
        self.sent: list[tuple[DestinationState, Sending | Staged, int]] = []
        """Those that are stored."""
        self.acked: dict[int, tuple[Feed, int, Place]] = {}
        """By held key."""
        self.dead: dict[int, Place] = {}
        """By seq."""
        self.delivered: dict[int, tuple[Feed, int, int]] = {}
        """By held key: feed, seq, count."""
        self.views: dict[DestinationState, dict[SubscriptionKey, Durable]] = {}
        """The subscriptions of topics where they change."""
        self.removed: list[Durable] = []
        self.recount: dict[DestinationState, None] = {}
        """Of these much has changed: they are counted anew."""
        self.counted: dict[DestinationState, tuple[list[Any], dict[Durable, int]]] = {}
        self.purged: list[DestinationState] = []
        self.gone: list[DestinationState] = []
        self.purging: list[Feed] = []
        self.prepared: list[Branch] = []
        self.committed: list[Branch] = []
        self.rolled_back: list[Branch] = []
        self.forgotten: list[bytes] = []
        self.acknowledged = self.sends = self.unwanted = 0
        self.wrote = False

    # Filling

    def add(self, ticket: Ticket) -> None:
        """Take a ticket in, or refuse it: its error says why."""
        try:
            ticket.outcomes = self._take(ticket)
        except AnabranchError as error:
            ticket.error = error
        else:
            self.tickets.append(ticket)

    def _take(self, ticket: Ticket) -> list[Any]:
        """What comes of each operation. Changes of subscriptions come first: what is sent is for those that have begun,
        and not for those that are gone. Then sends, which may be refused, then acks."""
        alone.check_changes(self, ticket)
        outcomes = []
        fits = False
        for operation in ticket.operations:
            if operation[0] == SEND:
                if not fits:
                    self._take_room([other[1] for other in ticket.operations if other[0] == SEND], reserved=False)
                    fits = True
                outcomes.append(self._send(operation[1]))
            else:
                outcomes.append(self._operation(operation))
        return outcomes

    def _operation(self, operation: tuple[Any, ...]) -> Any:
        kind, subject = operation[0], operation[1]
        if kind == ACK:
            return self._ack(*subject)
        if kind == DELIVERED:
            return self._deliver(*subject)
        if kind == PREPARE:
            return self._prepare(subject)
        if kind == COMMIT:
            return self._commit(subject)
        if kind == ROLLBACK:
            return self._roll_back(subject)
        if kind == FORGET:
            return self._forget(subject)
        if kind == SUBSCRIBE:
            return alone.subscribe(self, subject[0])
        if kind == UNSUBSCRIBE:
            return alone.unsubscribe(self, subject[0].subscription)
        if kind == PURGE:
            return alone.purge(self, *subject)
        assert kind == DELETE
        return alone.delete(self, subject)

    # Sends

    def _take_room(self, sends: Sequence[Sending | Staged], reserved: bool) -> None:
        """Raises StoreFullError."""
        new: set[tuple[Destination, str]] = set()
        messages = size = 0
        for sending in sends:
            key = self._key(sending)
            if key is not None and not sending.requeued and (key in new or self._seen(key) is not None):
                continue
            if key is not None:
                new.add(key)
            if self._stored(sending.destination):
                messages += 1
                size += sending.size
        self.room.take((messages, size), reserved)

    def _key(self, sending: Sending | Staged) -> tuple[Destination, str] | None:
        if sending.message_id is None or not self.state.window.limit:
            return None
        return sending.destination, sending.message_id

    def _seen(self, key: tuple[Destination, str]) -> int | None:
        found = self._fresh.get(key)
        return self.state.window.get(key) if found is None else found

    def _stored(self, destination: Destination) -> bool:
        """Whether anybody is to have it: a topic's message without subscriptions is gone at once."""
        state = self.state.destination(destination)
        return not state.is_topic or bool(self.view(state))

    def _send(self, sending: Sending | Staged) -> tuple[int, bool]:
        """Its seq, and whether it is a duplicate."""
        self.sends += 1
        key = self._key(sending)
        if key is not None and not sending.requeued:
            seen = self._seen(key)
            if seen is not None:
                self._unstage(sending)
                return seen, True
        state = self.state.destination(sending.destination)
        number = self.declare(state)
        seq = self.take_seq()
        if key is not None:
            self._remember(key, number, seq)
        if not self._stored(sending.destination):
            self._unstage(sending)
            self.unwanted += 1
            return seq, False
        if isinstance(sending, Staged):
            self._place(sending, number, seq)
        else:
            parts = self._split(seq, sending.body)
            self._rows["insert.message"].append(message_values(sending, seq, number, parts))
        self.sent.append((state, sending, seq))
        return seq, False

    def _place(self, staged: Staged, number: int, seq: int) -> None:
        """What is in MESSAGES already is a message from now on."""
        self._rows["update.staged"].append(
            {"staged": staged.row, "seq": seq, "number": number, "expires": staged.expires_at_ms}
        )
        if staged.parts:
            self._rows["update.staged.chunks"].append({"staged": staged.row, "seq": seq})

    def _unstage(self, sending: Sending | Staged) -> None:
        """It is not to be stored after all."""
        if isinstance(sending, Staged):
            self._rows["delete.message"].append({"message": sending.row})
            if sending.parts:
                self._rows["delete.chunks"].append({"message": sending.row})

    def _split(self, number: int, body: bytes) -> int:
        """In how many rows of CHUNKS a body is; 0: it is short enough."""
        size = self.state.options.chunk_size
        if len(body) <= size:
            return 0
        parts = list(chunks(body, size))
        self._rows["insert.chunk"] += [
            {"id": number, "part": part, "content": content} for part, content in enumerate(parts)
        ]
        return len(parts)

    def declare(self, state: DestinationState) -> int:
        """The number of a destination, which is there from now on."""
        number = state.number or self.numbers.get(state)
        if not number:
            self.last_number += 1
            number = self.numbers[state] = self.last_number
            destination = state.destination
            self._rows["insert.destination"].append(
                {"number": number, "kind": destination.kind.value, "name": destination.name}
            )
        return number

    def _remember(self, key: tuple[Destination, str], number: int, seq: int) -> None:
        self._fresh[key] = seq
        row = self.state.window.number + len(self.duplicates) + 1
        self.duplicates.append((row, key, seq))
        self._rows["insert.duplicate"].append(
            {"number": row, "destination": number, "messageid": escaped(key[1]), "id": seq}
        )

    def take_seq(self) -> int:
        """The next id: 1 more than the highest ever given out; from the highest there is it goes on with the lowest
        that are free."""
        if self.last_seq >= self.free_until:
            self.find_free()
        self.last_seq += 1
        return self.last_seq

    def find_free(self) -> None:
        """The next ids that no message has."""
        if self.last_seq >= LAST:  # who has subscribed later than a message was sent must not get it now
            self.run("insert.acks.wrapped", {})
            self.run("update.durables.wrapped", {})
            self.wrapped, self.last_seq = True, 0
        after = self.last_seq
        taken = {branch.id for branch in self.state.prepared.values()}
        while True:
            found = self.query("select.ids", first=after + 1, most=PAGE)
            for (seq,) in found:
                if seq > after + 1:
                    break
                after = seq
            else:
                if len(found) == PAGE:
                    continue
            if after + 1 not in taken:
                break
            after += 1
        following = [row[0] for row in self.query("select.ids", first=after + 1, most=1)]
        following += [number for number in taken if number > after]
        self.last_seq, self.free_until = after, min([LAST + 1, *following]) - 1

    def start(self, durable: Durable) -> int:
        """The first seq that it is entitled to, as the tables say now: where ids wrap it has acked the others."""
        return 0 if self.wrapped else durable.start

    # Acks

    def _ack(self, note: Any, seq: int) -> None:
        self.acknowledged += 1
        feeds = feeds_of(note)
        for feed in feeds:
            key = feed.base + seq
            place = self.state.places.get(key)
            if place is None or key in self.acked or (feed.key is not None and self._durable(feed) is None):
                continue  # it was acked already, by one who was interrupted
            self.acked[key] = (feed, seq, place)
            if feed.key is None or isinstance(note, tuple):
                self.dead[seq] = place

    def _durable(self, feed: Feed) -> Durable | None:
        assert feed.key is not None
        durable = self.view(feed.owner).get(feed.key)
        return durable if durable is not None and durable.feed is feed else None

    def _deliver(self, feed: Feed, seq: int, count: int) -> None:
        if feed.base + seq in self.state.places:
            self.delivered[feed.base + seq] = (feed, seq, count)

    def view(self, state: DestinationState) -> dict[SubscriptionKey, Durable]:
        """The subscriptions of a topic as this batch leaves them."""
        return self.views.get(state, state.durables)

    # Branches

    def _prepare(self, branch: Branch) -> None:
        branch.id = self.take_seq()
        payload = payload_of(branch)
        parts = self._split(branch.id, payload)
        self._rows["insert.xalog"].append(
            {"id": branch.id, "xid": branch.transaction.hex(), "content": None if parts else payload}
        )
        self.prepared.append(branch)

    def _commit(self, branch: Branch) -> list[tuple[int, bool]]:
        if branch.stage and not self._has_outcome(branch):
            self._require_staged(branch)
        if not self._end(branch):
            return []
        for change in branch.changes:
            alone.apply_change(self, change)
        self._take_room(branch.sends, reserved=True)
        outcomes = [self._send(sending) for sending in branch.sends]
        for note, seq in branch.acks:
            self._ack(note, seq)
        self._rows["insert.committed"].append({"xid": branch.transaction.hex()})
        self.committed.append(branch)
        return outcomes

    def _roll_back(self, branch: Branch) -> bool:
        with self.state.lock:  # asked before anything is done: the answer may fail
            counts = [
                (feed, seq, self.state.deliveries(feed, seq) + 1)
                for note, seq in branch.acks
                for feed in feeds_of(note)
            ]
        if not self._end(branch):
            return False
        if branch.stage and self._count_staged(branch):  # they were committed by the database, but not by the store
            self.run("delete.staged.chunks", branch.staged_rows)
            self.run("delete.staged", branch.staged_rows)
        for feed, seq, count in counts:
            self._deliver(feed, seq, count)
        self.rolled_back.append(branch)
        return True

    def _end(self, branch: Branch) -> bool:
        """The branch has its outcome; False if it had it before: there is one row, or it is done (rule T6)."""
        if self._has_outcome(branch):
            return False
        if self.run("delete.xalog", {"prepared": branch.id}) != 1:
            raise StoreFailedError(
                f"the row of XALOG that holds the prepared transaction {branch.transaction.hex()} is gone: somebody "
                "else has changed the store's tables; close the store and open it again"
            )
        self.run("delete.chunks", {"message": branch.id})
        return True

    def _has_outcome(self, branch: Branch) -> bool:
        done = any(branch is other for other in (*self.committed, *self.rolled_back))
        return done or self.state.prepared.get(branch.transaction) is not branch

    def _require_staged(self, branch: Branch) -> None:
        there = self._count_staged(branch)
        if there != len(branch.sends):
            raise StoreFailedError(
                f"the prepared transaction {branch.transaction.hex()} sends {len(branch.sends)} messages, of which "
                f"{there} are in MESSAGES: its native one was ended by hand, or the tables come from a backup; restore "
                "them, or roll it back. Nothing was changed"
            )

    def _count_staged(self, branch: Branch) -> int:
        return int(self.query("select.staged", **branch.staged_rows)[0][0])

    def _forget(self, transactions: Iterable[bytes]) -> None:
        known = [t for t in transactions if t in self.state.committed]
        self._rows["delete.committed"] += [{"transaction": transaction.hex()} for transaction in known]
        self.forgotten += known

    def over(self) -> None:
        """It is known whether it took effect. Idempotent."""
        while self.purging:
            feed = self.purging.pop()
            feed.purging -= 1
            feed.wake()

    # Writing

    def write(self) -> None:
        """Everything that is not written yet."""
        self._write_deliveries()
        for name in _ORDER:
            self.flush(name)
        self._write_acks()
        if self.duplicates:
            kept = self.state.window.first_kept(len(self.duplicates))
            if kept:
                self.run("delete.duplicates", {"upto": kept - 1})
        for state in self.recount:
            self.count(state)

    @property
    def changes_nothing(self) -> bool:
        """Before `write`."""
        moved = self.last_seq != self.state.last_seq
        return not (self.wrote or moved or self.acked or self.delivered or any(self._rows.values()))

    def _write_deliveries(self) -> None:
        for key, (feed, seq, count) in self.delivered.items():
            if key in self.acked:
                continue
            if feed.key is None:
                self._rows["update.delivered"].append({"message": seq, "count": count})
            else:
                self._rows["delete.redelivery"].append({"subscription": feed.number, "message": seq})
                self._rows["insert.redelivery"].append({"durable": feed.number, "id": seq, "deliverycount": count})

    def _write_acks(self) -> None:
        """Each subscription acks for itself; what all that are entitled to it have acked is dead."""
        wait: dict[int, tuple[Place, int]] = {}
        shared: set[int] = set()
        redelivered: set[int] = set()
        acks: list[dict[str, Any]] = []
        for feed, seq, place in self.acked.values():
            if feed.key is None:
                continue
            durables = self.view(feed.owner).values()
            if any(durable.redelivered or durable.feed.base + seq in self.delivered for durable in durables):
                redelivered.add(seq)
            if len(durables) > 1:
                shared.add(seq)
            entitled = sum(self.start(durable) <= seq for durable in durables)
            if seq in self.dead:
                continue
            if entitled == 1:
                self.dead[seq] = place
                continue
            acks.append({"durable": feed.number, "id": seq})
            wait[seq] = (place, entitled)
        if acks:
            self.run("insert.ack", acks)
            for seq, count in self._count_acks(sorted(wait)):
                if seq in wait and count >= wait[seq][1]:
                    self.dead[seq] = wait[seq][0]
        self.run("delete.message", [{"message": seq} for seq in self.dead])
        self.run("delete.chunks", [{"message": seq} for seq, place in self.dead.items() if place[PARTS]])
        self.run("delete.acks", [{"message": seq} for seq in self.dead if seq in shared])
        self.run("delete.redeliveries", [{"message": seq} for seq in self.dead if seq in redelivered])

    def _count_acks(self, seqs: list[int]) -> Iterable[tuple[int, int]]:
        first = 0
        for place in range(1, len(seqs) + 1):
            if place == len(seqs) or seqs[place] - seqs[place - 1] > GAP:
                yield from self.query("select.acks", first=seqs[first], last=seqs[place - 1])
                first = place

    def count(self, state: DestinationState) -> None:
        """Count a destination anew, as the tables say in this transaction."""
        number = state.number or self.numbers.get(state, 0)
        counts = list(self.query("select.counts.destination", destination=number))
        of_durables = {}
        for durable in self.view(state).values():
            values = {"destination": number, "durable": durable.number, "start": self.start(durable)}
            of_durables[durable] = self.query("select.count.durable", **values)[0][0]
        self.counted[state] = (counts, of_durables)

    def flush(self, name: str) -> None:
        """Run what is gathered of this statement."""
        rows = self._rows.pop(name, None)
        if rows:
            self.run(name, rows)

    def run(self, name: str, parameters: Any) -> int:
        """Run a statement, for one row or for many; returns how many rows it has changed."""
        if isinstance(parameters, list):
            if not parameters:
                return 0
            if len(parameters) == 1:
                parameters = parameters[0]
        self.wrote = True
        return self.connection.execute(self.statements[name], parameters).rowcount

    def query(self, name: str, **parameters: Any) -> Sequence[Any]:
        """The rows that it finds."""
        return self.connection.execute(self.statements[name], parameters).all()
