"""What tasks of one turn of a loop ask for together: it is one request, and each hears what is its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

import pytest

from anabranch import aio
from anabranch.policies.errors import ClosedError, OutcomeUnknownError, UnknownMessageError
from anabranch.router.api.consumer import Consumer
from anabranch.router.sharing.client import heartbeat

from .loops import LOOPS, each
from .striking import PATIENCE, Striking, owners
from .test_aio import free, run

striking = pytest.fixture(owners)
loop = pytest.fixture(each, params=LOOPS, autouse=True)


async def together(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Make calls in one turn of the loop; return what has come of each."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def bodies(*calls: Coroutine[Any, Any, aio.AsyncMessage[Any] | None]) -> list[bytes | None]:
    found = await asyncio.gather(*calls)
    await together(*(one.ack() for one in found if one is not None))
    return [None if one is None else one.body for one in found]


def test_few_requests_bring_many(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue, other = router.queue("q"), router.queue("other")
        sent = [b"%d" % n for n in range(100)]
        await queue.send_many(sent)
        await other.send(b"x")
        first = next(router._connection._numbers)
        calls = [queue.receive(0 if n % 2 else PATIENCE) for n in range(100)]
        assert await bodies(other.receive(), *calls, other.receive(), queue.receive()) == [b"x", *sent, None, None]
        assert next(router._connection._numbers) - first < 10
        await free(queue, 0)

    run(striking, test)


def test_who_finds_nothing_waits_by_himself(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        assert await bodies(*(queue.receive() for _ in range(5))) == [None] * 5
        assert await bodies(*(queue.receive(0.01) for _ in range(5))) == [None] * 5
        await queue.send(b"1")
        waiting = [asyncio.ensure_future(queue.receive(PATIENCE)) for _ in range(3)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await queue.send_many([b"2", b"3"])
        assert await bodies(*waiting) == [b"1", b"2", b"3"]  # type: ignore[arg-type]

    run(striking, test)


def test_one_that_cannot_be_acked_is_told_alone(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send_many([b"%d" % n for n in range(6)])
        messages = await queue.receive_many(6)
        await messages[5].ack()
        given_back = messages[3]
        other = await anext(queue.browse())
        results = await together(
            *(one.ack() for one in messages), given_back.release(), messages[1].ack(), other.ack()
        )  # fmt: skip
        wrong = [type(one) for one in results]
        done, gone = type(None), UnknownMessageError
        assert wrong[:3] + wrong[4:6] == [done, done, done, done, gone]
        assert sorted([wrong[3], wrong[6]], key=str) == sorted([done, gone], key=str)  # one of the two came first
        assert wrong[7:] == [gone, gone]
        assert repr(messages[1]._of) in str(results[7])
        await free(queue, int(wrong[3] is gone))

    run(striking, test)


def test_an_ack_that_is_cancelled_takes_effect_all_the_same(striking: Striking) -> None:
    """Also where those that it is asked with cannot be."""

    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send_many([b"1", b"2", b"3"])
        messages = await queue.receive_many(3)
        await messages[0].ack()
        acks = [asyncio.ensure_future(one.ack()) for one in (messages[1], messages[0], messages[2])]
        await asyncio.sleep(0)
        acks[2].cancel()
        done, gone, cancelled = await together(*acks)  # type: ignore[arg-type]
        assert (done, type(gone), type(cancelled)) == (None, UnknownMessageError, asyncio.CancelledError)
        await free(queue, 0)

    run(striking, test)


@pytest.mark.parametrize("turns", range(4))
def test_a_receive_that_is_cancelled_has_leased_nothing(striking: Striking, turns: int) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send_many([b"%d" % n for n in range(8)])
        calls = [asyncio.ensure_future(queue.receive()) for _ in range(8)]
        await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0.001)
        for one in calls[::2]:
            one.cancel()
        found = await together(*calls)  # type: ignore[arg-type]
        got = [one for one in found if isinstance(one, aio.AsyncMessage)]
        await free_with(queue, len(got))
        assert sorted([one.body for one in got] + await bodies(*(queue.receive() for _ in range(8 - len(got))))) == [
            b"%d" % n for n in range(8)
        ]
        await together(*(one.ack() for one in got))
        await free(queue, 0)

    async def free_with(queue: aio.AsyncQueue[Any], leased: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while (await queue.counts()).leased != leased:
                await asyncio.sleep(0.005)

    run(striking, test)


def test_bad_input_is_told_to_each(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send_many([b"1", b"2"])
        results = await together(
            queue.receive(), queue.receive("1"), queue.receive(lease=-1), queue.receive(lease="x"), queue.receive()  # type: ignore[arg-type]
        )  # fmt: skip
        assert [type(one) for one in results] == [
            aio.AsyncMessage, TypeError, ValueError, TypeError, aio.AsyncMessage
        ]  # fmt: skip
        await router.close()
        assert {type(one) for one in await together(queue.receive(), queue.receive())} == {ClosedError}

    run(striking, test)


def test_who_comes_later_waits_behind_those_who_were_gathered(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.declare()
        waiting = [asyncio.ensure_future(queue.receive(PATIENCE)) for _ in range(3)]
        for _ in range(3):
            for _ in range(2):
                await asyncio.sleep(0)
            waiting.append(asyncio.ensure_future(queue.receive(PATIENCE)))
        async with asyncio.timeout(PATIENCE):
            while router._connection.together.receiving:
                await asyncio.sleep(0.001)
        bodies_sent = [b"%d" % n for n in range(len(waiting))]
        await queue.send_many(bodies_sent)
        assert await bodies(*waiting) == bodies_sent  # type: ignore[arg-type]

    run(striking, test)


def test_what_was_gathered_is_done_before_a_router_closes(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send_many([b"1", b"2"])
        messages = await queue.receive_many(2)
        results = await together(queue.receive(PATIENCE), *(one.ack() for one in messages), router.close())
        assert isinstance(results[0], ClosedError) and results[1:] == [None, None, None]
        async with aio.open(striking.source) as other:
            await free(other.queue("q"), 0)

    run(striking, test)


def test_acks_of_an_owner_that_is_stopped_are_unknown_each(
    striking: Striking, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.4)

    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send_many([b"1", b"2", b"3"])
        messages = await queue.receive_many(3)
        pid = striking.stop()
        results = await together(*(one.ack() for one in messages))
        os.kill(pid, signal.SIGCONT)
        assert [type(one) for one in results] == [OutcomeUnknownError] * 3
        assert len(set(map(id, results))) == 3
        async with asyncio.timeout(PATIENCE):
            while await together(queue.depth()) != [0]:
                await asyncio.sleep(0.005)

    run(striking, test)


def test_an_interrupt_lets_nobody_wait_for_ever(striking: Striking) -> None:
    loop, router = asyncio.events.new_event_loop(), aio.open(striking.source)
    strikes = 1

    def strike(*given: Any, **options: Any) -> Any:
        nonlocal strikes
        if strikes:
            strikes -= 1
            raise KeyboardInterrupt
        return of(*given, **options)

    async def go_on(tasks: list[asyncio.Task[Any]]) -> list[Any]:
        async with asyncio.timeout(PATIENCE):
            return await together(*tasks)  # type: ignore[arg-type]

    loop.run_until_complete(router._opened())
    queue = router.queue("q")
    loop.run_until_complete(queue.send_many([b"1", b"2", b"3"]))
    receives = [loop.create_task(queue.receive()) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patches:
        of: Any = Consumer.receive_many
        patches.setattr(Consumer, "receive_many", strike)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(go_on(receives))
        messages = loop.run_until_complete(go_on(receives))
    assert [one.body for one in messages] == [b"1", b"2", b"3"]
    acks = [loop.create_task(one.ack()) for one in messages]
    of, strikes, router._connection.together.ack_all = router._connection.together.ack_all, 1, strike
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(go_on(acks))
    wrong = loop.run_until_complete(go_on(acks))
    assert [type(one) for one in wrong] == [type(None), OutcomeUnknownError, OutcomeUnknownError]
    loop.run_until_complete(go_on([loop.create_task(one.ack()) for one in messages[1:]]))
    assert loop.run_until_complete(queue.depth()) == 0
    loop.run_until_complete(router.close())
    loop.close()
