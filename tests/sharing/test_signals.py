"""A signal handler that uses a shared router, wherever it has struck its own thread in a call of that (rule G3)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import anabranch
from anabranch.policies.errors import ClosedError
from anabranch.router.sharing.protocol import Receive

from ..contract.disk import eventually
from ..crash.interrupts import Interrupter, everywhere
from ..shares import Share
from ..taking import take
from .striking import PATIENCE, Striking, owners

striking = pytest.fixture(owners)


class Struck(Interrupter):
    """Gets a signal, whose handler returns."""

    def strike(self) -> None:
        signal.raise_signal(signal.SIGUSR1)


@contextmanager
def handling(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Let the signal's handler call; yields what each call returned or raised."""
    ends: list[Any] = []

    def handler(*_: object) -> None:
        try:
            ends.append(call())
        except Exception as error:
            ends.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield ends
    finally:
        signal.signal(signal.SIGUSR1, before)


def strike(router: Any) -> None:
    """Send the signal once a receive of queue `q` waits: on a busy machine it may take a while to get so far."""

    def waits() -> bool:
        connection = router._store.connection
        waiting = [one for one in list(connection._unanswered.values()) if isinstance(one.request, Receive)]
        return not connection._link.sends and any(
            one.is_sent and one.request.destination == "queue://q" for one in waiting
        )

    eventually(waits)
    os.kill(os.getpid(), signal.SIGUSR1)


def refused(ends: list[Any]) -> int:
    """Return how many calls of the handler were refused. No other error may have come."""
    wrong = [one for one in ends if isinstance(one, Exception)]
    assert all(type(one) is RuntimeError and "signal handler" in str(one) for one in wrong), wrong
    return len(wrong)


def receive(router: anabranch.Router, at: int) -> None:
    with take(router.queue("stock"), PATIENCE) as message:
        message.release(delivered=False)


CALLS: dict[str, tuple[Callable[[anabranch.Router, int], Any], int]] = {
    "send": (lambda router, at: router.queue("q").send(b"%d" % at), 3),
    "send_nowait": (lambda router, at: router.queue("q").send_nowait(b"%d" % at).result(PATIENCE), 3),
    "receive": (receive, 7),
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_handler_sends_and_receives(striking: Striking, name: str, beside: bool, share: Share) -> None:
    """While another thread waits at the same connection, or none. What the handler calls is done, or was refused and
    has done nothing; and so is what it has struck."""
    call, every = CALLS[name]
    with striking.client() as router:
        router.queue("stock").send_many([b"1", b"2"])
        router.queue("end").declare()
        if beside:
            waiting = threading.Thread(target=lambda: take(router.queue("end"), PATIENCE).ack())
            waiting.start()
        numbers = iter(range(1 << 30))

        def in_handler() -> int:
            number = next(numbers)
            router.queue("handled").send(b"%d" % number)
            message = router.queue("stock").receive()
            if message is not None:
                message.release(delivered=False)
            return number

        began = Counter[int]()

        def prepare(at: int) -> Callable[[], object]:
            began[at] += 1
            return lambda: call(router, at)

        with handling(in_handler) as ends:
            count = everywhere(prepare, lambda at, where: None, every=every, share=share, kind=Struck)
        assert count > 30
        done = [one for one in ends if isinstance(one, int)]
        handled = [int(message.body) for message in router.queue("handled").browse()]
        # A handler's second call may be refused where its first was done.
        assert set(done) <= set(handled) and len(handled) == len(set(handled))
        assert refused(ends) < len(ends) / 2, "most places bear it"
        if name != "receive":
            assert [int(message.body) for message in router.queue("q").browse()] == sorted(began)
        assert [message.body for message in router.queue("stock").receive_many(9)] == [b"1", b"2"]
        if beside:
            router.queue("end").send(b"x")
            waiting.join(PATIENCE)
            assert not waiting.is_alive()
        assert len(striking.owners) == 1


@pytest.mark.parametrize("beside", [False, True])
def test_a_handler_works_while_its_thread_waits_for_a_message(striking: Striking, beside: bool) -> None:
    """The thread that it has struck goes on at once: what it waits for may have come to the handler."""
    with striking.client() as router:
        queue = router.queue("q")
        if beside:
            waiting = threading.Thread(target=lambda: take(router.queue("end"), PATIENCE).ack())
            waiting.start()
            time.sleep(0.1)

        def in_handler() -> Any:
            router.queue("other").send(b"o")
            take(router.queue("other"), PATIENCE).ack()
            return queue.send(b"x").seq

        for _ in range(20):
            with handling(in_handler) as ends:
                timer = threading.Timer(0.02, strike, (router,))
                timer.start()
                message = queue.receive(PATIENCE)
                returned = time.monotonic()
                timer.join()
            assert message is not None and message.body == b"x"
            assert ends == [message.seq]
            message.ack()
            assert time.monotonic() - returned < 1
        if beside:
            router.queue("end").send(b"x")
            waiting.join(PATIENCE)


def test_a_handler_may_close_a_router_whose_receive_it_has_struck(striking: Striking) -> None:
    with striking.client() as router:
        timer = threading.Timer(0.1, strike, (router,))
        with handling(router.close) as ends:
            timer.start()
            with pytest.raises(ClosedError):
                router.queue("q").receive(PATIENCE)
            timer.join()
        assert ends == [None]


def test_a_handler_may_not_close_a_router_in_another_call(striking: Striking, share: Share) -> None:
    with striking.client() as router:
        with handling(router.close) as ends:
            everywhere(
                lambda at: lambda: router.queue("q").send(b"x"),
                lambda at, where: None,
                every=9,
                share=share,
                kind=Struck,
            )
        assert len(ends) > 5 and refused(ends) == len(ends)
