"""What a caller asks for, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..wal import ticket

if TYPE_CHECKING:
    from .changes import Change


class Ticket(ticket.Ticket):
    """Changes that take effect together."""

    content: Sequence[Change]
    """The changes."""
