"""The one file: a checksum, then the contents."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgspec

from anabranch.adapters.files import sync_directory
from anabranch.policies.errors import CorruptionError

from .contents import Contents

FILE = "contents.bin"


def write(path: Path, encoded: bytes) -> None:
    """Durable on return, whole or not at all whatever crash comes."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(zlib.crc32(encoded).to_bytes(4, "big"))
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def read(path: Path) -> tuple[Contents, bytes]:
    """Raises CorruptionError, FileNotFoundError."""
    found = path.read_bytes()
    checksum, encoded = found[:4], found[4:]
    if len(found) < 5 or zlib.crc32(encoded).to_bytes(4, "big") != checksum:
        raise CorruptionError(str(path), 0, "the checksum does not fit", "restore it from a backup")
    return msgspec.msgpack.decode(encoded, type=Contents), encoded
