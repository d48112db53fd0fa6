"""The answers of an owner: those of the serving thread go together at the end of its step, all others at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ....adapters.system.background import shared
from .session import Session


class Answers:
    """Answers requests. Threads: all. `_lock` guards the frames, and whose they are."""

    def __init__(self) -> None:
        self._leader = 0
        """The serving thread's id."""
        self._lock = threading.Lock()
        self._frames: dict[Session, list[bytes]] = {}
        """Those of the serving thread's step."""

    def answer(self, session: Session, number: int, value: Any) -> None:
        """Answer a request."""
        self.put([(session, session.answering(number, value))])

    def refuse(self, session: Session, number: int, error: Exception) -> None:
        """Answer a request with an error."""
        self.put([(session, session.failing(number, error))])

    def work(
        self, session: Session, number: int, call: Callable[[], Any], done: Callable[[], None] | None = None
    ) -> None:
        """Run a call on a thread of the library, and answer with what it returns. With `done`, which is called then, it
        may return much, and is answered while no other such call is."""
        if done is None:
            shared().lead(partial(self.answer_call, session, number, call))
            return
        future = shared().call(call)
        self.answer_with(session, number, future)
        future.add_done_callback(lambda _: done())

    def answer_with(
        self, session: Session, number: int, future: Future[Any], convert: Callable[[Any], Any] | None = None
    ) -> None:
        """Answer with what a future returns, or with what that is converted into."""
        future.add_done_callback(partial(self._answer_future, session, number, convert))

    def _answer_future(
        self, session: Session, number: int, convert: Callable[[Any], Any] | None, future: Future[Any]
    ) -> None:
        self.answer_call(session, number, future.result if convert is None else lambda: convert(future.result()))

    def answer_call(self, session: Session, number: int, call: Callable[[], Any]) -> None:
        """Answer with what a call returns, or raises."""
        try:
            self.answer(session, number, call())
        except Exception as error:
            self.refuse(session, number, error)

    def put(self, frames: Iterable[tuple[Session, bytes]]) -> None:
        """Take answers to requests."""
        with self._lock:
            if threading.get_ident() == self._leader:
                gathered = self._frames
                for session, frame in frames:
                    if session in gathered:
                        gathered[session].append(frame)
                    else:
                        gathered[session] = [frame]
                return
        for session, frame in frames:
            session.send(frame, 1)

    def flush(self, leader: int | None = None) -> None:
        """Send what was gathered; with a leader, another thread gathers from now on."""
        if leader is None and not self._frames:
            return
        with self._lock:
            frames, self._frames = self._frames, {}
            if leader is not None:
                self._leader = leader
        for session, some in frames.items():
            session.send(b"".join(some), len(some))
