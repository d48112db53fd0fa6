"""Tickets: the changes that a caller asks for, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...wal import ticket

if TYPE_CHECKING:
    from ..state.limits import Grant
    from .changes import Change


class Ticket(ticket.Ticket):
    """Changes that take effect together."""

    content: Sequence[Change]
    """The changes."""
    held: Grant | None
    """Room for their messages, until these are applied."""
    transaction = False
    """True if the changes are a transaction's."""
    moves = False
    """True if the changes are a move's own, which no gate keeps out (gates.py)."""
    then: Ticket | None = None
    """The next one of the same call. If a plan refuses this one, it refuses that one, too: their order is kept."""
