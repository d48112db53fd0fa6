"""What a batch has done, brought into the state in memory once it is committed. By the thread that writes, under the
state's lock; nothing of it can fail for want of anything."""

from __future__ import annotations

from ..delivery import Place, order_of
from .batch import Batch
from .destinations import DestinationState, Durable, Lane
from .messages import Sending, Staged
from .state import LAST, NUMBER, SIZE, State


def apply(batch: Batch) -> None:
    """Afterwards the batch is visible, and who waited for something of it is woken."""
    state = batch.state
    with state.lock:
        _numbers(batch)
        woken = _subscriptions(batch)
        for destination, sending, seq in batch.sent:
            if destination not in batch.counted:
                _sent(state, destination, sending, seq)
            _expiry(state, sending)
            woken[destination] = None
        _delivered(batch)
        _acked(batch)
        _branches(batch)
        for destination in batch.purged:
            _purged(state, destination)
        for destination in batch.gone:
            _gone(state, destination)
        for destination, (counts, of_durables) in batch.counted.items():
            _count(state, destination, counts, of_durables)
        if batch.wrapped:  # what is new may come before what is fetched already
            for destination in woken:
                for feed in destination.feeds():
                    feed.rewind()
        batch.room.settled()
    for destination in woken:
        destination.wake()


def _numbers(batch: Batch) -> None:
    state = batch.state
    state.batch, state.last_seq, state.last_number = batch.number, batch.last_seq, batch.last_number
    state.free_until = batch.free_until
    if batch.wrapped and not state.wrapped:
        state.wrapped = True
        for durable in state.durables.values():
            durable.start = 0
        for view in batch.views.values():
            for durable in view.values():
                durable.start = 0
    for destination, number in batch.numbers.items():
        destination.number = number
        state.by_number[number] = destination
    state.window.add(batch.duplicates)


def _subscriptions(batch: Batch) -> dict[DestinationState, None]:
    """Returns the topics that have lost or got some."""
    state = batch.state
    for destination, view in batch.views.items():
        destination.durables = view
        for durable in view.values():
            state.durables[durable.number] = durable
    for durable in batch.removed:
        _removed(state, durable)
    return dict.fromkeys(batch.views)


def _removed(state: State, durable: Durable) -> None:
    state.durables.pop(durable.number, None)
    for key in [key for key in state.places if key >> 64 == durable.number]:
        del state.places[key]
        state.counts.pop(key, None)
    state.delivery.gone(durable.feed)
    for look in state.looks:
        if look.feed is durable.feed:
            look.left.clear()
            look.stale = True


def _sent(state: State, destination: DestinationState, sending: Sending | Staged, seq: int) -> None:
    lane = destination.lane(order_of(sending.priority, state.options.priorities))
    lane.count += 1
    lane.last = LAST if state.wrapped else seq
    destination.count += 1
    destination.size += sending.size
    destination.expiring += bool(sending.expires_at_ms)
    for durable in destination.entitled(seq):
        durable.count += 1
    state.messages += 1
    state.size += sending.size


def _expiry(state: State, sending: Sending | Staged) -> None:
    expires = sending.expires_at_ms
    if expires and (not state.next_expiry or expires < state.next_expiry):
        state.next_expiry = expires


def _delivered(batch: Batch) -> None:
    """The tables say now how often these have come back."""
    state = batch.state
    for key, (feed, seq, count) in batch.delivered.items():
        durable = state.durables.get(feed.number)
        if durable is not None:
            durable.redelivered = True
        else:
            state.rows.drop(seq)
        if state.counts.get(key) == count:
            del state.counts[key]


def _acked(batch: Batch) -> None:
    state = batch.state
    for key, (feed, seq, _) in batch.acked.items():
        state.delivery.acked(feed, seq)
        if state.places.pop(key, None) is None:
            continue
        state.counts.pop(key, None)
        for lane in feed.lanes.values():  # where an interrupted receiver left it
            if lane.ready and lane.ready[0][1] == seq:
                lane.ready.popleft()
        for look in state.looks:
            if look.feed is feed:
                look.left.discard(seq)
        if feed.key is not None and feed.owner not in batch.counted:
            durable = state.durables.get(feed.number)
            if durable is not None:
                durable.count -= 1
    for seq, place in batch.dead.items():
        state.rows.drop(seq)
        for look in state.looks:
            look.left.discard(seq)
        destination = state.by_number.get(place[NUMBER])
        if destination is not None and destination not in batch.counted:
            _dead(state, destination, place)


def _dead(state: State, destination: DestinationState, place: Place) -> None:
    destination.lane(place[0]).count -= 1
    destination.count -= 1
    destination.size -= place[SIZE]
    destination.expiring -= bool(place[2])
    state.messages -= 1
    state.size -= place[SIZE]


def _branches(batch: Batch) -> None:
    state = batch.state
    for branch in batch.prepared:
        branch.payload = b""
        state.prepared[branch.transaction] = branch
    for branch in batch.committed:
        state.prepared.pop(branch.transaction, None)
        state.committed[branch.transaction] = None
        branch.reservation = None
    for branch in batch.rolled_back:
        state.prepared.pop(branch.transaction, None)
        branch.reservation = None
        for note, seq in branch.acks:
            for feed in note if isinstance(note, tuple) else (note,):
                key = feed.base + seq
                if key in batch.delivered and key in state.places:
                    state.counts[key] = batch.delivered[key][2]  # who is spent by it is told so
                state.delivery.free(feed, seq, state)
                if key in batch.delivered:
                    state.counts.pop(key, None)
        for message in branch.messages:  # who had acked them can do nothing more with them
            message.note = None
    for transaction in batch.forgotten:
        state.committed.pop(transaction, None)


def _purged(state: State, destination: DestinationState) -> None:
    """What nobody held is gone: look all up anew."""
    held = state.delivery.held
    for feed in destination.feeds():
        feed.rewind()
    for key, place in list(state.places.items()):
        if place[NUMBER] == destination.number and key not in held:
            del state.places[key]
            state.counts.pop(key, None)
    state.rows.clear()
    _stale(state, destination)


def _stale(state: State, destination: DestinationState) -> None:
    for look in state.looks:
        if look.state is destination:
            look.left.clear()
            look.stale = True


def _gone(state: State, destination: DestinationState) -> None:
    for feed in destination.feeds():
        state.delivery.gone(feed)
        feed.rewind()
    for key, place in list(state.places.items()):
        if place[NUMBER] == destination.number:
            del state.places[key]
            state.counts.pop(key, None)
    state.by_number.pop(destination.number, None)
    state.messages -= destination.count
    state.size -= destination.size
    destination.number = destination.count = destination.size = destination.expiring = 0
    destination.lanes = {}
    destination.durables = {}
    state.window.forget(destination.destination)
    state.rows.clear()
    _stale(state, destination)


def _count(
    state: State, destination: DestinationState, counts: list[tuple[int, ...]], of_durables: dict[Durable, int]
) -> None:
    state.messages -= destination.count
    state.size -= destination.size
    load_counts(state, destination, counts)
    for durable, count in of_durables.items():
        durable.count = count
    _stale(state, destination)


def load_counts(state: State, destination: DestinationState, counts: list[tuple[int, ...]]) -> None:
    """By priority: messages, bytes, those that expire, the highest seq. Adds them to the store's."""
    destination.count = destination.size = destination.expiring = 0
    lanes: dict[int, Lane] = {}
    for priority, count, size, expiring, last in counts:
        lane = lanes.setdefault(order_of(priority, state.options.priorities), Lane())
        lane.count += count
        lane.last = LAST if state.wrapped else max(lane.last, last)
        destination.count += count
        destination.size += int(size)
        destination.expiring += int(expiring)
    destination.lanes = lanes
    state.messages += destination.count
    state.size += destination.size
