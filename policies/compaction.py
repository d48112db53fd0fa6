"""Which files of a journal are compacted next: what the journal goes by, and the advisor's model of it.

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
"""In one file of copies."""
BATCH_BYTES: Final = 64 * 1024
"""The batches of a file of copies are about as large, unless one record is larger."""
TOGETHER: Final = 16
"""So many small files of copies are put together, each with at most one part in TOGETHER of what one may have."""
PARTS: Final = 4
"""It is looked again once one part in PARTS of what lived has died, or as much as a file may have. To look at each
death would copy much of what dies next, where a batch is acked."""


class Used(Protocol):
    """A file that takes no more records."""

    @property
    def generation(self) -> int:
        """How often what is in it was copied; 0: a segment."""

    @property
    def live(self) -> int:
        """Messages in it that live."""

    @property
    def live_bytes(self) -> int:
        """Bytes of their records."""

    @property
    def taken(self) -> int:
        """Bytes of the disk that it takes beside its header."""


F = TypeVar("F", bound=Used)


def choose(
    files: Iterable[F],
    live_percent: int,
    min_segments: int,
    bytes_max: int,
    header_bytes: int,
    messages_max: int = MESSAGES_MAX,
) -> list[F]:
    """The files that are to be compacted next, in the order in which they were given, none if it does not pay: of one
    generation, each with at most `live_percent` of live bytes, of all that it takes with its header, and together with
    about `bytes_max` of live bytes. Those go first that are deadest: least is twice on the disk meanwhile. Of segments
    there are at least `min_segments`, of files of copies one is enough. Files without any live message are not among
    them."""
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
    """Whether at most so much of what it takes is live."""
    return file.live_bytes * 100 <= live_percent * (file.taken + header_bytes)


def look_after(live_bytes: int, bytes_max: int) -> int:
    """How many bytes die, of those that live in files that take no more, until it is time to look again."""
    return max(min(live_bytes // PARTS, bytes_max), 1)


def _first(group: Sequence[F], least: int, bytes_max: int) -> list[F]:
    """As many as have so many live bytes, and `least` in any case; none if there are fewer."""
    taken: list[F] = []
    size = 0
    for file in group:
        size += file.live_bytes
        if size > bytes_max and len(taken) >= least:
            break
        taken.append(file)
    return taken if len(taken) >= least else []


def _bytes(files: Sequence[Used], header_bytes: int) -> int:
    """What they take on the disk."""
    return sum(file.taken + header_bytes for file in files)


def _bytes_after(files: Sequence[Used], bytes_max: int, header_bytes: int, messages_max: int) -> int:
    """What they will take, in as few files as may be."""
    live, size = sum(file.live for file in files), sum(file.live_bytes for file in files)
    return size + header_bytes * max(-(-size // bytes_max), -(-live // messages_max))
