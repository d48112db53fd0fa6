"""Names of external transactions, as X/Open XA and Python's DB-API have them."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...policies.errors import TransactionError

FORMAT_ID_MAX: Final = (1 << 31) - 1
PART_BYTES_MAX: Final = 64


class Xid(NamedTuple):
    """The name that a transaction manager gives to one of its transactions."""

    format_id: int
    """From 0 to 2^31 - 1: the naming scheme, which tells managers apart."""
    global_id: str
    """1 to 64 bytes in UTF-8."""
    branch: str = ""
    """0 to 64 bytes in UTF-8."""

    def __str__(self) -> str:
        return f"{self.format_id}:{self.global_id}:{self.branch}"


def checked_xid(format_id: object, global_id: object, branch: object = "") -> Xid:
    """Return an Xid of checked parts. Raises TypeError, and TransactionError for what is too long or out of range."""
    if type(format_id) is not int or not isinstance(global_id, str) or not isinstance(branch, str):
        raise TypeError(
            f"an xid is an int and two str (format id, global transaction id, branch qualifier); found "
            f"{format_id!r}, {global_id!r}, {branch!r}"
        )
    if not 0 <= format_id <= FORMAT_ID_MAX:
        raise TransactionError(f"xid: the format id {format_id} is not between 0 and {FORMAT_ID_MAX}")
    for what, part, least in (("global transaction id", global_id, 1), ("branch qualifier", branch, 0)):
        try:
            size = len(part.encode())
        except UnicodeEncodeError as error:
            raise TransactionError(f"xid: the {what} {part[:80]!r} is not valid unicode: {error.reason}") from None
        if not least <= size <= PART_BYTES_MAX:
            raise TransactionError(
                f"xid: the {what} {part[:80]!r} takes {size} bytes; {least} to {PART_BYTES_MAX} are allowed"
            )
    return Xid(format_id, global_id, branch)


def as_xid(value: object) -> Xid:
    """Return an Xid from one, or from a tuple of its parts."""
    if isinstance(value, tuple) and len(value) in (2, 3):
        return checked_xid(*value)
    raise TypeError(f"an xid is (format id, global transaction id, branch qualifier); found {value!r}")
