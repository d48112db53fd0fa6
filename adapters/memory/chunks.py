"""Messages lie in chunks: some hundred that follow each other in one destination (and, with priorities, of one
priority). A chunk is the unit of swapping.

K1  A chunk's messages are in the order of their seqs, and the chunks of a lane too.
K2  The last chunk of a lane may be open: messages are added, also behind some that are swapped already. Any other is
    sealed.
K3  The first `written` records are in the swap, at `addresses`, in order; the first `out` are not in memory. None is
    in neither: out <= written. A chunk that is loaded again keeps its addresses, since a message never changes.
K4  A dead message's record is dropped from memory at once; from the swap with the last one of its chunk.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol

from .records import Record
from .swap import Address

if TYPE_CHECKING:
    from .contents import DestinationState

MESSAGES_MAX: Final = 1024
"""Of one chunk."""
MASKS: Final = tuple((1 << n) - 1 for n in range(MESSAGES_MAX + 1))
CHUNK_COST: Final = 1000
"""Bytes of memory that a chunk takes beside its records, with the most compact of its arrays."""
ADDRESS_COST: Final = 250
"""Likewise, each of its entries in the swap."""

_first = attrgetter("first")


class Numbers(Protocol):
    """One for each message of a chunk."""

    def __getitem__(self, index: int, /) -> int: ...


class Lane:
    """The messages of one destination and order."""

    __slots__ = ("chunks", "order", "state")

    def __init__(self, state: DestinationState, order: int) -> None:
        self.state = state
        self.order = order
        self.chunks: list[Chunk] = []

    def find(self, seq: int) -> tuple[Chunk, int] | None:
        """Chunk and index of a message, dead or not."""
        at = bisect_right(self.chunks, seq, key=_first) - 1
        if at < 0:
            return None
        chunk = self.chunks[at]
        index = bisect_left(chunk.offsets, seq - chunk.first)
        return (chunk, index) if index < len(chunk.offsets) and chunk.seq(index) == seq else None

    def after(self, seq: int) -> Iterator[tuple[Chunk, int]]:
        """Each chunk that has messages behind `seq`, with the index of the first of them."""
        at = max(0, bisect_right(self.chunks, seq, key=_first) - 1)
        while at < len(self.chunks):
            chunk = self.chunks[at]
            index = bisect_right(chunk.offsets, seq - chunk.first) if seq >= chunk.first else 0
            if index < len(chunk.offsets):
                yield chunk, index
            at += 1

    def add(self, chunk: Chunk) -> None:
        """At the end; the one before is sealed. Idempotent."""
        if not self.chunks:
            self.chunks.append(chunk)
        elif self.chunks[-1].first < chunk.first:
            self.chunks[-1].seal()
            self.chunks.append(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Idempotent."""
        at = bisect_left(self.chunks, chunk.first, key=_first)
        if at < len(self.chunks) and self.chunks[at] is chunk:
            del self.chunks[at]


class Chunk:
    """Under the store's lock; only `is_dead` may be asked without it."""

    __slots__ = (
        "_arrays",
        "acked",
        "addresses",
        "charge",
        "counts",
        "dead",
        "expiries",
        "first",
        "lane",
        "live_bytes",
        "offsets",
        "out",
        "positions",
        "records",
        "resident",
        "sealed",
        "soonest",
        "total_bytes",
        "written",
    )  # fmt: skip

    def __init__(self, lane: Lane, first: int) -> None:
        self.lane = lane
        self.first = first
        """The seq of its first message."""
        self.offsets: Sequence[int] = array("Q")
        """Of each message: its seq, less `first`."""
        self.records: list[Record | None] = []
        """Those in memory: of the message at `out`, and so on. None for a dead one."""
        self.out = 0
        self.written = 0
        self.addresses: tuple[Address, ...] = ()
        self.dead = 0
        """A bit for each message that is dead."""
        self.acked: dict[int, int] = {}
        """Subscription's number -> a bit for each message that it has acked."""
        self.counts: dict[tuple[int, int], int] = {}
        """Number of the feed's, index -> how often the message has come back."""
        self.expiries: Numbers | None = None
        """When each message expires; None if none does."""
        self.soonest = 0
        """No live message expires before; 0: none does."""
        self.positions: Numbers | None = None
        """What the store's `position` said of each; None if it has none."""
        self.total_bytes = 0
        """Of all messages ever in it, as they count for the store's limits."""
        self.live_bytes = 0
        """Of those that live."""
        self.resident = 0
        """Bytes of memory that its records take now."""
        self.charge = 0
        """What `cost` said when it was last counted."""
        self.sealed = False
        self._arrays = 0
        """Bytes of its arrays, once it is sealed."""

    def __len__(self) -> int:
        return len(self.offsets)

    def __bool__(self) -> bool:
        return True

    def seq(self, index: int) -> int:
        return self.first + self.offsets[index]

    def expires_at(self, index: int) -> int:
        return self.expiries[index] if self.expiries is not None else 0

    def is_dead(self, index: int) -> bool:
        return bool(self.dead >> index & 1)

    @property
    def live(self) -> int:
        """A bit for each message that lives."""
        return MASKS[len(self.offsets)] & ~self.dead

    @property
    def is_out(self) -> bool:
        """Nothing of it is in memory."""
        return self.out == len(self.offsets)

    @property
    def is_written(self) -> bool:
        """All of it is in the swap."""
        return self.written == len(self.offsets)

    @property
    def last(self) -> int:
        return self.first + self.offsets[-1]

    @property
    def cost(self) -> int:
        """Bytes of memory that it takes, resident or not, beside its records."""
        arrays = self._arrays if self.sealed else self._array_bytes()
        return CHUNK_COST + arrays + ADDRESS_COST * len(self.addresses) + 64 * len(self.acked) + 128 * len(self.counts)

    def _array_bytes(self) -> int:
        found = bytes_of(self.offsets)
        if self.expiries is not None:
            found += bytes_of(self.expiries)
        if self.positions is not None:
            found += bytes_of(self.positions)
        return found

    def seal(self) -> None:
        """No more messages are added. Idempotent."""
        self.offsets = compact(self.offsets)
        if isinstance(self.expiries, array):
            self.expiries = packed(self.expiries)
        if isinstance(self.positions, array):
            self.positions = packed(self.positions)
        self._arrays = self._array_bytes()
        self.sealed = True


def compact(offsets: Sequence[int]) -> Sequence[int]:
    """The same numbers, which grow, in as little memory as may be."""
    last = offsets[-1]
    if last == len(offsets) - 1:
        return range(len(offsets))
    return array("H" if last < 1 << 16 else "I" if last < 1 << 32 else "Q", offsets)


class Near:
    """Numbers that are close together, or 0."""

    __slots__ = ("_base", "offsets")

    def __init__(self, numbers: Sequence[int], base: int, code: str) -> None:
        self._base = base - 1
        self.offsets = array(code, [number - self._base if number else 0 for number in numbers])

    def __getitem__(self, index: int) -> int:
        offset = self.offsets[index]
        return offset + self._base if offset else 0


class Few:
    """Numbers most of which are 0."""

    __slots__ = ("numbers", "which")

    def __init__(self, numbers: Sequence[int]) -> None:
        self.which = array("H", [index for index, number in enumerate(numbers) if number])
        self.numbers = array("Q", [number for number in numbers if number])

    def __getitem__(self, index: int) -> int:
        at = bisect_left(self.which, index)
        return self.numbers[at] if at < len(self.which) and self.which[at] == index else 0


def packed(numbers: Sequence[int]) -> Numbers:
    """The same numbers in little memory."""
    some = [number for number in numbers if number]
    spread = max(some, default=0) - min(some, default=0)
    if 5 * len(some) < len(numbers):
        return Few(numbers)
    if spread + 1 < 1 << 32:
        return Near(numbers, min(some), "H" if spread + 1 < 1 << 16 else "I")
    return array("Q", numbers)


def bytes_of(numbers: object) -> int:
    """Bytes of memory, beside what an empty one takes."""
    if isinstance(numbers, array):
        return len(numbers) * numbers.itemsize
    if isinstance(numbers, Near):
        return 160 + bytes_of(numbers.offsets)
    if isinstance(numbers, Few):
        return 240 + bytes_of(numbers.which) + bytes_of(numbers.numbers)
    return 0


def indexes(mask: int) -> Iterator[int]:
    """Which bits are set, from the lowest."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
