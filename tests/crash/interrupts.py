"""Ctrl-C at every bytecode of one call, one after the other (rules G2, G3, X4): `everywhere`.

    def test_it(...):
        def prepare(at: int) -> Callable[[], object]: ...      # what is interrupted, made anew each time
        def check(at: int, where: str) -> None: ...            # nothing lost, doubled or stuck
        everywhere(prepare, check, share=share)

The interpreter delivers a signal between two bytecodes, after a call or a jump back and when a function begins; a
trace function raises KeyboardInterrupt at the first such place, then at the second, until the operation gets through.
What a loop does is struck in its first rounds: a page of an LMDB file is read by hundreds of them.

| of what | where |
|---|---|
| send, receive, ack, a transaction, open, close, upkeep of a journal | `test_interrupts.py` |
| transactions over several stores | `test_interrupts_across.py` |
| tokens, listeners, rejecting, Futures | `test_interrupts_hosting.py` |
| topics and their subscriptions | `test_interrupts_topics.py` |
| maps; scheduled messages; transient ones | `test_interrupts_maps.py`, `_waiting.py`, `_nonpersistent.py` |
| message groups | `test_interrupts_groups.py` |
| messages that are leased to their senders | `test_leased_sends.py` |
| what a memory store swaps; an SQL store's database | tests/memory, tests/sql: `test_interrupts.py` |
| one structure of the core | beside its other tests in tests/core |
"""

from __future__ import annotations

import dis
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

from ..garbage import set_aside
from ..shares import Share

CHECKED = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) or name == "PRECALL"
)
ENDS = ("__del__", "_left")
POINTS_MAX = 8000
OURS = ("/adapters/", "/router/")
LIBRARY = ("/threading.py", "/contextlib.py", "/concurrent/futures/_base.py")
"""What of Python's own is Python code and holds locks, or what they are held by."""
FEW = 47
"""One of every so many places."""
IN_PART = Share()
ROUNDS = 3
"""How often a place counts that is reached by the same calls, at the same bytecodes of theirs, again and again."""


class Interrupter:
    """Raises KeyboardInterrupt at the `at`-th place where a signal may be delivered in files of these folders."""

    def __init__(self, at: int, folders: Sequence[str]) -> None:
        self.left = at
        self.where = ""
        self._folders = folders
        self._paths: dict[tuple[int, int, CodeType], int] = {}
        """A number for each way to a function: that to its caller, where it is called there, and the function."""
        self._path_of: dict[FrameType, int] = {}
        self._rounds: Counter[tuple[int, int]] = Counter()

    def trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        """For `sys.settrace`: told of each call."""
        code = frame.f_code
        if not any(folder in code.co_filename for folder in self._folders) or _ends_something(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._tracer(frame, _places(code))

    def strike(self) -> None:
        """Do what the signal does."""
        raise KeyboardInterrupt

    def forget(self) -> None:
        """Keep no frame: what an interrupted call held, its caller lets go of at once."""
        self._path_of.clear()

    def _tracer(self, frame: FrameType, places: Places) -> Callable[[FrameType, str, Any], Any]:
        """What is told of each bytecode of a function. Closures, since most of a test's time is theirs."""
        path = self._path_of[frame] = self._path(frame)
        checked, delivers = places
        before = 0

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                last, before = before, frame.f_lasti
                if checked[last] and delivers(last, before):
                    self._rounds[path, before] += 1
                    if self._rounds[path, before] <= ROUNDS:  # else it is like those of earlier rounds of the same loop
                        self.left -= 1
                        if self.left == 0:
                            self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                            self.strike()
            elif event == "return":
                self._path_of.pop(frame, None)
            return trace

        return trace

    def _path(self, frame: FrameType) -> int:
        caller = frame.f_back
        above, called_at = 0, 0
        if caller is not None and caller.f_code is not interrupted.__code__:
            known = self._path_of.get(caller)
            above, called_at = self._path(caller) if known is None else known, caller.f_lasti
        return self._paths.setdefault((above, called_at, frame.f_code), len(self._paths) + 1)


def _ends_something(frame: FrameType) -> bool:
    """Whether it is a `__del__` or the callback of a weak reference, or is called by one: what is raised there, Python
    swallows."""
    above: FrameType | None = frame
    for _ in range(10):
        if above is None:
            return False
        if above.f_code.co_name in ENDS:
            return True
        above = above.f_back
    return False


Places = tuple[Sequence[bool], Callable[[int, int], bool]]
"""Of a function: by the offset of each bytecode whether a signal may be delivered after it, and, if so, whether that
has the same effect as if it were delivered at the bytecode that comes next."""


@cache
def _places(code: CodeType) -> Places:
    opcodes = code.co_code
    precall, call = dis.opmap.get("PRECALL"), dis.opmap.get("CALL")
    handlers: list[int | None] = [None] * len(opcodes)
    for entry in reversed(dis._parse_exception_table(code)):  # type: ignore[attr-defined]
        handlers[entry.start : entry.end] = [entry.target] * (entry.end - entry.start)

    def delivers(before: int, now: int) -> bool:
        if opcodes[before] == precall and opcodes[now] == call:
            return False  # Python 3.11 calls in two steps, PRECALL and CALL; nothing is delivered between them
        # It would be raised there: what guards that place must guard this one, as at the end of a `with` it does not.
        return handlers[before] == handlers[now]

    return [opcode in CHECKED for opcode in opcodes], delivers


def interrupted(
    at: int, call: Callable[[], object], folders: Sequence[str] = OURS, kind: type[Interrupter] = Interrupter
) -> str:
    """Where the call was interrupted; empty if it got through."""
    interrupter = kind(at, folders)
    with warnings.catch_warnings():
        # Struck between the opening of a file or a directory and `with`, it closes itself as the stack unwinds.
        warnings.filterwarnings("ignore", "unclosed (file|scandir iterator)", ResourceWarning)
        sys.settrace(interrupter.trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            interrupter.forget()
    return interrupter.where


def everywhere(
    prepare: Callable[[int], Callable[[], object]],
    check: Callable[[int, str], None],
    every: int = 1,
    share: Share = IN_PART,
    folders: Sequence[str] = OURS,
    kind: type[Interrupter] = Interrupter,
) -> int:
    """Interrupt at one of every so many places of prepare(n)() until it gets through; how many places there are.

    A campaign does it at each of them, and once its time is over at a few of what is left.
    """
    set_aside()  # of checks that collect garbage there are thousands
    at, struck, deadline = 1, 0, time.monotonic() + share.seconds
    while at < POINTS_MAX:
        call = prepare(at)
        where = interrupted(at, call, folders, kind)
        check(at, where)
        if not where:
            share.counts.append(f"interrupted at {struck} of {at - 1} places")
            return at - 1
        struck += 1
        at += share.every(every) if time.monotonic() < deadline else FEW
    raise AssertionError(f"more than {POINTS_MAX} places: is it a loop?")
