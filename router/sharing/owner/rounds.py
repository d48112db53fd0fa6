"""Does what clients ask, a round at a time.

A round takes what all sockets hold: the sends and acks of each store are queued together, waited for with one sync, and
answered; the next round gathers meanwhile. So processes share group commits as threads do. What may wait for something
else than the disk (a store that is to be opened, room, another transaction, a message) runs on a thread of the library
and holds up no other client.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ....adapters.core import Store
from ....adapters.system.background import CoalescedJob, shared
from ....adapters.system.conditions import Thread
from ....policies.errors import OutOfDescriptorsError
from ...router import Router
from .. import protocol
from .answers import Answers
from .calls import CALLS, Called
from .loop import Loop
from .reading import Hand, Reads
from .session import Session
from .writing import Begun, Gathered, Writes

log: logging.Logger = logging.getLogger(__name__)

SLOW_SECONDS: Final = 0.5
"""A round that takes longer is left to its thread."""

Asked = tuple[Session, int, protocol.Request | Hand]
"""A client's request, or what is to be handed to one that waits, and the request's number."""


class Rounds:
    """Does what is asked. On the serving thread, if not said otherwise."""

    def __init__(
        self,
        router: Router,
        loop: Loop,
        go_on: Callable[[], None],
        run_rest: Callable[[list[Asked]], None],
        watch: Callable[[Session], None],
    ) -> None:
        """`go_on` lets another thread serve, which does the rest of a round by `run_rest`, and goes on reading of a
        session by `watch`."""
        self._loop, self._go_on, self._run_rest, self._watch = loop, go_on, run_rest, watch
        self.answers: Final = Answers()
        self._writes = writes = Writes(router, self.answers)
        self._reads = reads = Reads(router._registry, self.answers, writes, loop.at, self._ask)
        self.ops: dict[type[protocol.Request | Hand], Callable[[Session, int, Any], None]] = {
            protocol.Body: self._given,
            protocol.SendMany: writes.send_many,
            protocol.Receive: reads.receive,
            protocol.ReceivePattern: reads.receive_pattern,
            Hand: reads.hand,
            protocol.Listen: reads.listen,
            protocol.Credit: reads.credit,
            protocol.Unlisten: reads.unlisten,
            protocol.Settle: writes.settle,
            protocol.Commit: writes.commit,
            protocol.Call: self._call,
            protocol.Cancel: reads.cancel,
            protocol.Unfit: self._refuse,
        }
        self.changing: set[tuple[Session, int]] = set()
        """Long calls that are under way, and change something."""
        self.turn: int = 0
        """Rises when another thread goes on with serving, since this one is held up."""
        self._busy_since: float | None = None
        """When the round began that is under way (monotonic)."""
        self._asked = deque[Asked]()
        """What that round has yet to begin."""
        self._held_up: list[Session] = []
        """Whose, if another thread goes on meanwhile."""
        self._holding = threading.Lock()
        """Guards it, and the end of a round: another thread goes on while one is under way, or never."""
        self._look = CoalescedJob(self._look_after)

    def run(self, requests: list[Asked]) -> None:
        """Do what was asked for: writes first, all together; then what looks."""
        turn, rest = self.turn, list[Asked]()
        writes = self._writes
        begun = writes.begun = deque()  # its own: another thread may go on with the next round meanwhile
        asked, held_up = self._asked, self._held_up = deque(requests), list[Session]()
        self._busy_since = time.monotonic()
        if self._look.last.begun:
            self._look.schedule(SLOW_SECONDS)
        gathered, acks = Gathered(), list[Asked]()
        for one in requests:
            session, number, request = one
            try:
                if session.is_closed:
                    pass
                elif type(request) is protocol.Send:
                    writes.send(session, number, request, gathered, begun)
                elif type(request) is protocol.Ack:
                    acks.append(one)
                else:
                    rest.append(one)
            except Exception as error:
                self.answers.refuse(session, number, error)
        writes.begin(gathered, begun)
        for session, number, request in acks:  # behind the sends, one of which may be what came of it
            try:
                writes.ack(session, number, request, gathered, begun)  # type: ignore[arg-type]
            except Exception as error:
                self.answers.refuse(session, number, error)
        if acks:
            writes.begin_acks(gathered, begun)
        asked.clear()
        with self._holding:  # else somebody may just be looking
            for session in held_up:
                session.is_held_up = False
                self._loop.later(partial(self._watch, session))
        writes.finish(begun)
        for at, (session, number, request) in enumerate(rest):
            if self.turn != turn:  # others were not to wait for this
                self._loop.later(partial(self._run_rest, rest[at:]))
                return
            try:
                self.ops[type(request)](session, number, request)
            except Exception as error:
                self.answers.refuse(session, number, error)
        with self._holding:
            if self.turn == turn:
                self._busy_since = None

    def _look_after(self) -> None:
        """Let another thread serve if a round takes long: its own goes on waiting for its stores. On a thread of the
        library."""
        with self._holding:
            since = self._busy_since
            if since is None or self._loop.closing:
                return
            left = since + SLOW_SECONDS - time.monotonic()
            if left <= 0:
                slow, begun = self._writes.waited_for, self._writes.begun
                self._busy_since = None
                self.turn += 1
                for session, *_ in list(self._asked):  # what it asks for later comes behind
                    session.is_held_up = True
                    self._held_up.append(session)
        if left > 0:
            self._look.schedule(left)
            return
        log.warning(
            "%s has not answered for %.1f s; its clients alone wait for it",
            f"store {slow.name!r}" if slow is not None else "a store", SLOW_SECONDS,
        )  # fmt: skip
        if slow is not None:
            self._writes.slow.add(slow)
        self.answers.flush(leader=0)
        left_over: dict[Store, deque[Begun]] = {}
        with suppress(IndexError):  # the other thread may take some meanwhile
            while True:
                one = begun.popleft()
                left_over.setdefault(one[-1], deque()).append(one)
        for some in left_over.values():
            shared().lead(partial(self._writes.finish, some))
        self._go_on()

    def _ask(self, session: Session, number: int, request: Hand) -> None:
        """Have something done in a round of its own. Any thread."""
        self._loop.later(partial(self._run_rest, [(session, number, request)]))

    def _call(self, session: Session, number: int, request: protocol.Call) -> None:
        called = CALLS.get(request.name)
        if called is None:
            raise protocol.ProtocolError(f"a request that is none: there is no call {request.name!r}")
        run = called.with_(session, request.given)
        if called.look is not None and self._reads.look(session, number, called.look, *run.args[1:]):
            return
        begin = partial(self._begin_call, session, number, request, called, run)
        if called.is_page:
            session.make_page(begin)
        else:
            begin()

    def _begin_call(
        self, session: Session, number: int, request: protocol.Call, called: Called, run: Callable[[], Any]
    ) -> None:  # fmt: skip
        done = session.page_made if called.is_page else None
        if called.is_long:
            try:
                session.begin_long(number)
            except ValueError as error:
                self.answers.refuse(session, number, error)
                if done is not None:
                    done()
                return
            if request.changes:
                self.changing.add((session, number))

            def ended() -> None:
                self.changing.discard((session, number))
                if done is not None:
                    done()

            Thread(partial(session.run_long, number, run, ended), "share-call").start()
        else:
            self.answers.work(session, number, run, done)

    def _given(self, session: Session, number: int, request: protocol.Body) -> None:
        if request.body not in session.given:
            raise OutOfDescriptorsError(
                "the owner of the directory can open no more files (`ulimit -n`): send fewer large bodies at once"
            )
        self.answers.answer(session, number, None)

    def _refuse(self, session: Session, number: int, request: protocol.Unfit) -> None:
        raise TypeError(request.reason)
