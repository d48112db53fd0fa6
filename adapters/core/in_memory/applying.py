"""The effect of each change on the messages in memory.

It runs on the thread of whoever calls, under the store's lock, and Ctrl-C may strike anywhere:

B1  What a change says is done to a chunk in an order such that it can be done again: a message counts as there once it
    is among its chunk's offsets, as dead once its bit is set, and both are looked at first.
B2  While a chunk changes, `MemoryLimit.unfinished` is what makes it whole. Whoever finds one calls it, counts
    everything anew that is counted (`finish`), and has the interrupted changes applied once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..operations.branches import Branch
from ..operations.changes import Ack, Send
from ..operations.table import AT_ONCE, SEQ_MAX, Table
from ..record.encoding import REMOVAL
from ..record.place import ORDER, OWN, Place
from ..state.leases import DestinationState, SubscriptionState
from ..state.states import Catalog
from .memory_limit import MemoryLimit, nothing
from .message_chunks import BITS, COUNT_COST, MASKS, MESSAGES_MAX, WAIT_COST, Chunk, Level, indexes, memory_of
from .messages import DESTINATION_COST, SUBSCRIPTION_COST, DestinationMessages, Slot
from .swap_files import Address, SwapFiles
from .waits import Dues

LEVELS_KEPT: Final = 16
"""A destination with more orders than these keeps no level for one that has no messages."""


class MemoryTable(Table):
    """The table of one open store."""

    def __init__(self, catalog: Catalog, memory: MemoryLimit, swap: SwapFiles, priorities: bool) -> None:
        self._catalog, self._memory, self._swap, self._priorities = catalog, memory, swap, priorities
        self.expiring: dict[Chunk, None] = {}
        """Chunks in which messages expire."""
        self.soonest: int = 0
        """No message that was not given expires before; 0: none does."""
        self.dues: Final = Dues()
        """Messages that wait, by their time."""
        self.given = 0
        """The time (ms) by which what has expired was given to who asked, or some of it."""
        self.prepared: dict[bytes, int] = {}
        """Bytes of memory that each prepared transaction takes."""
        self.ahead: dict[int, tuple[Address, Sequence[Send]]] = {}
        """Sends of the plan being written that are in the swap already, and in no chunk yet. By the first seq of an
        entry: its address and messages."""

    def finish(self) -> None:
        """Make whole what was interrupted, and count anew all that is counted (B2)."""
        memory, catalog = self._memory, self._catalog
        if memory.unfinished is not None:
            memory.unfinished()
        chunks: list[Chunk] = []
        others = 0
        for state in catalog.held():
            count = size = 0
            messages: DestinationMessages | None = state.own
            if messages is not None:
                of = [chunk for chunk in messages.chunks() if not self._is_dropped(chunk)]
                for chunk in of:
                    if chunk.waits:
                        chunk.count_waiting()
                self._count_waiting(messages)
                count = sum(chunk.live.bit_count() for chunk in of)
                size = sum(chunk.bytes_of(chunk.live) for chunk in of)
                for subscriber in messages.subscriptions.values():
                    subscriber.count = sum(messages.pending(subscriber, chunk).bit_count() for chunk in of)
                others += messages.cost
                chunks += of
            state.count, state.bytes = (count, size) if state.channel not in catalog.leaving else (0, 0)
        catalog.recount()
        memory.prepared = sum(self.prepared.values())
        memory.recount(chunks, others)
        needed = {(address.file, address.offset) for chunk in chunks for address in chunk.addresses}
        needed |= {(address.file, address.offset) for address, _ in self.ahead.values()}
        for address in self._swap.entries:
            if (address.file, address.offset) not in needed:
                self._swap.release(address)
        memory.unfinished = None

    def _count_waiting(self, messages: DestinationMessages) -> None:
        """Set what its destination and its subscriptions count."""
        chunks = [chunk for chunk in messages.chunks() if chunk.waiting]
        messages.state.delayed = sum((chunk.waits_for(0) & chunk.live).bit_count() for chunk in chunks)
        for subscriber in messages.subscriptions.values():
            subscriber.delayed = sum(
                (chunk.waits_for(subscriber.number) & messages.pending(subscriber, chunk)).bit_count()
                for chunk in chunks
            )

    def _is_dropped(self, chunk: Chunk) -> bool:
        """Drop a chunk in which nothing lives; return whether that was so."""
        if chunk.is_dead and self._is_full(chunk):
            self._drop(chunk)
            return True
        return False

    def _is_full(self, chunk: Chunk) -> bool:
        """Return whether a chunk takes no more messages. One that does is kept when it is empty, unless there are many
        such."""
        return bool(
            chunk.sealed or chunk.addresses or (self._priorities and len(chunk.level.state.own.levels) > LEVELS_KEPT)
        )

    def put(self, sends: Sequence[Send]) -> None:
        if len(sends) != 1 or not self._append(sends[0]):
            self._put(sends)
        if sends[0].state.is_map:
            self._replace(sends)

    def _replace(self, sends: Sequence[Send]) -> None:
        """Replace the values that keys had before by those that are there."""
        messages: DestinationMessages = sends[0].state.own
        keys, memory = messages.keys, self._memory
        assert keys is not None
        for send in sends:
            name = send.name
            assert name is not None
            former = keys.get(name)
            if former is not None and former < send.seq:
                self._ack(send.state, former, 0, None)
            slot = messages.find(send.seq)
            if slot is None or slot[0].dead & BITS[slot[1]]:
                continue  # it is removed, or this is done again
            memory.unfinished = nothing
            before = keys.cost
            keys.put(name, send.seq)
            memory.used += keys.cost - before
            memory.unfinished = None

    def _forget_key(self, messages: DestinationMessages, seq: int) -> None:
        """Forget the key of a map's value that is about to be dead. While its chunk is being changed."""
        keys = messages.keys
        assert keys is not None
        before = keys.cost
        keys.forget(seq)
        self._memory.used += keys.cost - before

    def _put(self, sends: Sequence[Send]) -> None:
        state = sends[0].state
        if state.is_topic:
            sends = [send for send in sends if send.recipients]  # nobody will ever ask for the others
        if state.is_map:
            sends = [send for send in sends if send.expires_at_ms != REMOVAL]
        if not self._priorities:
            self._add(state.own.level(0), sends)
            return
        orders: dict[int, list[Send]] = {}
        for send in sends:
            orders.setdefault(send.order, []).append(send)
        for order, some in orders.items():
            self._add(state.own.level(order), some)

    def _append(self, send: Send) -> bool:
        """Add one to an open chunk, if there is nothing special about it: what most sends do, in few steps."""
        state, record = send.state, send.record
        level = state.own.levels.get(send.order)
        if level is None or not level.chunks or self.ahead or send.expires_at_ms:
            return False
        chunk, memory = level.chunks[-1], self._memory
        if (
            chunk.sealed or chunk.expiries is not None or chunk.last >= send.seq or chunk not in memory.kept
            or not takes(len(chunk.offsets), chunk.total_bytes, len(record), memory.chunk_bytes)
        ):  # fmt: skip
            return False
        if state.is_topic and not send.recipients:
            return True  # nobody will ever ask for it
        memory.unfinished = chunk.mend
        more = chunk.append(send.seq, record)
        chunk.charge += more
        memory.used += more
        self._catalog.count(state, 1, len(record))
        for subscriber in send.recipients:
            subscriber.count += 1
        memory.unfinished = None
        return True

    def _add(self, level: Level, sends: Sequence[Send]) -> None:
        """Add sends at the end of a level, but for those that are there already."""
        last, chunk_bytes = level.last, self._memory.chunk_bytes
        if sends and sends[0].seq <= last:
            sends = [send for send in sends if send.seq > last]
        if self.ahead:
            for send in sends:
                if send.seq in self.ahead:  # the others follow one of these
                    address, group = self.ahead[send.seq]
                    self._add_chunk(level, group, address)
            return
        at, end = 0, len(sends)
        while at < end:
            chunk = level.chunks[-1] if level.chunks and not level.chunks[-1].sealed else None
            count, size = (0, 0) if chunk is None else (len(chunk.offsets), chunk.total_bytes)
            first = at
            while at < end and takes(count, size, len(sends[at].record), chunk_bytes):
                count, size, at = count + 1, size + len(sends[at].record), at + 1
            some = sends[first:at] if at - first < end else sends
            if not some:
                assert chunk is not None
                self._seal(chunk)
            elif chunk is None:
                self._add_chunk(level, some)
            else:
                self._extend(chunk, some)

    def _add_chunk(self, level: Level, sends: Sequence[Send], address: Address | None = None) -> None:
        """Add a new chunk. `address`: where its records are, if they do not stay in memory."""
        if level.chunks and not level.chunks[-1].sealed:
            self._seal(level.chunks[-1])
        self._memory.unfinished = nothing
        chunk = Chunk(level, sends[0].seq)
        self._fill(chunk, sends)
        if address is not None:
            chunk.addresses, chunk.records, chunk.resident = (address,), [], 0
            chunk.written = chunk.out = len(chunk)
            chunk.seal()
        else:
            self._memory.kept[chunk] = None
        level.chunks.append(chunk)
        level.state.own.keep(level)
        self._memory.count(chunk)
        self._count_sends(sends)
        self._memory.unfinished = None

    def _extend(self, chunk: Chunk, sends: Sequence[Send]) -> None:
        memory = self._memory
        memory.unfinished = chunk.mend
        self._fill(chunk, sends)
        if chunk not in memory.kept:
            memory.kept[chunk] = None
            memory.loaded.pop(chunk, None)
        memory.count(chunk)
        self._count_sends(sends)
        memory.unfinished = None

    def _fill(self, chunk: Chunk, sends: Sequence[Send]) -> None:
        first = chunk.first
        expiries = [send.expires_at_ms for send in sends]
        soonest = min([at for at in expiries if at], default=0) if any(expiries) else 0
        if soonest:
            chunk.soonest = min(chunk.soonest or soonest, soonest)
            self.expiring[chunk] = None
            self.soonest = min(self.soonest or soonest, soonest)
        chunk.extend(
            len(chunk.offsets), [send.seq - first for send in sends], [send.record for send in sends],
            expiries if soonest else (),
        )  # fmt: skip

    def _count_sends(self, sends: Sequence[Send]) -> None:
        state = sends[0].state
        self._catalog.count(state, len(sends), sum([len(send.record) for send in sends]))
        if state.is_topic:
            for send in sends:
                for subscriber in send.recipients:
                    subscriber.count += 1

    def _seal(self, chunk: Chunk) -> None:
        """Seal a chunk: nothing more comes into it."""
        self._memory.unfinished = chunk.seal
        chunk.seal()
        if not self._is_dropped(chunk):
            self._memory.count(chunk)
        self._memory.unfinished = None

    def ack(self, acks: Sequence[Ack]) -> None:
        for ack in acks:
            self._ack(ack.state, ack.seq, ack.number, ack.place)

    def _ack(self, state: DestinationState, seq: int, number: int, place: Place | None) -> None:
        messages: DestinationMessages | None = state.own
        if messages is None:
            return
        slot: Slot | None = place[OWN] if place is not None else messages.find(seq)
        if slot is None:
            if state.is_map:
                self._forget_key(messages, seq)  # as below
            return
        chunk, index = slot
        if state.is_topic:
            self._done(messages, chunk, BITS[index], number)
            return
        bit = BITS[index]
        if chunk.dead & bit:
            if state.is_map:
                self._forget_key(messages, seq)  # it may have been struck just before that
            return
        memory = self._memory
        memory.unfinished = chunk.mend
        chunk.dead |= bit
        size = chunk.sizes[index]
        if index >= chunk.out:
            chunk.records[index - chunk.out] = None
            less = memory_of(size)
            chunk.resident -= less
            chunk.charge -= less
            memory.used -= less
        if chunk.counts and chunk.counts.pop((0, index), None) is not None:
            chunk.charge -= COUNT_COST
            memory.used -= COUNT_COST
        if chunk.waits and chunk.waits.pop((0, index), None) is not None:
            chunk.waiting[0] &= ~bit
            state.delayed -= 1
            chunk.charge -= WAIT_COST
            memory.used -= WAIT_COST
        self._catalog.count(state, -1, -size)
        if state.is_map:
            self._forget_key(messages, seq)  # not before it is dead: by its key it is found again
        if chunk.dead == MASKS[len(chunk.offsets)] and self._is_full(chunk):
            self._drop(chunk)
        memory.unfinished = None

    def _done(self, messages: DestinationMessages, chunk: Chunk, mask: int, number: int) -> None:
        """Note that some messages of a chunk are dead for a subscription, or for all."""
        subscriber = messages.subscriptions.get(number) if number else None
        if number and subscriber is None:
            return  # it has ended
        mask &= messages.pending(subscriber, chunk)
        if not mask:
            return
        self._memory.unfinished = chunk.mend
        kept = mask & messages.wanted(chunk, subscriber) if subscriber is not None else 0
        if kept:
            assert subscriber is not None
            chunk.acked[number] = chunk.acked.get(number, 0) | kept
            subscriber.count -= kept.bit_count()
            if chunk.waits:
                subscriber.delayed -= (chunk.waits_for(number) & kept).bit_count()
                self._forget_waits(chunk, kept, number)
            for key in [key for key in chunk.counts if key[0] == number and kept >> key[1] & 1]:
                chunk.counts.pop(key, None)
        self._kill(messages, chunk, mask & ~kept)
        if not self._is_dropped(chunk):
            self._memory.count(chunk)
        self._memory.unfinished = None

    def _kill(self, messages: DestinationMessages, chunk: Chunk, mask: int) -> None:
        """Kill some messages of a chunk that live, for all."""
        if not mask:
            return
        for subscriber in messages.subscriptions.values():
            pending = messages.pending(subscriber, chunk) & mask
            subscriber.count -= pending.bit_count()
            if chunk.waits:
                subscriber.delayed -= (chunk.waits_for(subscriber.number) & pending).bit_count()
        if messages.keys is not None:
            for index in indexes(mask):
                self._forget_key(messages, chunk.seq(index))
        if chunk.waits:
            messages.state.delayed -= (chunk.waits_for(0) & mask).bit_count()
            self._forget_waits(chunk, mask)
        chunk.dead |= mask
        for index in indexes(mask >> chunk.out):
            chunk.records[index] = None
            chunk.resident -= memory_of(chunk.sizes[index + chunk.out])
        for key in [key for key in chunk.counts if mask >> key[1] & 1] if chunk.counts else ():
            chunk.counts.pop(key, None)
        self._catalog.count(messages.state, -mask.bit_count(), -chunk.bytes_of(mask))

    def _drop(self, chunk: Chunk) -> None:
        """Drop a chunk in which nothing lives. Idempotent, but for what is counted."""
        chunk.waits = {}
        chunk.level.state.own.drop(chunk)
        self.expiring.pop(chunk, None)
        self._memory.forget(chunk)

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> None:
        messages: DestinationMessages | None = state.own
        if messages is None:
            self._catalog.left(state, 0)  # Ctrl-C struck once all was dropped
            return
        chunks = [chunk for level in list(messages.levels.values()) for chunk in level.between(first, last)]
        if state.channel in self._catalog.leaving:
            self._drop_removed(messages, chunks, last == SEQ_MAX)
        elif number and number not in messages.subscriptions:
            for chunk in chunks:
                self._drop_ended(messages, chunk, number)
            if last == SEQ_MAX:
                self._catalog.left(state, number)
        else:
            for chunk in chunks:
                self._done(messages, chunk, chunk.between(first, last), number)

    def _drop_removed(self, messages: DestinationMessages, chunks: Sequence[Chunk], is_last: bool) -> None:
        """Drop chunks of a destination that is no more: nothing of it is counted, but its memory."""
        memory = self._memory
        memory.unfinished = nothing
        for chunk in chunks:
            chunk.dead |= chunk.live  # for who is browsing it
            self._drop(chunk)
        if is_last:
            memory.used -= messages.cost
            messages.state.own = None
            self._catalog.left(messages.state, 0)
        memory.unfinished = None

    def _drop_ended(self, messages: DestinationMessages, chunk: Chunk, number: int) -> None:
        """Drop from a chunk what was only for a subscription that has ended."""
        self._memory.unfinished = chunk.mend
        self._kill(messages, chunk, chunk.live & ~messages.wanted(chunk))
        chunk.acked.pop(number, None)
        for key in [key for key in chunk.counts if key[0] == number]:
            chunk.counts.pop(key, None)
        if chunk.waits:
            self._forget_waits(chunk, chunk.live, number)
        if not self._is_dropped(chunk):
            self._memory.count(chunk)
        self._memory.unfinished = None

    def returned(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None) -> None:
        messages: DestinationMessages | None = state.own
        order = place[ORDER] if place is not None else None
        slot = messages.find(seq, order) if messages is not None else None
        if messages is None or slot is None:
            return
        chunk, index = slot
        subscriber = messages.subscriptions.get(number) if number else None
        if (number and subscriber is None) or not messages.pending(subscriber, chunk) >> index & 1:
            return
        self._memory.unfinished = nothing
        chunk.counts[number, index] = count
        self._memory.count(chunk)
        self._memory.unfinished = None

    @staticmethod
    def _forget_waits(chunk: Chunk, mask: int, number: int | None = None) -> None:
        """Forget the waits of some messages of a chunk for one subscription, or for anybody."""
        for key in [key for key in chunk.waits if mask >> key[1] & 1 and number in (None, key[0])]:
            chunk.waits.pop(key, None)
        chunk.count_waiting()

    def postpone(self, state: DestinationState, seq: int, number: int, due: int, place: Place | None) -> None:
        messages: DestinationMessages | None = state.own
        slot = messages.find(seq) if messages is not None else None
        if messages is None or slot is None:
            return
        chunk, index = slot
        bit, key = BITS[index], (number, index)
        subscriber = messages.subscriptions.get(number) if number else None
        if (number and subscriber is None) or not messages.pending(subscriber, chunk) & bit:
            if not due and chunk.waits.pop(key, None) is not None:  # of a subscription that has ended
                self._memory.unfinished = chunk.mend
                chunk.count_waiting()
                self._memory.count(chunk)
                self._memory.unfinished = None
            return
        before = {one.number: chunk.waits_for(one.number) & bit for one in messages.subscriptions.values()}
        whole = chunk.waits_for(0) & bit
        self._memory.unfinished = nothing
        if due:
            self.dues.add(due, chunk, index, number)  # first: one too many does no harm
            chunk.waits[key] = due
            chunk.waiting[number] = chunk.waiting.get(number, 0) | bit
        elif chunk.waits.pop(key, None) is not None:
            chunk.waiting[number] &= ~bit
        if not chunk.waits:
            chunk.waiting = {}
        state.delayed += bool(chunk.waits_for(0) & bit) - bool(whole)
        for one in messages.subscriptions.values():
            if messages.pending(one, chunk) & bit:
                one.delayed += bool(chunk.waits_for(one.number) & bit) - bool(before[one.number])
        self._memory.count(chunk)
        self._memory.unfinished = None

    def declare(self, state: DestinationState) -> None:
        if state.own is None:
            self._memory.unfinished = nothing
            state.own = DestinationMessages(state)
            self._memory.used += DESTINATION_COST
            self._memory.unfinished = None

    def remove(self, state: DestinationState) -> None:
        messages: DestinationMessages | None = state.own
        if messages is None:
            return
        at_once = state.count <= AT_ONCE  # also where it is done again
        self._memory.unfinished = nothing
        for chunk in messages.chunks():
            self.expiring.pop(chunk, None)
        self._catalog.leaving[state.channel] = None
        self._catalog.count(state, -state.count, -state.bytes)
        self._memory.unfinished = None
        if at_once:
            self.ack_range(state, 0, SEQ_MAX, 0)

    def subscribe(self, subscriber: SubscriptionState) -> None:
        messages: DestinationMessages = subscriber.topic.own
        if subscriber.number not in messages.subscriptions:
            self._memory.unfinished = nothing
            for chunk in messages.chunks():
                self._pass_over_unwanted(messages, chunk, subscriber)
            messages.subscriptions[subscriber.number] = subscriber
            subscriber.count = sum(messages.pending(subscriber, chunk).bit_count() for chunk in messages.chunks())
            self._count_waiting(messages)
            self._memory.used += SUBSCRIPTION_COST
            self._memory.unfinished = None

    def _pass_over_unwanted(self, messages: DestinationMessages, chunk: Chunk, subscriber: SubscriptionState) -> None:
        """Pass over, for a subscription that begins, what only subscriptions that have ended were to ack. Such messages
        still go a page at a time: until then this one counts as having acked them."""
        pending = messages.pending(subscriber, chunk)
        unwanted = pending & ~messages.wanted(chunk) if pending else 0
        if unwanted:
            chunk.acked[subscriber.number] = unwanted
            self._memory.count(chunk)

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        messages: DestinationMessages | None = subscriber.topic.own
        if messages is None:
            return
        if subscriber.number in messages.subscriptions:
            self._memory.unfinished = nothing
            self._catalog.leaving[subscriber.channel] = None
            messages.subscriptions.pop(subscriber.number, None)
            self._memory.used -= SUBSCRIPTION_COST
            self._memory.unfinished = None
        if subscriber.channel in self._catalog.leaving and subscriber.topic.count <= AT_ONCE:
            self.ack_range(subscriber.topic, 0, SEQ_MAX, subscriber.number)

    def prepare(self, branch: Branch) -> None:
        self.prepared[branch.transaction] = memory_of_branch(branch)
        self._memory.prepared = sum(self.prepared.values())

    def settled(self, branch: Branch, committed: bool) -> None:
        self.prepared.pop(branch.transaction, None)
        self._memory.prepared = sum(self.prepared.values())

    def forget(self, transactions: Sequence[bytes]) -> None:
        """Do nothing: nothing is kept of committed transactions here."""


def takes(count: int, size: int, more: int, chunk_bytes: int) -> bool:
    """Return whether a chunk of so many messages and bytes takes one of `more` bytes."""
    return count == 0 or (count < MESSAGES_MAX and size + more <= chunk_bytes)


def memory_of_branch(branch: Branch) -> int:
    """Return how many bytes a prepared transaction takes until its outcome."""
    return sum(memory_of(len(send.record)) for send in branch.sends)
