"""A memory store's invariants, walked one by one.

M1  a chunk's messages, and the chunks of a lane, are in the order of their seqs
M2  a destination's counts are those of the messages in its chunks, and the store's those of its destinations
M3  a subscription's count is that of the messages that it has yet to ack, and a message that lives is wanted by one
M4  every live message reads back, from memory or from the swap
M5  an entry of the swap belongs to a chunk, and none is in a file that is not there
R1, R2  residence.py
"""

from __future__ import annotations

from collections.abc import Iterator

from ...policies.errors import AnabranchError
from .chunks import Chunk, indexes
from .contents import Contents, DestinationState
from .records import size_of
from .residence import Residence
from .swap import Swap


def violations(contents: Contents, residence: Residence, swap: Swap) -> Iterator[str]:
    """Each violation found, as a sentence. Under the store's lock."""
    messages = live_bytes = 0
    for state in contents.states.values():
        messages += state.count
        live_bytes += state.live_bytes
        yield from _lanes(state)
        yield from _counts(state, residence)
    if (messages, live_bytes) != (contents.messages, contents.live_bytes):
        yield (
            f"M2 the store counts {contents.messages} messages of {contents.live_bytes} bytes, its destinations "
            f"{messages} of {live_bytes}"
        )
    yield from _entries(contents, swap)
    yield from residence.check()


def _lanes(state: DestinationState) -> Iterator[str]:
    for lane in state.lanes.values():
        last = -1
        for chunk in lane.chunks:
            seqs = [chunk.seq(index) for index in range(len(chunk))]
            if seqs != sorted(set(seqs)) or seqs[0] != chunk.first or seqs[0] <= last:
                yield f"M1 the messages of {state.destination} from {chunk.first} on are out of order"
            if chunk is not lane.chunks[-1] and not chunk.sealed:
                yield f"M1 the chunk of {state.destination} at {chunk.first} is open and not the last one"
            last = seqs[-1]


def _counts(state: DestinationState, residence: Residence) -> Iterator[str]:
    count = live_bytes = 0
    wanted = dict.fromkeys(state.subscriptions.values(), 0)
    for chunk in state.chunks():
        count += chunk.live.bit_count()
        live_bytes += chunk.live_bytes
        yield from _readable(chunk, residence)
        anybody = 0
        for some in wanted:
            pending = some.pending(chunk)
            wanted[some] += pending.bit_count()
            anybody |= pending
        if state.is_topic and anybody != chunk.live:
            yield f"M3 of {state.destination}, messages from {chunk.first} on live and nobody wants them"
    if (count, live_bytes) != (state.count, state.live_bytes):
        yield (
            f"M2 {state.destination} counts {state.count} messages of {state.live_bytes} bytes, its chunks {count} "
            f"of {live_bytes}"
        )
    for some, pending in wanted.items():
        if pending != some.count:
            yield f"M3 {some.subscription} counts {some.count} messages, its topic has {pending} for it"


def _readable(chunk: Chunk, residence: Residence) -> Iterator[str]:
    what = f"of {chunk.lane.state.destination}, messages from {chunk.first} on"
    try:
        records = residence.records(chunk)
    except AnabranchError as error:
        yield f"M4 {what} do not read back: {error}"
        return
    live = [records[index] for index in indexes(chunk.live)]
    if len(records) != len(chunk) or any(record is None for record in live):
        yield f"M4 {what} are not all there"
    elif sum(size_of(record) for record in live if record is not None) != chunk.live_bytes:
        yield f"M4 {what} are not of {chunk.live_bytes} bytes"


def _entries(contents: Contents, swap: Swap) -> Iterator[str]:
    addresses = [
        address for state in contents.states.values() for chunk in state.chunks() for address in chunk.addresses
    ]
    known = {(address.file.number, address.offset) for address in addresses}
    there = {(file.number, offset) for file in swap.files for offset in file.entries}
    if known != there:
        yield f"M5 {len(known)} entries of the swap belong to chunks, {len(there)} are kept"
