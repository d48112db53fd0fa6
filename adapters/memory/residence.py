"""Which chunks are in memory, so that all of it takes no more than `max_bytes` (invariant 10).

What makes room, in this order: chunks that were loaded again and are not the first of their lane, those used longest
ago first; sealed ones that never left memory, from the newest message on, which is the last that anybody will ask for;
then whatever is left, the largest first. The first two kinds leave alone what a receiver comes to next.

R1  `contents.memory` is the sum of what destinations, subscriptions and chunks cost, and the records in memory.
R2  Every chunk that has something in memory is in exactly one of `_kept` (not all of it is in the swap) and `_loaded`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final

from ...policies.errors import StoreFailedError, StoreFullError
from ...policies.units import KIB
from ..files import FULL, is_out_of_files, refused
from .changes import Change, Steps
from .chunks import Chunk
from .contents import DESTINATION_COST, Contents
from .records import Record, cost_of
from .swap import Address, Swap

log = logging.getLogger(__name__)

CHUNK_BYTES_MIN: Final = 16 * KIB
CHUNK_BYTES_MAX: Final = 256 * KIB
WORTH: Final = 1 * KIB
"""Bytes of records; swapping less than that frees nothing to speak of."""
AHEAD: Final = 32
"""A part of `max_bytes` that is freed at once when there is none left, so that not every send looks for some."""

_first = attrgetter("first")
_resident = attrgetter("resident")


class Residence:
    """Under the store's lock."""

    def __init__(self, name: str, contents: Contents, swap: Swap, steps: Steps, max_bytes: int) -> None:
        self._name = name
        self._contents, self._swap, self._steps = contents, swap, steps
        self._max_bytes = max_bytes
        self.chunk_bytes = min(max(max_bytes // 8, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
        """Bytes of messages at which a chunk is full."""
        self._kept: dict[Chunk, None] = {}
        self._loaded: OrderedDict[Chunk, None] = OrderedDict()
        """The one that was used longest ago first."""
        self.prepared = 0
        """Bytes of memory that prepared transactions take."""

    def check(self) -> Iterator[str]:
        """Violations of R1 and R2."""
        contents = self._contents
        chunks = [chunk for state in contents.states.values() for chunk in state.chunks()]
        memory = sum(chunk.charge + chunk.resident for chunk in chunks)
        memory += DESTINATION_COST * (len(contents.states) + sum(1 for _ in contents.subscriptions()))
        if memory != contents.memory:
            yield f"R1 {memory} bytes are in memory, {contents.memory} are counted"
        there = [chunk for chunk in chunks if not chunk.is_out]
        kept = {chunk for chunk in there if not chunk.is_written}
        loaded = {chunk for chunk in there if chunk.is_written}
        if kept != set(self._kept) or loaded != set(self._loaded):
            yield (
                f"R2 {len(kept)} chunks never left memory and {len(loaded)} came back; {len(self._kept)} and "
                f"{len(self._loaded)} are noted"
            )

    # Changes

    def take(self, change: Change) -> None:
        """What has become of its chunks. May be done again."""
        for chunk in change.touched:
            if not chunk.is_written:
                self._kept[chunk] = None
                self._loaded.pop(chunk, None)
        for chunk in change.dropped:
            self.forget(chunk)

    def forget(self, chunk: Chunk) -> None:
        """It is no more. Idempotent."""
        self._kept.pop(chunk, None)
        self._loaded.pop(chunk, None)
        for address in chunk.addresses:
            self._swap.release(address)

    # Making room

    def make_room(self, more: int, keep: Chunk | None = None) -> None:
        """So that `more` bytes fit, or so that as little as can be is in memory. Raises what `swap_error` says; what
        was in memory is then there still, or in the swap."""
        goal = self._max_bytes - self.prepared - more
        if self._contents.memory <= goal:
            return
        goal = max(0, goal - self._max_bytes // AHEAD)
        for chunk in self._victims(keep):
            if self._contents.memory <= goal:
                return
            self._evict(chunk)

    def _victims(self, keep: Chunk | None) -> Iterable[Chunk]:
        loaded = [chunk for chunk in self._loaded if chunk is not keep]
        kept = [chunk for chunk in self._kept if chunk.resident >= WORTH]
        behind = [chunk for chunk in kept if chunk.sealed and chunk.lane.chunks[0] is not chunk]
        behind.sort(key=_first, reverse=True)
        others = [chunk for chunk in chain(loaded, kept) if chunk is not keep]
        others.sort(key=_resident, reverse=True)
        return chain([chunk for chunk in loaded if chunk.lane.chunks[0] is not chunk], behind, others)

    def _evict(self, chunk: Chunk) -> None:
        """Out of memory, into the swap what was never there."""
        if chunk.is_out:
            return
        contents = self._contents
        addresses, length = chunk.addresses, len(chunk)
        before = contents.memory - chunk.charge - chunk.resident
        written = None
        if not chunk.is_written:
            written = self._write([record or b"" for record in chunk.records[chunk.written - chunk.out :]])
            addresses = (*addresses, written)

        def leave() -> None:
            chunk.addresses, chunk.written = addresses, length
            chunk.records, chunk.out, chunk.resident = [], length, 0
            chunk.charge = chunk.cost
            contents.memory = before + chunk.charge
            self._kept.pop(chunk, None)
            self._loaded.pop(chunk, None)

        try:
            self._steps.do(leave)
        except BaseException:
            if written is not None and written not in chunk.addresses:
                self._swap.release(written)
            raise

    def _write(self, records: Sequence[Record]) -> Address:
        try:
            return self._swap.write(records)
        except OSError as error:
            raise self.swap_error(error) from error

    def swap_error(self, error: OSError) -> StoreFullError | StoreFailedError:
        """What is told to who needed the room. The store goes on: nothing is lost, and it may be emptied."""
        what = f"store {self._name!r}: max_bytes, {self._max_bytes}, are in memory and a swap file in"
        if is_out_of_files(error):
            return refused(f"{what} {self._swap.directory} cannot be written: {error}", error)
        if error.errno in FULL:
            return StoreFullError(f"{what} {self._swap.directory} cannot grow: {error}; free some space or ack some")
        return StoreFailedError(
            f"{what} {self._swap.directory} cannot be written: {error}. Nothing was sent; what the store holds can be "
            "received. See to the disk"
        )

    def add(self, change: Change, required: bool) -> list[Address]:
        """What a finished change brings goes into the swap at once if it does not fit into memory. Returns what was
        written for it. Raises StoreFullError and StoreFailedError if `required`, and then nothing was written."""
        written: list[Address] = []
        room = self._max_bytes - self.prepared
        try:
            if change.memory <= room:
                return written
            written = change.write_out(self._swap)
            if required and change.memory > room:
                self.drop(written)
                raise StoreFullError(
                    f"store {self._name!r}: what tells where its messages are takes {self._contents.memory} bytes of "
                    f"memory; max_bytes is {self._max_bytes}: ack some or raise it. Nothing was sent"
                )
        except OSError as error:
            if required:
                raise self.swap_error(error) from error
            log.warning("%s", self.swap_error(error))
        return written

    def drop(self, written: Iterable[Address]) -> None:
        """What was written for a change that does not come about."""
        for address in written:
            self._swap.release(address)

    # Reading

    def records(self, chunk: Chunk) -> Sequence[Record | None]:
        """Those of a chunk, dead ones too unless they are gone, without keeping them. Raises CorruptionError,
        StoreFailedError, OutOfDescriptorsError."""
        if not chunk.out:
            return chunk.records
        found: list[Record | None] = []
        for address in chunk.addresses:
            try:
                found += self._swap.read(address)
            except OSError as error:
                what = f"store {self._name!r}: the swap file {address.file.path} cannot be read now: {error}"
                if is_out_of_files(error):
                    raise refused(what, error) from error
                raise StoreFailedError(f"{what}; see to the disk") from error
        return found + chunk.records[chunk.written - chunk.out :]

    def load(self, chunk: Chunk) -> Sequence[Record | None]:
        """The same, kept in memory if there are others to be read and they fit."""
        if not chunk.out:
            if chunk in self._loaded:
                self._loaded.move_to_end(chunk)
            return chunk.records
        found = self.records(chunk)
        live = chunk.live
        if live.bit_count() > 1:
            kept = [record if live >> index & 1 else None for index, record in enumerate(found)]
            resident = sum(cost_of(record) for record in kept if record is not None)
            more = resident - chunk.resident
            try:
                self.make_room(more, chunk)
            except (StoreFullError, StoreFailedError):
                return found
            contents = self._contents
            memory = contents.memory + more
            if memory + self.prepared <= self._max_bytes:

                def stay() -> None:
                    chunk.records, chunk.out, chunk.resident = kept, 0, resident
                    contents.memory = memory
                    if chunk.is_written:
                        self._loaded[chunk] = None

                self._steps.do(stay)
        return found
