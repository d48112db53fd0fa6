"""CRC-32C backwards: from what it ended with to what it started from (mending.py).

One step of the checksum loses nothing, so it can be undone, byte by byte (as in "Reversing CRC - Theory and Practice",
Stigge and others, 2006). So any whole record of a segment says its seed, from which the checksum starts.
"""

from __future__ import annotations

from typing import Final

POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli's, bits reversed."""
ALL: Final = 0xFFFFFFFF


def _step(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
    return value


_TABLE: Final = [_step(value) for value in range(256)]
_BY_TOP: Final = {entry >> 24: index for index, entry in enumerate(_TABLE)}
"""No two entries of the table begin with the same byte."""


def start_of(crc: int, data: bytes) -> int:
    """Return the checksum from which that of `data` was started, if it ended with `crc`: extend(start_of(crc, data),
    data) is `crc`."""
    return _back(crc ^ ALL, data) ^ ALL


def nonce_for(start: int, crc: int) -> int:
    """Return a number whose eight bytes, little-endian, bring the checksum from `start` to `crc`."""
    forward = start ^ ALL
    for _ in range(4):  # four bytes of zeros
        forward = _TABLE[forward & 0xFF] ^ forward >> 8
    return (forward ^ _back(crc ^ ALL, bytes(4))) << 32


def _back(state: int, data: bytes) -> int:
    for byte in reversed(data):
        index = _BY_TOP[state >> 24]
        state = (state ^ _TABLE[index]) << 8 & ALL | index ^ byte
    return state
