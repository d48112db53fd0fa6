"""A memory store's invariants, walked one by one.

M1  a chunk's messages, and the chunks of a level, are in the order of their seqs
M2  a destination's counts are those of the messages in its chunks, and the store's those of its destinations
M3  a subscription's count is that of the messages that it has yet to ack, and a message that lives is wanted by one
M4  every live message reads back, from memory or from the swap
M5  an entry of the swap belongs to a chunk, and none is in a file that is not there
M6  each key of a map leads to its value, and each value has its key
M7  a message that waits lives; what each chunk, destination and subscription says of those that wait is so, and their
    times are known
R1, R2  memory_limit.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....policies.errors import AnabranchError
from ..record.encoding import name_of
from ..state.leases import DestinationState
from ..state.states import Catalog
from .memory_limit import MemoryLimit
from .message_chunks import Chunk, indexes
from .messages import DestinationMessages
from .swap_files import SwapFiles


def violations(catalog: Catalog, memory: MemoryLimit, swap: SwapFiles) -> Iterator[str]:
    """Yield each violation found, as a sentence. Under the store's lock."""
    states = list(catalog.destinations.values())
    chunks: list[Chunk] = []
    others = 0
    for state in states:
        messages: DestinationMessages | None = state.own
        if messages is not None:
            chunks += messages.chunks()
            others += messages.cost
            yield from _levels(messages)
            yield from _counts(messages, memory)
            if messages.keys is not None:
                yield from _keys(messages, memory)
        elif state.count or state.bytes:
            yield f"M2 {state.destination} counts {state.count} messages and has none"
    counted = sum(state.count for state in states), sum(state.bytes for state in states)
    if counted != (catalog.messages, catalog.bytes):
        yield (
            f"M2 the store counts {catalog.messages} messages of {catalog.bytes} bytes, its destinations "
            f"{counted[0]} of {counted[1]}"
        )
    yield from _entries(chunks, swap)
    yield from _memory(chunks, others, memory)


def _levels(messages: DestinationMessages) -> Iterator[str]:
    for order, level in messages.levels.items():
        if level.order != order or messages.orders.first(order) != order:
            yield f"M1 the messages of {messages.state.destination} of order {order} are not found by their order"
        last = -1
        for chunk in level.chunks:
            seqs = [chunk.seq(index) for index in range(len(chunk))]
            if seqs != sorted(set(seqs)) or seqs[0] != chunk.first or seqs[0] <= last:
                yield f"M1 the messages of {messages.state.destination} from {chunk.first} on are out of order"
            if chunk is not level.chunks[-1] and not chunk.sealed:
                yield f"M1 the chunk of {messages.state.destination} at {chunk.first} is open and not the last one"
            last = seqs[-1]


def _counts(messages: DestinationMessages, memory: MemoryLimit) -> Iterator[str]:
    state = messages.state
    count = size = 0
    for chunk in messages.chunks():
        count += chunk.live.bit_count()
        size += chunk.bytes_of(chunk.live)
        yield from _readable(state, chunk, memory)
        if state.is_topic and messages.wanted(chunk) != chunk.live:
            yield f"M3 of {state.destination}, messages from {chunk.first} on live and nobody wants them"
    if (count, size) != (state.count, state.bytes):
        yield (
            f"M2 {state.destination} counts {state.count} messages of {state.bytes} bytes, its chunks {count} of {size}"
        )
        if any(chunk.dead >> index & 1 for _, index in chunk.waits):
            yield f"M7 of {state.destination}, messages from {chunk.first} on are dead and wait"
    waiting = sum(sum(1 for number, _ in chunk.waits if not number) for chunk in messages.chunks())
    if waiting != state.delayed:
        yield f"M7 {state.destination} counts {state.delayed} messages that wait, its chunks {waiting}"
    if set(messages.subscriptions.values()) != set(state.subscriptions.values()):
        yield f"M3 {state.destination} has other subscriptions than its messages are kept for"
    for subscriber in messages.subscriptions.values():
        pending = sum(messages.pending(subscriber, chunk).bit_count() for chunk in messages.chunks())
        if pending != subscriber.count:
            yield f"M3 {subscriber.subscription} counts {subscriber.count} messages, its topic has {pending} for it"
        waiting = sum(
            len({index for number, index in chunk.waits if number in (0, subscriber.number)}
                & set(indexes(messages.pending(subscriber, chunk))))
            for chunk in messages.chunks()
        )  # fmt: skip
        if waiting != subscriber.delayed:
            yield f"M7 {subscriber.subscription} counts {subscriber.delayed} messages that wait, there are {waiting}"


def _keys(messages: DestinationMessages, memory: MemoryLimit) -> Iterator[str]:
    assert messages.keys is not None
    keyed = {seq: name for name, seq in messages.keys.items()}
    for chunk in messages.chunks():
        records = memory.records(chunk)
        for index in indexes(chunk.live):
            name = keyed.pop(chunk.seq(index), None)
            if name is None or name_of(records[index] or b"") != name:
                yield f"M6 value {chunk.seq(index)} of {messages.state.destination} does not have its key, {name!r}"
    if keyed:
        yield f"M6 keys of {messages.state.destination} lead nowhere: {sorted(keyed.values())[:10]}"


def _readable(state: DestinationState, chunk: Chunk, memory: MemoryLimit) -> Iterator[str]:
    what = f"of {state.destination}, messages from {chunk.first} on"
    try:
        records = memory.records(chunk)
    except AnabranchError as error:
        yield f"M4 {what} do not read back: {error}"
        return
    if len(records) != len(chunk) or len(chunk.sizes) != len(chunk):
        yield f"M4 {what} are not all there"
        return
    for index in indexes(chunk.live):
        record = records[index]
        if record is None or len(record) != chunk.sizes[index]:
            yield f"M4 {what}: number {index} is not of {chunk.sizes[index]} bytes"


def _entries(chunks: Sequence[Chunk], swap: SwapFiles) -> Iterator[str]:
    wanted = {(address.file, address.offset) for chunk in chunks for address in chunk.addresses}
    there = {(address.file, address.offset) for address in swap.entries}
    if wanted != there:
        yield f"M5 {len(wanted)} entries of the swap belong to chunks, {len(there)} are kept"


def _memory(chunks: Sequence[Chunk], others: int, memory: MemoryLimit) -> Iterator[str]:
    used = sum(chunk.cost for chunk in chunks) + others
    if used != memory.used:
        yield f"R1 {used} bytes are in memory, {memory.used} are counted"
    there = [chunk for chunk in chunks if not chunk.is_out]
    kept = {chunk for chunk in there if not chunk.is_written}
    loaded = {chunk for chunk in there if chunk.is_written}
    if kept != set(memory.kept) or loaded != set(memory.loaded):
        yield (
            f"R2 {len(kept)} chunks never left memory and {len(loaded)} came back; {len(memory.kept)} and "
            f"{len(memory.loaded)} are noted"
        )
