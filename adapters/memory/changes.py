"""Changes that Ctrl-C cannot leave half done.

A change is worked out first, without touching anything: what each chunk, destination and total will be. Then it is
carried out, in a way that may be done again from the start with the same result: nothing is counted up, everything is
set. An interruption in between is made up for at once, and if that was struck as well, by whoever takes the store's
lock next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...policies.destination import Destination
from ..base import Change as SubscriptionChange
from ..base import Receipt, Subscription, SubscriptionKey
from ..delivery import Delivery, Feed, feeds_of, order_of
from .chunks import ADDRESS_COST, Chunk, Lane, indexes
from .contents import DESTINATION_COST, Contents, DestinationState, SubscriptionState
from .drafts import ChunkDraft, DestinationDraft
from .records import Encoded, Record, StoredMessage, cost_of, size_of
from .swap import Address, Swap

Key = tuple[int, bytes]
Reader = Callable[[Chunk], Sequence[Record | None]]
"""Reads the records of a chunk (residence.py)."""


class Steps:
    """Who carries changes out. Under the store's lock."""

    def __init__(self) -> None:
        self._doing: Callable[[], object] | None = None

    def do(self, change: Callable[[], object]) -> None:
        """All of it, wherever KeyboardInterrupt strikes; or, if it strikes before it has begun, nothing."""
        try:
            self._doing = change
            change()
            self._doing = None
        except BaseException:
            self.finish()
            raise

    def finish(self) -> None:
        """What was interrupted is done now."""
        if self._doing is not None:
            self._doing()
            self._doing = None


class Change:
    """What is going to be different, worked out call by call, then carried out whole by `apply`."""

    def __init__(self, contents: Contents, delivery: Delivery, chunk_bytes: int, position: int | None) -> None:
        self._contents, self._delivery = contents, delivery
        self._chunk_bytes = chunk_bytes
        self._position = position
        self.seq = contents.seq
        self.messages = contents.messages
        self.live_bytes = contents.live_bytes
        self.sends = self.acks = self.unwanted = 0
        self.added = self.added_bytes = 0
        """Messages that are stored, and their bytes."""
        self._destinations: dict[Destination, DestinationDraft] = {}
        self._chunks: dict[Chunk, ChunkDraft] = {}
        self._added: list[tuple[Lane, Chunk]] = []
        self._ids: dict[Key, int] = {}
        self._settled: list[tuple[Feed, int]] = []
        """Holds that end."""
        self._forgotten: list[tuple[Chunk, int, int | None]] = []
        """Delivery counts that end: chunk, index, and the feed's number or None for all."""
        self._gone: list[SubscriptionState] = []
        self._wake: dict[Feed, None] = {}
        self.dropped: list[Chunk] = []
        """Chunks that hold nothing any more."""
        self.opened: list[Chunk] = []
        """Chunks that are new, as in `_added`."""
        self._before: int | None = None

    # Sending

    def send(self, message: Encoded) -> Receipt:
        """Raises nothing. The receipt tells what it will be."""
        draft = self.destination(message.destination)
        state = draft.state
        key: Key | None = None
        if message.name is not None:
            key = (state.number, message.name)
            known = None if message.requeued else self._ids.get(key) or self._contents.window.get(key)
            if known is not None:
                return Receipt(message.destination, known, True)
        self.seq = seq = self.seq + 1
        self.sends += 1
        if key is not None and self._contents.window.limit:
            self._ids[key] = seq
        if state.is_topic:
            if not draft.subscriptions:
                self.unwanted += 1
                return Receipt(message.destination, seq)  # nobody will ever ask for it
            self._wake.update((subscription.feed, None) for subscription in draft.subscriptions.values())
        else:
            self._wake[state.feed] = None
        self._tail(draft, order_of(message.priority, self._contents.priorities), seq, message.size).add(seq, message)
        draft.count += 1
        draft.total += 1
        draft.live_bytes += message.size
        self.messages += 1
        self.live_bytes += message.size
        self.added += 1
        self.added_bytes += message.size
        return Receipt(message.destination, seq)

    def destination(self, destination: Destination) -> DestinationDraft:
        """Of a destination, which is made if need be."""
        draft = self._destinations.get(destination)
        if draft is None:
            state = self._contents.states.get(destination)
            if state is None:
                state = DestinationState(self._contents.next_number(), destination)
            draft = self._destinations[destination] = DestinationDraft(state)
        return draft

    def _tail(self, draft: DestinationDraft, order: int, seq: int, size: int) -> ChunkDraft:
        """The chunk for one more message."""
        tail = draft.tails.get(order)
        lane = draft.state.lane(order)
        if tail is None and lane.chunks and not lane.chunks[-1].sealed:
            tail = draft.tails[order] = self._chunk(lane.chunks[-1])
        if tail is None or tail.address is not None or not tail.takes(size, self._chunk_bytes):
            chunk = Chunk(lane, seq)
            tail = draft.tails[order] = self._chunk(chunk)
            self._added.append((lane, chunk))
            self.opened.append(chunk)
        return tail

    def _chunk(self, chunk: Chunk) -> ChunkDraft:
        draft = self._chunks.get(chunk)
        if draft is None:
            draft = self._chunks[chunk] = ChunkDraft(chunk)
        return draft

    def write_out(self, swap: Swap) -> list[Address]:
        """Write the new chunks into the swap, so that they take no memory. Raises OSError, and then nothing is."""
        written: list[Address] = []
        try:
            for chunk in self.opened:
                draft = self._chunks[chunk]
                if draft.address is None:
                    draft.address = swap.write(draft.records)
                    written.append(draft.address)
                    draft.records = []
        except BaseException:
            for address in written:
                swap.release(address)
            raise
        return written

    # Acks

    def ack(self, message: StoredMessage) -> None:
        """It is dead for whom it was leased."""
        chunk, index, seq = message.chunk, message.index, message.seq
        state = chunk.lane.state
        feeds = feeds_of(message.note)
        self._settled += [(feed, seq) for feed in feeds]
        self.acks += 1
        if state.is_topic and message.subscription is not None:
            subscription = self.destination(state.destination).subscriptions.get(message.subscription)
            if subscription is not None and subscription is feeds[0].owner:
                self.done(subscription, chunk, index, message.size, message.cost)
        else:
            self.kill(chunk, index, message.size, message.cost)

    def done(self, subscription: SubscriptionState, chunk: Chunk, index: int, size: int, cost: int) -> None:
        """A message is done with for one subscription, and dead if it was the last."""
        draft, bit = self._chunk(chunk), 1 << index
        number = subscription.number
        if draft.dead & bit:
            return
        draft.acked[number] = draft.acked.get(number, chunk.acked.get(number, 0)) | bit
        if self._is_wanted(draft, chunk.seq(index), bit):
            topic = self.destination(subscription.topic.destination)
            topic.done[subscription] = topic.done.get(subscription, subscription.done) + 1
            self._forgotten.append((chunk, index, number))
        else:
            draft.acked[number] &= ~bit
            self.kill(chunk, index, size, cost)

    def _is_wanted(self, draft: ChunkDraft, seq: int, bit: int) -> bool:
        """Whether a subscription has yet to ack it."""
        chunk = draft.chunk
        for some in self.destination(chunk.lane.state.destination).subscriptions.values():
            acked = draft.acked.get(some.number, chunk.acked.get(some.number, 0))
            if some.start < seq and not acked & bit:
                return True
        return False

    def kill(self, chunk: Chunk, index: int, size: int, cost: int) -> None:
        """A message is dead for all."""
        draft, bit = self._chunk(chunk), 1 << index
        if draft.dead & bit:
            return
        state = chunk.lane.state
        of = self.destination(state.destination)
        seq = chunk.seq(index)
        for some in of.subscriptions.values():
            acked = draft.acked.get(some.number, chunk.acked.get(some.number, 0))
            if some.start < seq and not acked & bit:
                of.done[some] = of.done.get(some, some.done) + 1
        draft.dead |= bit
        draft.live_bytes -= size
        if index >= chunk.out:
            draft.resident -= cost
        self._forgotten.append((chunk, index, None))
        of.count -= 1
        of.live_bytes -= size
        self.messages -= 1
        self.live_bytes -= size

    def kill_all(self, chunk: Chunk, mask: int, records: Reader) -> None:
        """Many of one chunk, which is not read if that is all of it."""
        draft = self._chunk(chunk)
        if mask == chunk.live and draft.dead == chunk.dead and not draft.acked:
            self._kill_whole(draft)
            return
        found = records(chunk)
        for index in indexes(mask):
            record = found[index]
            assert record is not None
            self.kill(chunk, index, size_of(record), cost_of(record))

    def _kill_whole(self, draft: ChunkDraft) -> None:
        chunk = draft.chunk
        live, size = chunk.live, draft.live_bytes
        of = self.destination(chunk.lane.state.destination)
        for some in of.subscriptions.values():
            of.done[some] = of.done.get(some, some.done) + some.pending(chunk).bit_count()
        self._forgotten += [(chunk, index, None) for index in indexes(live)]
        draft.dead |= live
        draft.live_bytes = draft.resident = 0
        of.count -= live.bit_count()
        of.live_bytes -= size
        self.messages -= live.bit_count()
        self.live_bytes -= size

    def purge(self, only: SubscriptionState | None, chunk: Chunk, mask: int, records: Reader) -> None:
        """Many of one chunk are done with for a subscription, or dead for all."""
        if only is None:
            self.kill_all(chunk, mask, records)
            return
        found = records(chunk)
        for index in indexes(mask):
            record = found[index]
            assert record is not None
            self.done(only, chunk, index, size_of(record), cost_of(record))

    # Subscriptions

    def change(self, change: SubscriptionChange, records: Reader) -> int:
        """Subscribe or unsubscribe; nothing if that is so already. Returns how many messages go with it. `records`
        reads those of a chunk."""
        topic, key = change.subscription.topic, change.subscription.key
        if not change.subscribe and topic not in self._destinations and topic not in self._contents.states:
            return 0
        draft = self.destination(topic)
        known = draft.subscriptions.get(key)
        if change.subscribe == (known is not None):
            return 0
        if known is None:
            self._subscribe(draft, change.subscription, change.retroactive)
            return 0
        return self._unsubscribe(draft, key, known, records)

    def _subscribe(self, draft: DestinationDraft, subscription: Subscription, retroactive: bool) -> None:
        state = SubscriptionState(
            subscription, draft.state, self._contents.next_number(), 0 if retroactive else self.seq
        )
        state.joined = draft.total - (draft.count if retroactive else 0)
        draft.subscriptions = {**draft.subscriptions, subscription.key: state}

    def _unsubscribe(
        self,
        draft: DestinationDraft,
        key: SubscriptionKey,
        known: SubscriptionState,
        records: Reader,
    ) -> int:
        count = draft.total - known.joined - draft.done.get(known, known.done)
        left = {name: some for name, some in draft.subscriptions.items() if name != key}
        draft.subscriptions = left
        draft.done.pop(known, None)
        for chunk in draft.state.chunks():
            alone = known.pending(chunk)
            for some in left.values():
                alone &= ~some.pending(chunk)
            if alone:
                self.kill_all(chunk, alone, records)
        self._gone.append(known)
        return count

    # Carrying it out

    def finish(self) -> None:
        """Nothing more will be added: find what is empty by then."""
        contents = self._contents
        ended = {lane.chunks[-1] for lane, _ in self._added if lane.chunks and not lane.chunks[-1].sealed}
        for chunk in ended:
            self._chunk(chunk)  # it costs less once it is sealed
        for chunk, draft in self._chunks.items():
            if draft.is_dead and (chunk.sealed or chunk in ended or chunk.addresses):
                self.dropped.append(chunk)
        # What is counted now is taken off first, so that doing it again counts the same.
        self._before = contents.memory - sum(chunk.charge + chunk.resident for chunk in self._chunks)
        for destination, of in self._destinations.items():
            new = (destination not in contents.states) + len(of.subscriptions) - len(of.state.subscriptions)
            self._before += DESTINATION_COST * new

    def apply(self) -> None:
        """Carry it out; again, if that was interrupted."""
        contents, delivery = self._contents, self._delivery
        if self._before is None:
            raise AssertionError("finish() comes first")
        for destination, of in self._destinations.items():
            of.apply()
            contents.states[destination] = of.state
        for draft in self._chunks.values():
            draft.apply(self._position)
            if draft.chunk.soonest and draft.expiries:
                contents.expiring[draft.chunk] = None
                contents.soonest = min(contents.soonest or draft.chunk.soonest, draft.chunk.soonest)
        for lane, chunk in self._added:
            lane.add(chunk)
        for chunk, index, number in self._forgotten:
            if number is not None:
                chunk.counts.pop((number, index), None)
                continue
            if index >= chunk.out:
                chunk.records[index - chunk.out] = None
            for known in [known for known in chunk.counts if known[1] == index] if chunk.counts else ():
                chunk.counts.pop(known, None)
        for subscription in self._gone:
            delivery.gone(subscription.feed)
            for chunk in subscription.topic.chunks():
                chunk.acked.pop(subscription.number, None)
        for feed, seq in self._settled:
            delivery.acked(feed, seq)
        memory = self._before
        for chunk in self._chunks:
            if chunk not in self.dropped:
                chunk.charge = chunk.cost
                memory += chunk.charge + chunk.resident
        for chunk in self.dropped:
            chunk.lane.drop(chunk)
            contents.expiring.pop(chunk, None)
        if self._ids:
            contents.window.add(self._ids)
        contents.seq, contents.messages, contents.live_bytes = self.seq, self.messages, self.live_bytes
        contents.memory = memory
        for feed in self._wake:
            if feed.waiters:
                feed.wake()

    @property
    def touched(self) -> Iterable[Chunk]:
        """All chunks that change."""
        return self._chunks

    @property
    def memory(self) -> int:
        """Bytes of memory that all will take, about."""
        assert self._before is not None
        return self._before + sum(
            draft.chunk.cost + 8 * len(draft.offsets) + (draft.resident if draft.address is None else ADDRESS_COST)
            for draft in self._chunks.values()
        )
