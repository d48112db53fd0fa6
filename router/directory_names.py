"""Directory names from destination names: no two destinations ever share one, and no name escapes the directory."""

from __future__ import annotations

import hashlib
import string
from typing import Final

from ..policies.destination import Destination

NAME_BYTES_MAX: Final = 120
_PLAIN: Final = frozenset(string.ascii_lowercase + string.digits + "_-.")
_DIGEST_CHARACTERS: Final = 24


def directory_name(destination: Destination) -> str:
    """Percent-encoded, lower case only (some file systems fold case), at most 120 bytes; a longer one is cut and a
    hash of the whole appended after `~`, which no encoded name contains."""
    encoded = f"{destination.kind.name.lower()}." + "".join(
        character if character in _PLAIN else "".join(f"%{byte:02x}" for byte in character.encode())
        for character in destination.name
    )
    if len(encoded) <= NAME_BYTES_MAX:
        return encoded
    digest = hashlib.sha256(str(destination).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{encoded[: NAME_BYTES_MAX - _DIGEST_CHARACTERS - 1]}~{digest}"
