"""The choice of a journal's files to compact next, for the journal and for the advisor's model of it.

The rule bounds how often one message is copied. Files are taken together that were copied equally often (their
generation), and only if what they become is at most `live_percent` of what they take, with the headers of their files.
So all that is ever copied for the n-th time is at most that share of what was copied n - 1 times: at 50 percent, of a
TiB that was written no byte is copied more than 40 times, and all copying together costs no more than it cost to write
it. Files of copies that stay small because what is in them goes on living are put together, TOGETHER of them at a time.
Small is one that has at most one part in TOGETHER of the bytes and of the messages that a file may have, so that of
many comes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

MESSAGES_MAX: Final = 8192
"""The most messages in one file of copies."""
BATCH_BYTES: Final = 64 * 1024
"""The batches of a file of copies are about as large, unless one record is larger."""
TOGETHER: Final = 16
"""The number of small files of copies that are put together. Each has at most one part in TOGETHER of what one may
have."""
PARTS: Final = 4
"""The part of what lived that dies before the journal is looked at again: one in PARTS. As much as a file may have is
enough too. To look at each death would copy much of what dies next, where a batch is acked."""


class Used(Protocol):
    """A file that takes no more records."""

    @property
    def generation(self) -> int:
        """Return how often what is in the file was copied; 0: a segment."""

    @property
    def live(self) -> int:
        """Return how many messages in the file live."""

    @property
    def live_bytes(self) -> int:
        """Return the bytes of the records of its live messages."""

    @property
    def taken(self) -> int:
        """Return the bytes of the disk that the file takes beside its header."""


F = TypeVar("F", bound=Used)


def choose(
    files: Iterable[F],
    live_percent: int,
    min_segments: int,
    bytes_max: int,
    header_bytes: int,
    messages_max: int = MESSAGES_MAX,
) -> list[F]:
    """Return the files to compact next, in the order in which they were given, none if it does not pay. They are of one
    generation. Each has at most `live_percent` of live bytes, of all that it takes with its header. Together they have
    about `bytes_max` of live bytes. The deadest go first: least is twice on the disk meanwhile. There are at least
    `min_segments` segments; one file of copies is enough. Files without any live message are not among them."""
    dying: dict[int, list[F]] = {}
    small: dict[int, list[F]] = {}
    for file in files:
        if not file.live:
            continue
        if is_dying(file, live_percent, header_bytes):
            dying.setdefault(file.generation, []).append(file)
        elif file.generation and file.taken * TOGETHER <= bytes_max and file.live * TOGETHER <= messages_max:
            small.setdefault(file.generation, []).append(file)
    for generation, group in sorted(dying.items()):
        deadest = sorted(group, key=lambda file: file.live_bytes / (file.taken + header_bytes))
        first = _first(deadest, 1 if generation else min_segments, bytes_max)
        if not first:
            continue
        after = _bytes_after(first, bytes_max, header_bytes, messages_max)
        if after * 100 <= live_percent * _bytes(first, header_bytes):
            chosen = set(map(id, first))
            return [file for file in group if id(file) in chosen]
    for _, group in sorted(small.items()):
        if first := _first(group, TOGETHER, bytes_max):
            return first
    return []


def is_dying(file: Used, live_percent: int, header_bytes: int) -> bool:
    """Return whether at most `live_percent` of what a file takes is live."""
    return file.live_bytes * 100 <= live_percent * (file.taken + header_bytes)


def look_after(live_bytes: int, bytes_max: int) -> int:
    """Return how many live bytes of files that take no more records die until it is time to look again."""
    return max(min(live_bytes // PARTS, bytes_max), 1)


def _first(group: Sequence[F], least: int, bytes_max: int) -> list[F]:
    """Return as many files as have so many live bytes, and `least` in any case; none if there are fewer."""
    taken: list[F] = []
    size = 0
    for file in group:
        size += file.live_bytes
        if size > bytes_max and len(taken) >= least:
            break
        taken.append(file)
    return taken if len(taken) >= least else []


def _bytes(files: Sequence[Used], header_bytes: int) -> int:
    """Return the bytes that the files take on the disk."""
    return sum(file.taken + header_bytes for file in files)


def _bytes_after(files: Sequence[Used], bytes_max: int, header_bytes: int, messages_max: int) -> int:
    """Return the bytes that their copies will take, in as few files as may be."""
    live, size = sum(file.live for file in files), sum(file.live_bytes for file in files)
    return size + header_bytes * max(-(-size // bytes_max), -(-live // messages_max))
