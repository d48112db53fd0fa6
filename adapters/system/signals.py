"""Ends a process from outside: SIGTERM and SIGHUP are raised in it as Ctrl-C is, so that it cleans up first."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

ENDING: Final = tuple(getattr(signal.Signals, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal.Signals, name))
_WORDS: Final = {"SIGINT": "Interrupted.", "SIGTERM": "Terminated.", "SIGHUP": "Hung up."}


class Ended(KeyboardInterrupt):
    """Raised when this process was told to end. It is a KeyboardInterrupt, since both need the same cleaning up."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def ended_by_signals() -> None:
    """Let SIGTERM and SIGHUP raise `Ended` from now on, once, in the main thread. A signal that is ignored (nohup)
    stays so."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    # A second signal, as `timeout` sends (to the process, then its group), must not cut off the cleaning up.
    for other in ENDING:
        if signal.getsignal(other) is _end:
            signal.signal(other, signal.SIG_IGN)
    raise Ended(number)


def _number(interrupt: KeyboardInterrupt) -> signal.Signals:
    return signal.Signals(interrupt.number) if isinstance(interrupt, Ended) else signal.SIGINT


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return the code as a shell tells it: 128 and the signal's number."""
    return 128 + _number(interrupt)


def describe(interrupt: KeyboardInterrupt) -> str:
    """Return a word for the user that says how the command ended."""
    return _WORDS[_number(interrupt).name]
