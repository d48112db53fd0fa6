"""The limit of memory: which chunks are in memory, so that all of it takes no more than `max_bytes` (invariant 10).

Room comes from these, in this order: chunks that were loaded again and are not the first of their level, those used
longest ago first; sealed ones that never left memory, from the newest message on, which is the last that anybody will
ask for; then whatever is left, the largest first. The first two kinds leave alone what a receiver comes to next.

R1  `used` is the sum of what destinations, subscriptions and chunks cost.
R2  Every chunk that has something in memory is in exactly one of `kept` (not all of it is in the swap) and `loaded`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final

from ....policies.errors import StoreFailedError, StoreFullError
from ....policies.units import KIB
from ...system.files import FULL, is_out_of_files, refused
from .message_chunks import Chunk, memory_of
from .swap_files import Address, SwapFiles

CHUNK_BYTES_MIN: Final = 16 * KIB
CHUNK_BYTES_MAX: Final = 256 * KIB
WORTH: Final = 1 * KIB
"""Bytes of records; swapping less than that frees nothing to speak of."""
AHEAD: Final = 32
"""A part of `max_bytes` that is freed at once when there is none left, so that not every send looks for some."""

_first = attrgetter("first")
_resident = attrgetter("resident")


class MemoryLimit:
    """The memory of one store. Under its lock."""

    def __init__(self, name: str, swap: SwapFiles, max_bytes: int) -> None:
        self._name, self._swap, self._max_bytes = name, swap, max_bytes
        self.chunk_bytes: Final = min(max(max_bytes // 8, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
        """Bytes of records at which a chunk is full."""
        self.used: int = 0
        """Bytes of memory that all of it takes."""
        self.prepared = 0
        """Bytes of memory that prepared transactions take."""
        self.kept: dict[Chunk, None] = {}
        self.loaded: OrderedDict[Chunk, None] = OrderedDict()
        """The one that was used longest ago first."""
        self.unfinished: Callable[[], object] | None = None
        """A function that makes whole again what is changing right now, should that be interrupted; may be called
        again. Whoever finds one calls it, and then has all that is counted counted anew (backend.py)."""

    def fits(self, more: int) -> bool:
        """Return whether so many bytes more are within the limit."""
        return self.used + self.prepared + more <= self._max_bytes

    def count(self, chunk: Chunk) -> None:
        """Count what a chunk takes more or less by now."""
        cost = chunk.cost
        self.used += cost - chunk.charge
        chunk.charge = cost

    def recount(self, chunks: Sequence[Chunk], others: int) -> None:
        """Count all chunks anew, and `others`: bytes of destinations and subscriptions. Idempotent."""
        for chunk in chunks:
            chunk.charge = chunk.cost
        self.used = sum(chunk.charge for chunk in chunks) + others
        there = [chunk for chunk in chunks if not chunk.is_out]
        self.kept = {chunk: None for chunk in there if not chunk.is_written}
        loaded = {chunk for chunk in there if chunk.is_written}
        for chunk in list(self.loaded):
            if chunk not in loaded:
                self.loaded.pop(chunk, None)
        for chunk in loaded:
            self.loaded[chunk] = None

    def forget(self, chunk: Chunk) -> None:
        """Forget a chunk that is no more. Idempotent, but for what is counted."""
        self.used -= chunk.charge
        chunk.charge = 0
        self.kept.pop(chunk, None)
        self.loaded.pop(chunk, None)
        chunk.records.clear()  # somebody may still hold its last message
        chunk.out = len(chunk)
        for address in chunk.addresses:
            self._swap.release(address)

    # Making room

    def make_room(self, more: int, keep: Chunk | None = None) -> None:
        """Make room for `more` bytes, or leave as little as can be in memory, but for `keep`. Raises what `swap_error`
        says; what was in memory is then there still, or in the swap."""
        goal = self._max_bytes - self.prepared - more
        if self.used <= goal:
            return
        goal = max(0, goal - self._max_bytes // AHEAD)
        for chunk in self._victims(keep):
            if self.used <= goal:
                return
            self._evict(chunk)

    def _victims(self, keep: Chunk | None) -> Iterable[Chunk]:
        loaded = [chunk for chunk in self.loaded if chunk is not keep]
        kept = [chunk for chunk in self.kept if chunk.resident >= WORTH]
        behind = [chunk for chunk in kept if chunk.sealed and chunk.level.chunks[0] is not chunk]
        behind.sort(key=_first, reverse=True)
        others = [chunk for chunk in chain(loaded, kept) if chunk is not keep]
        others.sort(key=_resident, reverse=True)
        return chain([chunk for chunk in loaded if chunk.level.chunks[0] is not chunk], behind, others)

    def _evict(self, chunk: Chunk) -> None:
        """Move a chunk out of memory, into the swap what was never there."""
        if chunk.is_out:
            return
        addresses, length = chunk.addresses, len(chunk)
        if not chunk.is_written:
            records = [record or b"" for record in chunk.records[chunk.written - chunk.out :]]
            addresses = (*addresses, self.write(records))

        def leave() -> None:
            chunk.addresses, chunk.written = addresses, length
            chunk.records, chunk.out, chunk.resident = [], length, 0
            self.kept.pop(chunk, None)
            self.loaded.pop(chunk, None)

        self._do(leave)
        self.count(chunk)
        self.unfinished = None

    def write(self, records: Sequence[bytes]) -> Address:
        """Write a new entry of the swap; one of which nobody gets to know goes when all is counted anew. Raises what
        `swap_error` says."""
        self.unfinished = nothing
        try:
            return self._swap.write(records)
        except OSError as error:
            self.unfinished = None
            raise self._swap_error(error) from error

    def _do(self, step: Callable[[], object]) -> None:
        """Do a step whole, now or at the next call."""
        self.unfinished = step
        step()
        self.unfinished = nothing

    def _swap_error(self, error: OSError) -> StoreFullError | StoreFailedError:
        """Return the error for a caller that needed the room. The store goes on: nothing is lost, and it may be
        emptied."""
        what = f"store {self._name!r}: max_bytes, {self._max_bytes}, are in memory and a swap file in"
        if is_out_of_files(error):
            return refused(f"{what} {self._swap.directory} cannot be written: {error}", error)
        if error.errno in FULL:
            return StoreFullError(f"{what} {self._swap.directory} cannot grow: {error}; free some space or ack some")
        return StoreFailedError(
            f"{what} {self._swap.directory} cannot be written: {error}. Nothing was sent; its messages can be "
            "received. See to the disk"
        )

    def full(self) -> StoreFullError:
        """Return the error that it does not fit, even where everything is swapped."""
        return StoreFullError(
            f"store {self._name!r}: the places of its messages take {self.used} bytes of memory; max_bytes is "
            f"{self._max_bytes}: ack some or raise it. Nothing was sent"
        )

    # Reading

    def record(self, chunk: Chunk, index: int) -> bytes | None:
        """Return a message's record; None if the message is dead. Raises ReadError, StoreFailedError,
        OutOfDescriptorsError."""
        if chunk.dead >> index & 1:
            return None
        if index >= chunk.out:
            if chunk.addresses and chunk in self.loaded:
                self.loaded.move_to_end(chunk)
            return chunk.records[index - chunk.out]
        return self._load(chunk)[index]

    def records(self, chunk: Chunk) -> list[bytes | None]:
        """Return the records of a chunk, dead ones too unless they are gone, without keeping them. Raises what `record`
        raises."""
        if not chunk.out:
            return chunk.records
        records: list[bytes | None] = []
        for address in chunk.addresses:
            try:
                records += self._swap.read(address)
            except OSError as error:
                what = f"store {self._name!r}: the swap file {address.file.path} cannot be read now: {error}"
                if is_out_of_files(error):
                    raise refused(what, error) from error
                raise StoreFailedError(f"{what}; see to the disk") from error
        return records + chunk.records[chunk.written - chunk.out :]

    def _load(self, chunk: Chunk) -> list[bytes | None]:
        """Return a chunk's records, kept in memory if there are others to be read and they fit."""
        records = self.records(chunk)
        live = chunk.live
        if live.bit_count() > 1:
            kept = [record if live >> index & 1 else None for index, record in enumerate(records)]
            resident = sum(memory_of(len(record)) for record in kept if record is not None)
            more = resident - chunk.resident
            try:
                self.make_room(more, chunk)
            except (StoreFullError, StoreFailedError):
                return records
            if self.fits(more):

                def stay() -> None:
                    chunk.records, chunk.out, chunk.resident = kept, 0, resident
                    if chunk.is_written:
                        self.loaded[chunk] = None

                self._do(stay)
                self.count(chunk)
                self.unfinished = None
        return records


def nothing() -> None:
    """Do nothing: there is nothing to make whole but what is counted."""
