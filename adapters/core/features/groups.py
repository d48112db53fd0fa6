"""Message groups: while a message of a group is held, no other of it is received from the same queue or subscription.

A message's group is a header (GROUP), so that it goes wherever the message goes, and no backend knows of it. Delivery
asks a channel that may have such messages (`Channel.groups`) before it leases one. A message whose group is held then
leaves its place and waits in the line of its group. Each time the group becomes free the first of its line is put among
those that have returned: so each is looked at once, however many there are.

A message holds its group while it is leased, claimed or on its way out, and while it waits for its time because it was
given back so. One that was sent to be delivered later holds nothing, and is passed.

N1  A group that is not held, and of which messages are held back, has one of them where delivery finds it (rule H1), or
    is in `_freed`.
N2  What is known of a line is the beginning of what is held back of its group: behind `_cut` nothing was noted.
N3  What a store holds at open may have groups: who plans a message says so only of those that come later. So what is
    fetched is looked at until all of it is gone (`Channel.unsure`). Once one has a group, or what was never fetched
    returns, each message is asked for (`Channel.groups`).
"""

from __future__ import annotations

import heapq
import logging
import sys
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from ....policies.errors import CorruptionError
from ..engine.hooks import Feature
from ..record.encoding import group_of
from ..record.place import DELIVERIES, ORDER, SEQ, Place
from ..state.due import DUE_MAX_MS
from ..state.leases import Channel, DestinationState, Lease, SubscriptionState
from ..state.priorities import FETCH
from ..state.rows import ScheduledRows
from .parts import Parts

if TYPE_CHECKING:
    from ..engine.engine import Engine

log: logging.Logger = logging.getLogger(__name__)

HELD_BACK_MAX: Final = 200_000
"""Messages of a channel that are held back and remembered, each in some 40 bytes; those behind are looked for again."""
KEPT_BYTES: Final = 16 << 10
"""Records that are kept for one channel, since they were looked at, have about so many bytes together."""
AHEAD_BYTES: Final = 256 << 10
"""Where what is fetched has more bytes than so many, each message is looked at when its turn has come."""
_SEQS: Final = 1 << 64
"""A key in a line is an order times this, and a seq."""


class MessageGroups(Feature):
    """The message groups of one open store."""

    def __init__(self, parts: Parts) -> None:
        self._engine = engine = parts.engine
        engine.knows_groups = True
        engine.sequencer.on_grouped = self._note
        self._waits: dict[tuple[int, int], array[int]] | None = None
        self._claimed: dict[tuple[int, int], list[int]] = {}
        """Seqs of what prepared branches held as the store was opened: a rollback may let it wait, unseen."""

    def start(self) -> None:
        """Have all looked at that the store holds (rule N3)."""
        engine = self._engine
        for state in engine.catalog.by_number.values():
            if state.total and not state.is_map:
                for channel in {state.channel, *state.channels()}:
                    groups = ChannelGroups(engine, channel, engine.sequencer.last_seq, self._waiting)
                    if channel.held:
                        self._claimed[state.number, channel.number] = list(channel.held)
                    if engine.backend.settings.priorities:
                        channel.groups = groups  # what is fetched is not all of one page
                    else:
                        channel.unsure = groups

    def _note(self, state: DestinationState, recipients: Iterable[SubscriptionState]) -> None:
        """Note that a message which has a group comes there. By whoever plans it, without the store's lock."""
        for channel in (state.channel, *(subscriber.channel for subscriber in recipients)):
            groups = channel.groups or channel.unsure
            if not isinstance(groups, ChannelGroups):
                groups = ChannelGroups(self._engine, channel, 0, self._waiting)
            groups.is_sure = True
            channel.groups = groups  # once more: who receives may just have let go of it
            channel.unsure = None

    def _waiting(self, channel: Channel) -> Iterable[int]:
        """Return the seqs of messages that were given back before the store was opened, and wait. They are looked for
        once for all channels, however many there are."""
        rows, waits = self._engine.rows, self._waits
        if waits is None:
            waits = {}
            for state, number, place in rows.due(DUE_MAX_MS, sys.maxsize) if isinstance(rows, ScheduledRows) else ():
                if number or place[DELIVERIES]:  # what waits since it was sent waits for all, and holds nothing
                    waits.setdefault((state.number, number), array("Q")).append(place[SEQ])
            self._waits = waits
        key = channel.state.number, channel.number
        return chain(waits.get(key, ()), self._claimed.get(key, ()))


class _Held(dict[int, Lease]):
    """The leases of a channel in which a message that has a group was met: it says which begin, and which end."""

    def __init__(self, groups: ChannelGroups, leases: dict[int, Lease]) -> None:
        super().__init__(leases)
        self._groups = groups

    def __setitem__(self, seq: int, lease: Lease) -> None:
        self._groups.hold(lease.place)
        super().__setitem__(seq, lease)

    def pop(self, seq: int, *default: Any) -> Any:
        self._groups.look_at(seq)  # first: who is interrupted in here ends it again, or nobody does
        return super().pop(seq, *default)


class ChannelGroups:
    """The groups of one channel's messages, as state/leases.py's Groups. Under the store's lock."""

    __slots__ = (
        "_asked_at", "_brought", "_channel", "_count", "_cut", "_engine", "_freed", "_holders", "_holds", "_known",
        "_last_old", "_lines", "_looked", "_unnoted", "_waiting", "is_sure",
    )  # fmt: skip

    def __init__(
        self, engine: Engine, channel: Channel, last_old: int, waiting: Callable[[Channel], Iterable[int]]
    ) -> None:
        self._engine, self._channel = engine, channel
        self.is_sure: bool = False
        """A message that has a group has come, or was met."""
        self._last_old = last_old
        """The highest seq that there was when the store was opened; 0: the channel had no message then."""
        self._waiting = waiting
        self._asked_at = 0
        self._holders: dict[str, int] = {}
        """By group that is held: the seq of the message that holds it."""
        self._holds: dict[int, str] = {}
        """The same by seq."""
        self._looked: dict[int, None] = {}
        """Seqs of messages that may not hold their group any more."""
        self._lines: dict[str, deque[int]] = {}
        """By group: messages that are held back, in order, by their keys."""
        self._count = 0
        """How many messages are in lines."""
        self._cut: int | None = None
        """The first key that was not noted, since there were too many; None: all were."""
        self._unnoted: dict[str, None] = {}
        """Groups some of whose messages were not noted."""
        self._freed: dict[str, None] = {}
        """Groups that have become free, and may have a line."""
        self._brought: dict[int, str] = {}
        """Messages that were put among those that have returned, with their groups."""
        self._known: dict[int, tuple[str | None, bytes | None]] = {}
        """By seq: groups of messages that were looked at ahead, and their records."""

    @property
    def holds_back(self) -> bool:
        return bool(self._lines) or self._cut is not None

    def share(self, channel: Channel) -> None:
        groups = ChannelGroups(self._engine, channel, self._last_old, self._waiting)
        groups.is_sure = self.is_sure
        if self._channel.groups is self:
            channel.groups = groups
        else:
            channel.unsure = groups

    # Who may be leased

    def lets(self, place: Place, ready: deque[Place] | None = None) -> bool:
        seq, delivery = place[SEQ], self._engine.delivery
        if seq > self._last_old and not self.is_sure:
            self._end_looking(seq)
            return True
        group, record = self._group(place, ready)
        if group is not None:
            if not isinstance(self._channel.held, _Held):
                self._begin()
            if self._holders.get(group, seq) != seq:
                self._hold_back(group, place)
                return False
        if record is not None:
            delivery.records[seq] = record  # it is read next
        return True

    def lets_plainly(self, place: Place) -> bool:
        if self._looked or self._freed or self.holds_back:
            return False  # or what is not applied yet may have freed an earlier one
        seq = place[SEQ]
        if seq > self._last_old and not self.is_sure:
            return seq < self._asked_at + FETCH
        known = self._known.get(seq)
        if known is None:
            record = self._engine.delivery.records.get(seq)
            return record is not None and group_of(record) is None
        return known[0] is None

    def _group(self, place: Place, ready: deque[Place] | None = None) -> tuple[str | None, bytes | None]:
        """Return the group of a message, and its record if that was read; look at those behind it, too. Raises
        ReadError."""
        seq, known = place[SEQ], self._known
        if seq in self._brought:
            return self._brought[seq], None
        if seq not in known:
            if ready is not None or len(known) > 2 * FETCH:
                known.clear()  # of what was fetched before
            places = [place] if ready is None else list(ready)
            known.update(zip((one[SEQ] for one in places), self._read(places, KEPT_BYTES), strict=False))
        return known[seq]

    def _read(self, places: Sequence[Place], most: int) -> list[tuple[str | None, bytes | None]]:
        """Return groups and records of messages: of the first, and of more as long as they have not so many bytes."""
        state, rows = self._channel.state, self._engine.rows
        found: list[tuple[str | None, bytes | None]] = []

        def read() -> None:
            size = 0
            for record in rows.bodies(state, places):
                found.append((None, None) if record is None else (group_of(record), record))
                size += len(record or b"")
                if size >= most:
                    return

        try:
            self._engine.reading(read)
        except CorruptionError as error:  # who receives it is told
            log.debug("%s: a group cannot be read: %s", state.destination, error)
        return found or [(None, None)]

    def look_ahead(self, ready: deque[Place] | None) -> None:
        channel = self._channel
        if ready is not None:
            if ready[0][SEQ] > self._last_old:
                self._end_looking(ready[0][SEQ])
                return
            found = self._read(list(ready), AHEAD_BYTES)
            if len(found) == len(ready) and not any(group for group, _ in found):
                return
        channel.groups, channel.unsure = self, None

    def _end_looking(self, seq: int) -> None:
        """End looking for groups where all that was there at open is gone. Asked now and then."""
        channel = self._channel
        if seq < self._asked_at + FETCH:
            return
        self._asked_at = seq
        first = self._engine.rows.rows(channel.state, channel.subscription, None, 0, 1)
        if not first or first[0][SEQ] > self._last_old:
            channel.groups = channel.unsure = None
            if self.is_sure:  # since just now
                channel.groups = self

    def _begin(self) -> None:
        """Begin to watch over leases: the first message that has a group was met."""
        channel = self._channel
        self.is_sure = True
        for lease in list(channel.held.values()):
            self.hold(lease.place)
        state, subscription = channel.state, channel.subscription
        if state.total_delayed or (subscription is not None and subscription.total_delayed):
            for place in self._given_back():
                if self._engine.delivery.until(state, subscription, place[SEQ]):
                    self.hold(place)
        channel.held = _Held(self, channel.held)

    def _given_back(self) -> Iterator[Place]:
        """Yield messages that may have been given back before leases were watched over."""
        channel, rows = self._channel, self._engine.rows
        state, subscription, after = channel.state, channel.subscription, 0
        if self._last_old:
            found = (rows.row(state, subscription, seq) for seq in self._waiting(channel))
            yield from (place for place in found if place is not None)
            return
        while page := rows.rows(state, subscription, None, after, FETCH):  # a move has brought them
            yield from (place for place in page if place[DELIVERIES])
            after = page[-1][SEQ]

    # Who holds a group

    def hold(self, place: Place) -> None:
        """Note that a message is held from now on."""
        seq = place[SEQ]
        group, _ = self._group(place)
        self._brought.pop(seq, None)
        if group is not None and self._holders.get(group, seq) == seq:
            self._looked[seq] = None  # first: who is interrupted may not have leased it
            self._holds[seq] = group
            self._holders[group] = seq

    def look_at(self, seq: int | None) -> None:
        if seq is None:
            self._looked.update(dict.fromkeys(self._holds))
        elif seq in self._holds:
            self._looked[seq] = None

    def _is_free(self, seq: int) -> bool:
        channel = self._channel
        return seq not in channel.held and not self._engine.delivery.until(channel.state, channel.subscription, seq)

    # Who is held back

    def _hold_back(self, group: str, place: Place) -> None:
        """Put a message into the line of its group."""
        key = place[ORDER] * _SEQS + place[SEQ]
        self._brought.pop(place[SEQ], None)
        line = self._lines.get(group)
        if not line or key > line[-1]:
            if self._count >= HELD_BACK_MAX or (self._cut is not None and key >= self._cut):
                self._cut = key if self._cut is None else min(self._cut, key)
                self._unnoted[group] = None
                return
            if line is None:
                line = self._lines[group] = deque()
            line.append(key)
        elif key < line[0]:
            line.appendleft(key)
        else:
            at = bisect_left(line, key)
            if line[at] == key:  # who receives the newest meets it each time
                return
            line.insert(at, key)
        self._count += 1

    def bring(self) -> None:
        looked, freed = self._looked, self._freed
        while looked:
            seq = next(iter(looked))
            group = self._holds.get(seq)
            if group is not None and self._is_free(seq):
                freed[group] = None
                if self._holders.get(group) == seq:
                    self._holders.pop(group)
                self._holds.pop(seq, None)
            looked.pop(seq, None)
        while freed:
            group = next(iter(freed))
            if group not in self._holders:
                self._bring(group)
            freed.pop(group, None)

    def _bring(self, group: str) -> None:
        """Put the first of a group's line that is still there among those that have returned."""
        channel, line = self._channel, self._lines.get(group)
        place = None
        while line and place is None:
            order, seq = divmod(line[0], _SEQS)
            if seq not in channel.held:
                place = self._engine.rows.row(channel.state, channel.subscription, seq, order)
            if place is not None:
                self._brought[seq] = group
                channel.returned_places[seq] = place
                heapq.heappush(channel.returned, (order, seq))
            line.popleft()
            self._count -= 1
        if not line:
            self._lines.pop(group, None)
        if place is None and group in self._unnoted:
            channel.forget_fetched()  # and so, all that is held back

    def left(self, seq: int) -> None:
        group = self._brought.pop(seq, None)
        if group is not None:
            self._freed[group] = None
            self.bring()

    def forget(self) -> None:
        self._lines.clear()
        self._brought.clear()
        self._unnoted.clear()
        self._count, self._cut = 0, None
