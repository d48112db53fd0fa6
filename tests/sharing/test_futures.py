"""Futures of a client: a thread reads for them, as long as there are some."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from typing import Any

import pytest

import anabranch
from anabranch.policies.errors import StoreFullError, UnknownMessageError

from ..contract.disk import eventually
from ..taking import take
from .peers import Op
from .striking import PATIENCE, Striking, owners

striking = pytest.fixture(owners)


def send(router: anabranch.Router, count: int = 1) -> list[Future[Any]]:
    return [router.queue("q").send_nowait(b"%d" % n) for n in range(count)]


def test_no_thread_reads_once_nothing_is_under_way(striking: Striking) -> None:
    """A call that waits reads by itself then, and a listener is called by a thread for good."""
    with striking.client() as router:
        connection = router._store.connection  # type: ignore[attr-defined]
        assert [one.result().seq for one in send(router, 20)] == list(range(1, 21))

        def is_idle() -> bool:
            router.queue("other").send(b"wakes the thread, which looks")
            return not connection._is_pumping.is_set()

        eventually(is_idle)
        assert send(router)[0].result(PATIENCE).seq
        eventually(is_idle)
        got = list[bytes]()
        router.queue("listened").listen(lambda message: got.append(message.body))
        router.queue("listened").send(b"x")
        eventually(lambda: got == [b"x"])
        assert connection._is_pumping.is_set()


def test_who_waits_with_a_limit_has_it(striking: Striking) -> None:
    with striking.client() as router:
        pid = striking.stop()
        (future,) = send(router)
        for limit in (0, 0.05):
            with pytest.raises(TimeoutError):
                future.result(limit)
        assert not future.done()
        os.kill(pid, signal.SIGCONT)
        assert future.result(PATIENCE).seq == 1


@pytest.mark.parametrize("when", [ALL_COMPLETED, FIRST_COMPLETED])
def test_all_that_concurrent_futures_has(striking: Striking, when: str) -> None:
    with striking.client() as router:
        done, left = wait(send(router, 10), PATIENCE, when)
        assert done and (when == FIRST_COMPLETED or not left)
        assert len(list(as_completed(send(router, 10), PATIENCE))) == 10
        called = list[Future[Any]]()
        (future,) = send(router)
        future.add_done_callback(called.append)
        eventually(lambda: called == [future])
        future.add_done_callback(called.append)  # at once, now
        assert called == [future] * 2
        assert send(router)[0].result().seq  # beside the thread


def test_what_nobody_waits_for_is_resolved(striking: Striking) -> None:
    with striking.client() as router:
        futures = send(router, 100)
        eventually(lambda: all(one._state == "FINISHED" for one in futures))
        assert not router._store.connection._unanswered  # type: ignore[attr-defined]


def test_what_is_under_way_is_resolved_by_close(striking: Striking) -> None:
    with striking.client() as router:
        futures = send(router, 200)
    assert [one.result(0).seq for one in futures] == list(range(1, 201))


def test_an_error(striking: Striking) -> None:
    striking.configure(anabranch.StoreConfig("all", [">"], journal=anabranch.JournalOptions(max_messages=1)))
    with striking.client() as router:
        stored, refused = send(router, 2)
        assert stored.exception() is None
        with pytest.raises(StoreFullError):
            refused.result()
        assert isinstance(refused.exception(), StoreFullError)


def test_many_threads_wait_for_the_same_and_for_others(striking: Striking) -> None:
    with striking.client() as router, ThreadPoolExecutor(16) as threads:
        for _ in range(50):
            (shared,) = send(router)
            same = [threads.submit(shared.result) for _ in range(4)]
            other = [threads.submit(lambda: send(router)[0].result()) for _ in range(8)]
            assert len({one.result(PATIENCE) for one in same}) == 1
            assert len({one.result(PATIENCE).seq for one in other}) == 8


@pytest.mark.parametrize("moment", ["before", "written", "answered"])
def test_an_owner_that_dies(striking: Striking, moment: str) -> None:
    """Each is sent again, and stored once."""
    with striking.client() as router:
        striking.aim(moment, Op.SEND, at=7)
        assert len({one.result().seq for one in send(router, 20)}) == 20
        striking.died()
        assert [int(take(router.queue("q")).body) for _ in range(20)] == list(range(20))


@pytest.mark.parametrize("how", ["ack_nowait", "release_nowait"])
def test_a_message_that_is_late_leaves_the_others_to_their_holder(striking: Striking, how: str) -> None:
    with striking.client() as router:
        queue = router.queue("q")
        wait(send(router, 2))
        late, message = queue.receive(PATIENCE, lease=0.01), take(queue)
        assert late is not None and late.body == b"0"
        again = take(queue, PATIENCE)
        with pytest.raises(UnknownMessageError, match=r"Message 1 of .* its lease of 0.01 s ran out"):
            getattr(router, how)([late, message]).result(PATIENCE)
        message.ack()
        again.ack()
        assert queue.depth() == 0


def test_messages_are_acked_and_given_back_without_waiting(striking: Striking) -> None:
    with striking.client() as router:
        queue = router.queue("q")
        wait(send(router, 4))
        first, second, third, last = (take(queue) for _ in range(4))
        assert first.ack_nowait().result() is None
        second.ack_nowait()
        eventually(lambda: queue.counts().leased == 2)
        third.release_nowait(delivered=False).result()
        last.ack_nowait()
        assert int(take(queue).body) == 2
        assert queue.counts().leased == 1
