"""The state of a store, record by record: which messages are pending, where they lie, which file's acks need which.

It follows what ActiveMQ 5.17 does to its index (MessageDatabase.process and updateIndex), with one difference: the
outcomes of transactions are known beforehand, so that an operation takes effect where its record lies. Both the usage
trace and the explanation are read off this.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...policies.errors import TraceError
from .ackmap import AckMapError, read_ack_map
from .commands import (
    AckMessageFileMap,
    AddMessage,
    Commit,
    KahaDestination,
    Prepare,
    ProducerAudit,
    RemoveDestination,
    RemoveMessage,
    Rollback,
    Subscription,
    UpdateMessage,
)
from .entries import Entry, Outcomes, read_entries
from .files import Damage, StoreFiles
from .journal import FileSummary, Journal, Report

logger: logging.Logger = logging.getLogger(__name__)

SEND, ACK, UPDATE = "send", "ack", "update"


class Effect(NamedTuple):
    """One thing that a record did to one message."""

    op: str
    destination: KahaDestination
    message_id: str
    """Unique in its destination: a message that comes back under its old id gets the place of its record added."""
    acks_needed: int = 1
    subscription: str | None = None
    is_record: bool = True
    """The record itself, and not one of its consequences: an ended subscription acks all that it had not acked."""


class Message:
    """A pending message."""

    __slots__ = ("acks_left", "bytes", "file", "id", "offset", "trace_id", "turn", "waiting")

    def __init__(
        self, message_id: str, trace_id: str, entry: Entry, waiting: set[str] | None, effective: tuple[int, int]
    ) -> None:
        self.id: str = message_id
        self.trace_id: Final = trace_id
        self.file: int = entry.record.file
        self.offset: int = entry.record.offset
        self.bytes: int = entry.record.length
        """The place of its latest record, and that record's length."""
        self.turn: Final = effective[0] << 32 | effective[1]
        """Orders a destination's messages as the broker does: by the place of the record that sent them, or of the
        Commit of their transaction."""
        self.waiting: set[str] | None = waiting
        """The subscriptions that have not acked it; None in a queue."""
        self.acks_left: int = 1 if waiting is None else len(waiting)


@dataclass(slots=True)
class DurableSubscription:
    """A durable subscription and where the record that made it lies."""

    key: str
    file: int
    info: bytes | None


@dataclass(slots=True)
class DestinationState:
    """The state of one destination."""

    messages: dict[str, Message] = field(default_factory=dict)
    subscriptions: dict[str, DurableSubscription] = field(default_factory=dict)
    seen: SeenIds = field(default_factory=lambda: SeenIds())
    sent_before: SeenIds = field(default_factory=lambda: SeenIds())
    """Messages that were acked here, and whose sends are in no file any more."""


class Replay:
    """The state of a store, which is fed every entry in order. Not for threads."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.destinations: dict[KahaDestination, DestinationState] = defaultdict(DestinationState)
        self.ack_files: dict[int, Counter[int]] = defaultdict(Counter)
        """File -> files of the messages that its acks end, and how many."""
        self.transaction_files: dict[int, Counter[int]] = defaultdict(Counter)
        """File -> files of the operations that its Prepare, Commit and XA Rollback records settle, and how many."""
        self.producer_audit_file: int | None = None
        self.ack_map_file: int | None = None
        self.ack_map: dict[int, frozenset[int]] | None = None
        """The broker's own view of the two above, at its last checkpoint; None if it left none that can be read."""
        self.since_ack_map: dict[int, set[int]] = defaultdict(set)
        """Acks and outcomes behind that map, as they add to it."""
        self.counts: Counter[str] = Counter()
        """`sends_repeated`, `acks_repeated`, `acks_unknown`, `updates`, `sends_without_subscription`."""

    def apply(self, entry: Entry) -> list[Effect]:
        """Apply the record of an entry; return what it did."""
        if entry.repeated:
            return []
        command = entry.command
        if isinstance(command, AddMessage):
            return self._add(entry, command) if self._outcomes.is_committed(entry, command.transaction) else []
        if isinstance(command, RemoveMessage):
            return self._remove(entry, command) if self._outcomes.is_committed(entry, command.transaction) else []
        if isinstance(command, UpdateMessage):
            return self._update(entry, command.message)
        if isinstance(command, Commit | Prepare | Rollback):
            self._settle(entry, command)
        elif isinstance(command, Subscription):
            return self._subscribe(entry, command)
        elif isinstance(command, RemoveDestination):
            return self._remove_destination(command.destination)
        elif isinstance(command, ProducerAudit):
            self.producer_audit_file = entry.record.file
        elif isinstance(command, AckMessageFileMap):
            self._take_ack_map(entry, command)
        return []

    def references(self) -> dict[int, set[int]]:
        """Return file -> the files without which nothing needs its acks and outcomes, as the broker has it.

        That is its own map, brought up to date. It knows what the records alone do not tell: that compaction moved a
        file's acks to another one, and where messages were that have been rewritten in files that are gone.
        """
        if self.ack_map is None:
            derived: dict[int, set[int]] = defaultdict(set)
            for source in (self.ack_files, self.transaction_files):
                for number, needed in source.items():
                    derived[number].update(needed)
            return derived
        references = {number: set(needed) for number, needed in self.ack_map.items()}
        for number, added in self.since_ack_map.items():
            references.setdefault(number, set()).update(added)
        return references

    def missing(self, files: StoreFiles) -> list[Damage]:
        """Return the files that the broker still had at its last checkpoint and that are gone. With an archive, gaps
        tell."""
        if files.has_archive or self.ack_map is None:
            return []
        present = {file.number for file in files.files}
        named = set(self.ack_map).union(*self.ack_map.values()) - present
        reason = "the file is missing: the broker's last checkpoint still counts on it, unless it was just removing it"
        return [Damage(str(files.directory / f"db-{number}.log"), 0, reason, "missing") for number in sorted(named)]

    def pending(self) -> int:
        """Return how many messages are not acked (a topic message counts once, however many subscriptions want it)."""
        return sum(len(state.messages) for state in self.destinations.values())

    def _add(self, entry: Entry, command: AddMessage) -> list[Effect]:
        state = self.destinations[command.destination]
        if command.message_id in state.messages:
            self.counts["sends_repeated"] += 1  # the broker keeps the first
            return []
        trace_id = command.message_id
        if not state.seen.add(trace_id) or trace_id in state.sent_before:
            trace_id = f"{trace_id}@{entry.record.file}:{entry.record.offset}"
        effective = self._outcomes.place_of(entry, command.transaction)
        if not command.destination.is_topic:
            state.messages[command.message_id] = Message(command.message_id, trace_id, entry, None, effective)
            return [Effect(SEND, command.destination, trace_id)]
        if not state.subscriptions:
            # The broker stores the record and forgets it at once.
            self.counts["sends_without_subscription"] += 1
            sent = Effect(SEND, command.destination, trace_id)
            return [sent, Effect(ACK, command.destination, trace_id, is_record=False)]
        state.messages[command.message_id] = message = Message(
            command.message_id, trace_id, entry, set(state.subscriptions), effective
        )
        return [Effect(SEND, command.destination, trace_id, message.acks_left)]

    def _update(self, entry: Entry, command: AddMessage) -> list[Effect]:
        message = self.destinations[command.destination].messages.get(command.message_id)
        if message is None:
            return self._add(entry, command)  # so does the broker
        self.counts["updates"] += 1
        message.file, message.offset, message.bytes = entry.record[:3]
        return [Effect(UPDATE, command.destination, message.trace_id)]

    def _remove(self, entry: Entry, command: RemoveMessage) -> list[Effect]:
        destination, key = command.destination, command.subscription_key
        state = self.destinations[destination]
        message = state.messages.get(command.message_id)
        if message is None:
            if command.message_id in state.seen:
                self.counts["acks_repeated"] += 1
                return []
            self.counts["acks_unknown"] += 1
            state.sent_before.add(command.message_id)
            return [Effect(ACK, destination, command.message_id, subscription=key)]
        self.ack_files[entry.record.file][message.file] += 1
        self._refer(entry, message.file)
        if key is None or message.waiting is None:
            del state.messages[message.id]
            return _end(destination, message, is_record=True)
        if key not in message.waiting:
            self.counts["acks_repeated"] += 1
            return []
        return self._ack(state, destination, message, key, is_record=True)

    def _ack(
        self, state: DestinationState, destination: KahaDestination, message: Message, key: str, *, is_record: bool
    ) -> list[Effect]:
        waiting = message.waiting
        assert waiting is not None
        waiting.discard(key)
        if not waiting:
            del state.messages[message.id]
        elif message.acks_left == 1:
            # A retroactive subscription joined after the send said how many acks it needs: the last one must end it.
            return []
        message.acks_left -= 1
        return [Effect(ACK, destination, message.trace_id, subscription=key, is_record=is_record)]

    def _subscribe(self, entry: Entry, command: Subscription) -> list[Effect]:
        state, key = self.destinations[command.destination], command.subscription_key
        if command.info is None:
            return self._unsubscribe(state, command.destination, key)
        is_new = key not in state.subscriptions
        state.subscriptions[key] = DurableSubscription(key, entry.record.file, command.info)
        if is_new and command.retroactive:
            for message in state.messages.values():
                if message.waiting is not None:
                    message.waiting.add(key)
        return []

    def _unsubscribe(self, state: DestinationState, destination: KahaDestination, key: str) -> list[Effect]:
        state.subscriptions.pop(key, None)
        effects = []
        for message in list(state.messages.values()):
            if message.waiting is not None and key in message.waiting:
                effects += self._ack(state, destination, message, key, is_record=False)
        return effects

    def _remove_destination(self, destination: KahaDestination) -> list[Effect]:
        state = self.destinations[destination]
        effects = [effect for m in state.messages.values() for effect in _end(destination, m, is_record=False)]
        state.messages.clear()
        state.subscriptions.clear()
        return effects

    def _settle(self, entry: Entry, command: Commit | Prepare | Rollback) -> None:
        if isinstance(command, Rollback) and not command.transaction.is_xa:
            return  # a restart discards it anyway, so its file needs nothing
        transaction = self._outcomes.find(command.transaction, entry.place)
        if transaction is not None:
            for number in transaction.files:
                self.transaction_files[entry.record.file][number] += 1
                self._refer(entry, number)

    def _refer(self, entry: Entry, number: int) -> None:
        if not entry.rewritten:  # a map is written right after each compaction
            self.since_ack_map[entry.record.file].add(number)

    def _take_ack_map(self, entry: Entry, command: AckMessageFileMap) -> None:
        self.ack_map_file = entry.record.file
        self.since_ack_map.clear()
        try:
            self.ack_map = read_ack_map(command.map)
        except AckMapError as error:
            logger.info("the ack map at %s:%s cannot be read: %s", entry.record.file, entry.record.offset, error)
            self.ack_map = None


def replayed(
    live: StoreFiles,
    report: Report,
    progress: Callable[[int, int], None] | None,
    decided: frozenset[str] = frozenset(),
    summaries: dict[int, FileSummary] | None = None,
) -> tuple[Journal, Outcomes, Replay]:
    """Read a store's live files twice, for the outcomes of its transactions and for its state.

    `report`, `progress` and `summaries` are those of `Journal`, `decided` that of `Outcomes.read`. Raises TraceError
    for what is no journal.
    """
    journal = Journal(live, progress)
    outcomes = Outcomes.read(journal, report, decided)
    if not outcomes.records and not journal.looks_like_one():
        raise TraceError(f"{live.directory} is not a KahaDB journal: no db-*.log in it begins as one does")
    replay = Replay(outcomes)
    for entry in read_entries(journal, report, summaries):
        replay.apply(entry)
    for damage in replay.missing(live):
        report(damage)
    return journal, outcomes, replay


def _end(destination: KahaDestination, message: Message, *, is_record: bool) -> list[Effect]:
    """Take the message from whoever still wants it: an ack for each ack that is left."""
    keys: list[str | None] = [None] if message.waiting is None else list(sorted(message.waiting)[: message.acks_left])
    return [
        Effect(ACK, destination, message.trace_id, subscription=key, is_record=is_record and i == 0)
        for i, key in enumerate(keys)
    ]


class SeenIds:
    """The message ids that a destination ever had, as ranges of each producer's numbers: small where they are dense."""

    __slots__ = ("_other", "_producers")

    def __init__(self) -> None:
        self._producers: dict[str, tuple[array[int], array[int]]] = {}
        self._other: set[str] = set()

    def add(self, message_id: str) -> bool:
        """Add an id; return whether it is new."""
        producer, number = _numbered(message_id)
        if number is None:
            is_new = message_id not in self._other
            self._other.add(message_id)
            return is_new
        firsts, lasts = self._producers.setdefault(producer, (array("q"), array("q")))
        at = bisect_right(firsts, number)
        if at and number <= lasts[at - 1]:
            return False
        joins_before = at > 0 and lasts[at - 1] == number - 1
        joins_after = at < len(firsts) and firsts[at] == number + 1
        if joins_before and joins_after:
            lasts[at - 1] = lasts.pop(at)
            firsts.pop(at)
        elif joins_before:
            lasts[at - 1] = number
        elif joins_after:
            firsts[at] = number
        else:
            firsts.insert(at, number)
            lasts.insert(at, number)
        return True

    def __contains__(self, message_id: str) -> bool:
        producer, number = _numbered(message_id)
        if number is None:
            return message_id in self._other
        firsts, lasts = self._producers.get(producer, (array("q"), array("q")))
        at = bisect_right(firsts, number)
        return at > 0 and number <= lasts[at - 1]


def _numbered(message_id: str) -> tuple[str, int | None]:
    """Return the producer in a message's id and its number there; None where it has none of 64 bits."""
    producer, _, text = message_id.rpartition(":")
    return producer, int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
