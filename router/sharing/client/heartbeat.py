"""Errors of an owner that does not answer: stopped by a signal or a debugger, or hanging whole; or lost, with none that
follows it.

One that is stopped is never robbed of its lock, and may go on at any time. So a call that has waited for it ends with
an error that says what may become of it still; it is not sent again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ....policies.errors import OutcomeUnknownError, StoreFailedError
from .. import protocol

HEARTBEAT_SECONDS: float = 10.0
"""An owner that has not answered for so long, asked whether it lives, is taken for one that is stopped."""
PERIODS: Final = 4
"""In so many parts of that a client looks: it asks in the first in which nothing came, and takes all of the next ones
for an answer that does not come. A client that was stopped itself has looked once, however long that was."""
_CHANGES: Final = (protocol.Send, protocol.SendMany, protocol.Ack, protocol.Settle, protocol.Commit)


def shown(pid: int, directory: Path) -> str:
    """Return what an owner is called that does not answer."""
    return (
        f"process {pid}, which owns {directory}, has not answered for {HEARTBEAT_SECONDS:g} s: it may be stopped, by a "
        "debugger say, or its machine has no memory left, or all of its disks hang"
    )


def refused(pid: int, directory: Path) -> StoreFailedError:
    """Return the error of a call that is not sent to an owner which does not answer."""
    return StoreFailedError(f"{shown(pid, directory)}. Nothing was done; {_try_again(pid)}")


def given_up(pid: int, directory: Path, request: protocol.Request, is_sent: bool) -> StoreFailedError:
    """Return the error of a call that has waited for an owner which does not answer."""
    what = shown(pid, directory)
    if not is_sent or not _changes(request):
        return StoreFailedError(f"{what}; {_try_again(pid)}")
    return OutcomeUnknownError(f"{what}. What was asked of it is done once it goes on, or never; {_next_step(request)}")


def lost(request: protocol.Request, error: Exception) -> Exception:
    """Return the error of a call that was sent and never answered, since the connection has ended with this one."""
    if not _changes(request):
        return error
    return OutcomeUnknownError(
        f"{error}. What was asked before of the process that owns the directory was done, or never is; "
        f"{_next_step(request)}"
    )


def _try_again(pid: int) -> str:
    return f"let it go on (`kill -CONT {pid}`), or end it (`kill -KILL {pid}`), and try again"


def _changes(request: protocol.Request) -> bool:
    return isinstance(request, _CHANGES) or (isinstance(request, protocol.Call) and request.changes)


def _next_step(request: protocol.Request) -> str:
    match request:
        case protocol.Send() | protocol.SendMany():
            return "send it again under the message_id that you gave it; if you gave none, look whether it was sent"
        case protocol.Ack() | protocol.Settle():
            return "do it again: UnknownMessageError says then that it was done, or that the lease has ended"
    return "look whether it took effect"
