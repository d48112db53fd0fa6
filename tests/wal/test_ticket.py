"""What goes into the log together, and what becomes of it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from anabranch.adapters.wal import Ticket
from anabranch.policies.errors import StoreFailedError

PATIENCE = 60.0


def test_done_well_or_not() -> None:
    well, badly = Ticket(b"1", 1), Ticket(b"2", 1)
    error = StoreFailedError("the disk")
    well.finish(None)
    badly.finish(error)
    assert (well.done, well.error, badly.done, badly.error) == (True, None, True, error)
    badly.finish(None)  # of who makes up for an interrupted thread
    assert badly.error is error


def test_who_waits_is_woken_by_the_end() -> None:
    ticket = Ticket(b"1", 1)
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        while not ticket.done:
            ticket.wait(PATIENCE)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait(PATIENCE)
    ticket.finish(None)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_who_comes_late_does_not_wait() -> None:
    ticket = Ticket(b"1", 1)
    ticket.finish(None)
    ticket.wait(PATIENCE)
    ticket.wake()
    ticket.wake()
    ticket.wait(PATIENCE)


def test_its_future_has_the_result_or_the_error() -> None:
    for error in (None, StoreFailedError("the disk")):
        ticket = Ticket(b"1", 1)
        future: Future[Any] = Future()
        ticket.outcomes = [7]
        ticket.future = (future, lambda done: done.outcomes[0])
        ticket.finish(error)
        ticket.finish(error)  # said twice it is resolved once
        if error is None:
            assert future.result(PATIENCE) == 7
        else:
            with pytest.raises(StoreFailedError, match="the disk"):
                future.result(PATIENCE)


def test_what_it_held_is_let_go_of() -> None:
    gone = threading.Event()

    class Held:
        def __del__(self) -> None:
            gone.set()

    ticket = Ticket(b"1", 1)
    ticket.held = Held()
    assert not gone.is_set()
    ticket.finish(None)
    assert gone.is_set()
