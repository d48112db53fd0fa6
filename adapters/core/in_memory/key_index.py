"""An index in memory from a map's keys to messages, for backends that hold no such index on disk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

KEY_COST: Final = 300
"""At most so many bytes of memory a key takes beside its own, in the order too."""
BLOCK_MAX: Final = 2000
"""Keys of a block, which is split in two beyond it."""


class KeyIndex:
    """The index of one map. Everything may be done again after an interruption."""

    __slots__ = ("_blocks", "_names", "_seqs", "cost")

    def __init__(self) -> None:
        self._seqs: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._blocks: list[list[bytes]] | None = None
        """The keys in order, once somebody has asked for that; none is empty."""
        self.cost: int = 0
        """Bytes of memory that it takes, about."""

    def __len__(self) -> int:
        return len(self._seqs)

    def get(self, name: bytes) -> int | None:
        """Return the seq of a key's message."""
        return self._seqs.get(name)

    def put(self, name: bytes, seq: int) -> None:
        """Let a key that leads nowhere lead to this message."""
        if name not in self._seqs:
            self._add(name)
            self._names[seq] = name
            self._seqs[name] = seq
            self.cost += KEY_COST + len(name)

    def forget(self, seq: int) -> None:
        """Forget the key of a message that is dead."""
        name = self._names.get(seq)
        if name is None:
            return
        self._discard(name)
        if self._seqs.pop(name, None) is not None:
            self.cost -= KEY_COST + len(name)
        self._names.pop(seq, None)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Return all keys, and the seqs of their messages, in no order."""
        return iter(self._seqs.items())

    def page(self, start: bytes, limit: int) -> list[tuple[bytes, int]]:
        """Return the first keys from this one on, in order, and the seqs of their messages."""
        if self._blocks is None:
            names = sorted(self._seqs)
            self._blocks = [names[at : at + BLOCK_MAX // 2] for at in range(0, len(names), BLOCK_MAX // 2)]
        found: list[tuple[bytes, int]] = []
        at = self._block(start)
        while at < len(self._blocks) and len(found) < limit:
            block = self._blocks[at]
            first = bisect_left(block, start)
            found += [(name, self._seqs[name]) for name in block[first : first + limit - len(found)]]
            at += 1
        return found

    def _block(self, name: bytes) -> int:
        """Return the first block whose last key does not come before this one."""
        return bisect_left(self._blocks or [], name, key=_last)

    def _add(self, name: bytes) -> None:
        blocks = self._blocks
        if blocks is None:
            return
        try:
            at = min(self._block(name), len(blocks) - 1)
            if at < 0:
                blocks.append([name])
                return
            block = blocks[at]
            place = bisect_left(block, name)
            if place == len(block) or block[place] != name:
                block.insert(place, name)
            if len(block) > BLOCK_MAX:
                blocks[at : at + 1] = [block[: BLOCK_MAX // 2], block[BLOCK_MAX // 2 :]]
        except BaseException:
            self._blocks = None  # half split, perhaps: made anew when it is asked for
            raise

    def _discard(self, name: bytes) -> None:
        blocks = self._blocks
        if blocks is None:
            return
        at = self._block(name)
        if at < len(blocks):
            block = blocks[at]
            place = bisect_left(block, name)
            if block[place] == name:
                del block[place]
            if not block:
                del blocks[at]


def _last(block: list[bytes]) -> bytes:
    return block[-1]
