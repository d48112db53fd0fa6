"""The bytes of the usage log: a block is one record of its log and holds rows (core/engine/usage.py). A block stands
alone: it has all that is needed to read its rows, whatever became of those before it. Drawn in docs/format.md."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ...adapters.core.engine.usage import ROW, DestinationName

BLOCK: Final = 48
"""The kind of a block's record, beside wal's SNAPSHOT; no store's journal nor the decision log has it."""
VERSION_FILE: Final = "usage.version"
"""The file beside the log's journal that says which version its blocks have."""
LEVEL: Final = 1
"""The level of zlib: rows are so alike that more takes time and saves little."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A block, in msgpack."""

    session: int
    """When this recording was begun, in microseconds since 1970: its identity."""
    wall_us: int
    """How far the wall clock was ahead of the rows' clock when this was written."""
    threshold: int
    """The limit, of 2**32, below which a message's hash is if it is recorded."""
    lost: int
    """The number of operations of this session by then that were not recorded, about."""
    destinations: list[tuple[int, DestinationName]]
    """Destinations by number."""
    sets: list[tuple[int, list[tuple[int, str]]]]
    """Subscriptions that messages of a topic are for: their numbers and names, by number."""
    rows: bytes
    """All first bytes of the rows, all second bytes and so on, deflated."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Block).decode


def encode_block(
    session: int, wall_us: int, threshold: int, lost: int, declared: list[tuple[int, Any]], rows: bytes
) -> bytes:
    """Return a block's payload; `declared` is what the buffer gave with the rows."""
    destinations = [(number, name) for number, name in declared if isinstance(name, tuple)]
    sets = [(number, name) for number, name in declared if not isinstance(name, tuple)]
    columns = b"".join([rows[at :: ROW.size] for at in range(ROW.size)])
    return _encode(Block(session, wall_us, threshold, lost, destinations, sets, zlib.compress(columns, LEVEL)))


def decode_block(payload: bytes) -> tuple[Block, Iterator[tuple[int, ...]]]:
    """Return the block and its rows. Raises ValueError."""
    try:
        block = _decode(payload)
        columns = zlib.decompress(block.rows)
    except (msgspec.DecodeError, zlib.error) as error:
        raise ValueError(f"a block of the usage log does not read: {error}") from None
    count, rest = divmod(len(columns), ROW.size)
    if rest:
        raise ValueError("a block of the usage log ends within a row")
    rows = bytearray(len(columns))
    for at in range(ROW.size):
        rows[at :: ROW.size] = columns[at * count : (at + 1) * count]
    return block, ROW.iter_unpack(bytes(rows))
