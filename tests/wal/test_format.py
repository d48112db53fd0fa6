"""Round trips of headers, and what is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.wal import format as w
from anabranch.policies.errors import CorruptionError

from .made import header_of

u64 = st.integers(0, 2**64 - 1)


class TestSegmentHeader:
    @given(
        st.builds(
            w.SegmentHeader,
            log_id=st.binary(min_size=16, max_size=16),
            number=u64,
            nonce=u64,
            base_lsn=u64,
            durable_lsn=u64,
            prev_number=u64,
            prev_end=u64,
            prev_lsn=u64,
            counter=u64,
            snapshot_number=u64,
            snapshot_offset=u64,
            capacity=u64,
        )
    )
    def test_round_trip(self, header: w.SegmentHeader) -> None:
        page = header.encode()
        assert len(page) == w.HEADER_BYTES
        assert w.SegmentHeader.decode(page, "x.seg") == header
        assert w.SegmentHeader.decode(page[:120], "x.seg") == header

    @given(st.integers(0, 120 * 8 - 1))
    def test_a_flipped_bit_is_found(self, bit: int) -> None:
        page = bytearray(header_of().encode())
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError, match=r"x\.seg"):
            w.SegmentHeader.decode(bytes(page), "x.seg")

    @pytest.mark.parametrize("page", [b"", b"ANBRSEG\n", bytes(4096), b"x" * 4096])
    def test_what_is_no_header(self, page: bytes) -> None:
        with pytest.raises(CorruptionError, match="not a journal segment"):
            w.SegmentHeader.decode(page, "x.seg")

    def test_a_newer_version_is_told_from_damage(self) -> None:
        page = bytearray(header_of().encode())
        struct.pack_into("<H", page, 8, w.VERSION + 1)
        told = f"version {w.VERSION + 1}; this program reads version {w.VERSION}.*use the version"
        with pytest.raises(CorruptionError, match=told):
            w.SegmentHeader.decode(bytes(page), "x.seg")

    def test_seeds_differ(self) -> None:
        """By store and by nonce, so that nothing parses in another's place."""
        assert len({w.segment_seed(bytes([store]) * 16, nonce) for store in range(8) for nonce in range(8)}) == 64


class TestBatches:
    @given(
        st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), u64, u64
    )
    def test_header_round_trip(
        self, seed: int, offset: int, length: int, count: int, base_lsn: int, watermark: int
    ) -> None:
        data = w.encode_batch_header(seed, offset, length, count, base_lsn, watermark)
        assert w.decode_batch_header(data, seed, offset) == w.BatchHeader(length, count, base_lsn, watermark)
        assert w.decode_batch_header(data, seed, offset + 1) is None
        assert w.decode_batch_header(data, seed ^ 1, offset) is None
        assert w.decode_batch_header(data[:-1], seed, offset) is None
