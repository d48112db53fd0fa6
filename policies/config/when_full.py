"""The fate of a send for which a store, or a destination, has no room."""

from __future__ import annotations

import enum


class WhenFull(enum.Enum):
    """The fate of a send that goes beyond a limit. The values are the words of the configuration file."""

    FAIL = "fail"
    """The send raises StoreFullError at once."""

    BLOCK = "block"
    """The send waits for room behind those who came before. After `block_timeout` it raises StoreFullError."""

    DROP_NEW = "drop_new"
    """The message is not stored; its receipt says `dropped`."""

    DROP_OLD = "drop_old"
    """The oldest messages that nobody holds are dropped in its favour, in the same write: a ring."""
