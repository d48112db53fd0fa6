"""The checksum backwards."""

from __future__ import annotations

import os

from google_crc32c import extend as crc32c

from anabranch.adapters.wal.recovery.crc import nonce_for, start_of


def test_what_it_started_from_is_found() -> None:
    for length in (0, 1, 7, 100):
        data, start = os.urandom(length), int.from_bytes(os.urandom(4), "little")
        assert start_of(crc32c(start, data), data) == start


def test_a_nonce_for_any_seed_is_found() -> None:
    start, seed = 0x12345678, 0x9ABCDEF0
    assert crc32c(start, nonce_for(start, seed).to_bytes(8, "little")) == seed
