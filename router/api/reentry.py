"""Calls that a signal handler may not make of a router (rule G3).

Closing it, and whatever else goes over all stores, waits for other threads. These may wait for a lock that an
interrupted call of the handler's own thread holds: that of a store, of a log, of a pool of connections, of the
background. That call ends only after the handler. The stack tells of all of them, at no cost to what may be
interrupted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from ...adapters.core.state.leases import Receiver

_ROOT: Final = __name__.partition(".")[0]
_OURS: Final = (f"{_ROOT}.router.", f"{_ROOT}.adapters.")
_COMMANDS: Final = f"{_ROOT}.router.cli."
"""The commands, which call a router as applications do, and hold none of its locks."""
waits_for_message: Final[list[Callable[[FrameType], bool]]] = [lambda frame: frame.f_code is Receiver.wait.__code__]
"""Each tells a frame in which `receive` waits for a message, and holds nothing."""


def refuse_in_handler(name: str) -> None:
    """Raise RuntimeError if a signal handler calls the method of this name and has interrupted its own thread in
    another call of ours, but for a `receive` that waits. Threads that no signal strikes, all but the main one, are
    never refused; nor is other code that ours calls, as a generator is that one sends from."""
    if threading.get_ident() != threading.main_thread().ident:
        return
    frame: FrameType | None = sys._getframe()
    between: list[FrameType] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_OURS) or module.startswith(_COMMANDS):
            between.append(frame)
        else:
            if any(map(_is_handler, between)) and not any(waits(frame) for waits in waits_for_message):
                raise RuntimeError(
                    f"{name}() of a router was called from a signal handler that interrupted another call of its "
                    "thread; do it after the handler, or in another thread"
                )
            between.clear()
        frame = frame.f_back


def _is_handler(frame: FrameType) -> bool:
    """Return whether the code of a frame was given the frame that called it, as only signal handlers are."""
    given = frame.f_locals.values()
    return any(frame.f_back is one or (type(one) is tuple and frame.f_back in one) for one in given)
