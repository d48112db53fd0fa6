"""A shared directory from asyncio: all of it, cancelled anywhere, over owners that die, forks and several loops."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import aio
from anabranch.policies.errors import (
    ClosedError,
    ConfigError,
    OutcomeUnknownError,
    StoreFailedError,
    TransactionError,
    UnknownMessageError,
)
from anabranch.router.sharing.client import heartbeat
from anabranch.router.transactions.xid import Xid

from ..contract.children import forked, reaped
from .loops import LOOPS, each
from .striking import PATIENCE, Striking, owners

striking = pytest.fixture(owners)
loop = pytest.fixture(each, params=LOOPS, autouse=True)
Test = Callable[[aio.AsyncRouter], Coroutine[Any, Any, None]]


def run(striking: Striking, test: Test) -> None:
    """Run a test with a router, and look that nothing of it is left."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE * 3), aio.open(striking.source) as router:
            await test(router)

    asyncio.run(main(), debug=False)


async def take(queue: aio.AsyncQueue[Any] | aio.AsyncSubscriber[Any]) -> aio.AsyncMessage[Any]:
    """Receive a message, which is there or comes."""
    message = await queue.receive(PATIENCE)
    assert message is not None
    return message


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not await is_so():
            await asyncio.sleep(0.005)


async def free(queue: aio.AsyncQueue[Any], ready: int) -> None:
    """Wait until nothing is leased, and so much is ready."""

    async def is_free() -> bool:
        counts = await queue.counts()
        return (counts.ready, counts.leased) == (ready, 0)

    await until(is_free)


def test_groups(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send(b"1", group="g")
        await queue.send_many([anabranch.Outgoing(b"2", group="g"), b"x"])
        first, other = await take(queue), await take(queue)
        assert (first.body, first.group, other.body, other.group) == (b"1", "g", b"x", None)
        waiting = asyncio.create_task(take(queue))
        await asyncio.sleep(0)
        await first.ack()
        assert (await waiting).body == b"2"

    run(striking, test)


def test_queues(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        assert (await queue.send(b"1", {"a": 1}, "one")).seq == 1
        assert (await queue.send(b"1", {"a": 1}, "one")).duplicate
        assert [one.seq for one in await queue.send_many([b"2", b"3", b"4"])] == [2, 3, 4]
        found = await queue.find("one")
        assert found is not None and found.body == b"1" and not found.leased
        assert [one.body async for one in queue.browse()] == [b"1", b"2", b"3", b"4"]
        assert [one.body async for one in queue.browse(1, after=found)] == [b"2"]
        message = await take(queue)
        assert (message.body, message.headers, message.destination.name) == (b"1", {"a": 1}, "q")
        await message.extend(60)
        await message.ack()
        with pytest.raises(UnknownMessageError):
            await message.ack()
        message = await take(queue)
        await message.release(reason="later")
        two, three = await queue.receive_many(2)
        assert [one.body async for one in queue.browse(leased=False)] == [b"4"]
        assert not await queue.wait_empty(0.01) and await router.queue("none").wait_empty()
        assert (two.body, two.deliveries, two.redelivered, three.body) == (b"2", 2, True, b"3")
        await router.ack([two, three])
        assert (await queue.counts()).ready == await queue.depth() == 1
        async for message in queue:
            async with message:
                assert message.body == b"4"
            break
        assert await queue.receive() is None
        assert await queue.receive_many(3, 0.01) == []
        assert [one async for one in queue.consume(0.01)] == []
        await queue.send(b"5")
        with pytest.raises(ValueError, match="oh"):
            async with await take(queue):
                raise ValueError("oh")
        message = await take(queue)
        assert message.deliveries == 2
        await router.settle(message.token, anabranch.Settlement.ACK)
        await queue.send(b"6")
        assert await queue.purge() == 1
        assert await router.exists(queue) and await queue.delete() == 0 and not await router.destinations()

    run(striking, test)


def test_topics_maps_patterns_and_transactions(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        topic, queue, found = router.topic("t"), router.queue("q", codec="json"), router.map("m", codec="json")
        subscriber = await topic.subscribe("s")
        await topic.send(b"news")
        async with router.transaction() as transaction:
            message = await take(subscriber)
            await transaction.ack(message)
            await transaction.send(queue, {"a": 1})
            await transaction.put(found, "k", [1])
        assert (transaction.state, len(transaction.receipts)) == ("committed", 2)
        assert await found.get("k") == [1] and await found.wait("k") == [1]
        assert await found.put_if_absent("k", 2) is False and await found.compare_and_set("k", [1], 3)
        assert await found.touch("k", 1e6) and await found.get_many(["k", "none"]) == {"k": 3}
        assert await found.wait("k", 0.01, "same", unless=3) == "same"
        waiting = asyncio.ensure_future(router.map("w").wait("k", unless=b"1"))
        await router.map("w").put("k", b"1")
        async with router.transaction() as transaction:
            await transaction.put("w", "k", b"2")
            assert await transaction.remove_range("w", before="k") == 0
        assert await waiting == b"2" and await router.map("w").delete() == 1
        await router.map("n").increment("n", 5)
        assert [one async for one in found.items()] == [("k", 3)] and await found.pop("k") == 3
        with pytest.raises(ValueError, match="no"):
            async with router.transaction() as transaction:
                await transaction.send(queue, {"a": 2})
                raise ValueError("no")
        assert transaction.state == "rolled back"
        message = await router.receive(">", PATIENCE, codec="json")  # type: ignore[assignment]
        assert message.body == {"a": 1}
        await message.ack()
        assert await router.receive(">", 0.01) is None
        prepared = await router.transaction(Xid(1, "a", "b"))
        await prepared.send(queue, 7)
        await prepared.prepare()
        assert await router.recover() == [prepared.xid]
        await router.commit(prepared.xid)
        message = await take(queue)
        assert message.body == 7
        await message.reject("bad")
        await queue.send(8)
        async with router.transaction() as transaction:
            await transaction.reject(await take(queue), "bad")
        assert await queue.depth() == 0
        await queue.send_many([1, 2])
        newest = await queue.receive(newest=True)
        assert newest is not None and newest.body == 2 and await queue.purge() == 1
        await newest.ack()
        held = await queue.send_leased(3, message_id="held", lease=PATIENCE)
        assert held is not None and held.body == 3 and await queue.receive() is None
        assert await queue.send_leased(4, message_id="held") is None
        await held.ack()
        assert [one.subscription.name for one in await topic.subscriptions()] == ["s"]
        assert await subscriber.unsubscribe() == 0
        assert (await router.stats()).stores

    run(striking, test)


def test_errors_are_those_of_the_blocking_calls(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        with pytest.raises(TypeError, match="a message body is bytes"):
            await router.queue("q").send("text")
        with pytest.raises(ValueError, match="limit"):
            [one async for one in router.queue("q").browse(-1)]
        with pytest.raises(TypeError, match="timeout is a number"):
            await router.queue("q").receive("1")  # type: ignore[arg-type]
        message = await router.queue("q").receive(0.001)
        assert message is None

    run(striking, test)
    with pytest.raises(ConfigError, match="takes shared directories alone"):
        aio.open(striking.directory, shared=False)


def test_no_await_makes_a_thread(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        before = threading.active_count()
        await asyncio.gather(*(queue.send(b"x") for _ in range(500)))
        waiting = [asyncio.ensure_future(take(queue)) for _ in range(600)]
        for _ in range(100):
            await queue.send(b"x")
        messages = await asyncio.gather(*waiting)
        await asyncio.gather(*(one.ack() for one in messages))
        assert threading.active_count() <= before

    run(striking, test)


def test_a_call_without_await_is_refused(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        await router.queue("q").send(b"x")
        message = await take(router.queue("q"))
        with pytest.raises(RuntimeError, match="without `await`"):
            message._of.ack()
        with pytest.raises(RuntimeError, match="without `await`"):
            await asyncio.to_thread(message._of.ack)
        with pytest.raises(AttributeError, match=r"let a task await ack\(\)"):
            message.ack_nowait()
        await message.ack()

    run(striking, test)


@pytest.mark.filterwarnings("ignore:coroutine 'Transaction.send' was never awaited:RuntimeWarning")
def test_a_transaction_in_which_an_await_is_missing_is_not_committed(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        for end in (lambda tx: asyncio.sleep(0), lambda tx: tx.commit(), lambda tx: tx.vote()):
            with pytest.raises(TransactionError, match=r"Transaction\.send was called without `await`"):
                async with router.transaction() as transaction:
                    await transaction.send("q", b"1")
                    transaction.send("q", b"2")  # type: ignore[unused-coroutine]
                    await end(transaction)
            assert transaction.state == "rolled back"
        async with router.transaction() as transaction:
            await asyncio.gather(transaction.send("q", b"1"), transaction.send("q", b"2"))
        assert await router.queue("q").depth() == 2

    run(striking, test)
    gc.collect()


def test_what_is_not_begun_yet_says_how(striking: Striking) -> None:
    router = aio.open(striking.source)
    with pytest.raises(ClosedError, match=r"AsyncRouter, not open>: use it with `async with"):
        router.queue("q")
    for call in (router.stats, router.close):
        with pytest.raises(ClosedError, match="await that first"):
            asyncio.run(call())
    with pytest.raises(AttributeError, match="'AsyncRouter' object has no attribute 'que'"):
        router.que  # noqa: B018

    async def test(router: aio.AsyncRouter) -> None:
        with pytest.raises(TransactionError, match="not begun: use `async with"):
            await router.transaction().send("q", b"1")

    run(striking, test)


def test_each_loop_has_a_router_of_its_own(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="belongs to the event loop"):
                await router.queue("q").send(b"x")
            with pytest.raises(RuntimeError, match="belongs to the event loop"):
                await router.close()
            async with aio.open(striking.source) as other:
                await other.queue("q").send(b"theirs")

        sent = [asyncio.to_thread(asyncio.run, elsewhere()) for _ in range(3)]
        await asyncio.gather(*sent)
        assert await router.queue("q").depth() == 3

    run(striking, test)


def test_a_forked_child_is_told(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send(b"x")
        message = await take(queue)
        waiting = asyncio.ensure_future(queue.receive(None))
        await asyncio.sleep(0.05)

        def child() -> list[str] | None:
            wrong: list[str] = []

            async def there() -> None:
                try:
                    await queue.send(b"y")
                    wrong.append("it sent")
                except RuntimeError as error:
                    if "belongs to the event loop" not in str(error):
                        wrong.append(str(error))
                async with aio.open(striking.source) as own:
                    await own.queue("child").send(b"z")

            vars(asyncio.events)["_set_running_loop"](None)
            asyncio.run(there())
            return wrong

        assert await asyncio.to_thread(lambda: reaped(forked(child))) == 0
        await message.ack()
        await queue.send(b"2")
        second = await waiting
        assert second is not None
        await second.ack()
        assert await router.queue("child").depth() == 1

    run(striking, test)


def test_what_waits_when_it_is_closed_raises(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send(b"held")
        await take(queue)
        waiting = [asyncio.ensure_future(queue.receive(None)) for _ in range(20)]
        sending = [asyncio.ensure_future(queue.send(b"x")) for _ in range(20)]
        waiting.append(asyncio.ensure_future(router.map("m").wait("k")))
        await asyncio.sleep(0)
        await router.close()
        for one in waiting[:-1]:
            with suppress(ClosedError):
                message = await one
                assert message is not None  # it came first
        with pytest.raises(ClosedError):
            await waiting[-1]
        assert len(await asyncio.gather(*sending)) == 20
        with pytest.raises(ClosedError):
            await queue.send(b"y")
        await router.close()
        async with aio.open(striking.source) as other:
            await free(other.queue("q"), 21)

    with pytest.warns(ResourceWarning):
        run(striking, test)
        gc.collect()


def test_a_loop_that_ends_without_closing_leaves_nothing(striking: Striking) -> None:
    async def main() -> aio.AsyncRouter:
        router = await aio.open(striking.source)
        await router.queue("q").send(b"x")
        task = asyncio.ensure_future(router.queue("none").receive(None))
        await asyncio.sleep(0.01)
        task.cancel()
        return router

    router = asyncio.run(main())
    asyncio.run(router.close())
    with striking.client() as other:
        assert other.queue("q").depth() == 1


def test_a_router_closes_whose_loop_was_closed_with_calls_that_wait(
    striking: Striking, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    loop, router = asyncio.events.new_event_loop(), aio.open(striking.source)
    calls: list[asyncio.Future[Any]] = []

    async def main() -> None:
        await router._opened()
        queue = router.queue("q")
        await queue.send_many([b"1", b"2", b"3"])
        messages = await queue.receive_many(3)
        striking.stop()
        for call in (router.queue("p").depth(), *(queue.receive() for _ in range(2)), *(one.ack() for one in messages)):
            calls.append(asyncio.ensure_future(call))
            calls[-1]._log_destroy_pending = False  # type: ignore[attr-defined]
        while router._connection.is_asked or not router._connection._unanswered:
            await asyncio.sleep(0)

    loop.run_until_complete(main())
    loop.close()
    asyncio.run(router.close())
    assert not router._connection._unanswered and not any(one.done() for one in calls)
    assert not [one for one in caplog.records if one.name.startswith("anabranch")]


def test_what_is_cancelled_takes_effect_all_the_same(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")

        async def cancelled(call: Coroutine[Any, Any, Any]) -> None:
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0)
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        for _ in range(50):
            await cancelled(queue.send(b"x"))
        await until(lambda: _is(queue.depth(), 50))
        for one in await queue.receive_many(20):
            await cancelled(one.ack())
        await free(queue, 30)
        for one in await queue.receive_many(20):
            await cancelled(one.release())
        await free(queue, 30)
        transaction = await router.transaction()
        await transaction.ack(await take(queue))
        await transaction.send("other", b"y")
        await cancelled(transaction.commit())
        await until(lambda: _is(router.queue("other").depth(), 1))
        await free(queue, 29)

    run(striking, test)


def test_a_look_that_is_cancelled_goes_on_where_it_was(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue, held = router.queue("q"), router.map("m")
        await queue.send_many([b"%d" % number for number in range(5)])
        for number in range(5):
            await held.put(str(number), b"%d" % number)
        looks: list[tuple[Any, Callable[[Any], bytes]]] = [
            (queue.browse(), lambda one: bytes(one.body)), (held.items(), lambda one: bytes(one[1]))
        ]  # fmt: skip
        for look, body in looks:
            found = []
            for _ in range(3):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        found.append(body(await anext(look)))
            found += [body(one) async for one in look]
            assert found == [b"0", b"1", b"2", b"3", b"4"]

    run(striking, test)


def test_what_is_leased_ahead_goes_back_once_nobody_iterates(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send_many([b"%d" % number for number in range(5)])
        async for message in queue.consume(prefetch=2):
            assert (message.body, (await queue.counts()).leased) == (b"0", 3)
            await message.ack()
            break
        await free(queue, 4)
        found = []
        async for message in queue.consume(0.01, prefetch=2):
            async with message:
                found.append((message.body, message.deliveries))
        assert found == [(b"%d" % number, 1) for number in range(1, 5)]
        coming: Any = anext(queue.consume(prefetch=5))
        waiting = asyncio.ensure_future(coming)
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        await queue.send(b"5")
        await free(queue, 1)
        for wrong in (-1, 1.5):
            with pytest.raises((TypeError, ValueError)):
                queue.consume(prefetch=wrong)  # type: ignore[arg-type]

    run(striking, test)


def test_two_tasks_at_one_transaction_are_told(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        transaction = await router.transaction()
        await transaction.send("queue://q", b"x")
        first, second = await asyncio.gather(transaction.commit(), transaction.rollback(), return_exceptions=True)
        assert isinstance(first, list) and transaction.state == "committed"
        assert isinstance(second, RuntimeError) and "a second task of an event loop" in str(second)

    run(striking, test)


def test_what_waits_at_the_owner_ends_with_a_cancel(striking: Striking) -> None:
    """None of its threads waits on."""

    async def test(router: aio.AsyncRouter) -> None:
        await router.map("m").put("other", b"1")
        status = Path(f"/proc/{striking.owners[-1].pid}/task")
        before = len(list(status.iterdir()))
        for _ in range(3):
            calls = [router.map("m").wait("k") for _ in range(20)] + [router.receive(">", None) for _ in range(20)]
            waiting = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0.05)
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)
        await until(lambda: _is(asyncio.to_thread(lambda: len(list(status.iterdir())) <= before + 8), True))

    run(striking, test)


async def _is(call: Awaitable[Any], value: Any) -> bool:
    return bool(await call == value)


class Cancelling:
    """Receivers and senders that are cancelled at any moment of their calls, by chance."""

    def __init__(self, router: aio.AsyncRouter, seed: int) -> None:
        self.router, self.queue, self.chance = router, router.queue("q"), random.Random(seed)
        self.tasks: set[asyncio.Task[None]] = set()
        self.acks: list[asyncio.Future[None]] = []
        """Those of what was got, which nobody cancels."""
        self.cancelled = self.sent = 0
        self.got: Counter[bytes] = Counter()
        self.known: set[bytes] = set()
        """The bodies whose sends returned."""

    async def receive(self) -> None:
        match self.chance.randrange(4):
            case 0:
                messages = await self.queue.receive_many(3, None)
            case 1:
                messages = [m for m in [await self.router.receive(">", 0.01)] if m is not None]
            case 2:
                messages = [m for m in [await self.queue.receive(0)] if m is not None]
            case _:
                messages = [await take(self.queue)]
        self.got.update(message.body for message in messages)
        self.acks += [asyncio.ensure_future(message.ack()) for message in messages]

    async def send(self) -> None:
        self.sent += 1
        body = b"%d" % self.sent
        if self.chance.random() < 0.7:
            await self.queue.send(body)
        else:
            with suppress(OutcomeUnknownError):  # another has received it from the next owner
                message = await self.queue.send_leased(body)
                assert message is not None
                self.got[body] += 1
                self.acks.append(asyncio.ensure_future(message.ack()))
        self.known.add(body)

    async def run(self, cancels: int) -> None:
        """Cancel so many."""
        while self.cancelled < cancels:
            while len(self.tasks) < 60:
                call = self.send() if self.chance.random() < 0.2 else self.receive()
                self.tasks.add(asyncio.ensure_future(call))
            await asyncio.sleep(0 if self.chance.random() < 0.7 else self.chance.random() * 0.002)
            for victim in self.chance.sample(list(self.tasks), self.chance.randrange(1, 30)):
                self.cancelled += victim.cancel()
            self._reap()
        for one in self.tasks:
            one.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        self._reap()

    def _reap(self) -> None:
        for one in [one for one in self.tasks if one.done()]:
            self.tasks.discard(one)
            if not one.cancelled() and one.exception() is not None:
                raise one.exception()  # type: ignore[misc]

    async def finish(self) -> None:
        """Receive what is left, and look that each was got once, and none is leased to nobody."""

        async def is_free() -> bool:
            return (await self.queue.counts()).leased == 0

        await asyncio.gather(*self.acks)
        await until(is_free)
        while (message := await self.queue.receive(0)) is not None:
            self.got[message.body] += 1
            await message.ack()
        await free(self.queue, 0)
        assert self.known <= self.got.keys()


@pytest.mark.parametrize("seed", range(2))
def test_cancels_by_chance(striking: Striking, seed: int) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        cancelling = Cancelling(router, seed)
        await cancelling.run(int(os.environ.get("CANCELS", "1000")))
        await cancelling.finish()
        assert set(cancelling.got.values()) == {1}  # each is got once
        assert len(cancelling.got) == cancelling.sent  # and each that was begun to be sent is there

    run(striking, test)


@pytest.mark.parametrize("loop", ["asyncio"], indirect=True)  # it takes long, and what dies knows nothing of loops
def test_cancels_by_chance_over_owners_that_die(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        cancelling = Cancelling(router, 3)

        async def kill() -> None:
            for _ in range(6):
                await asyncio.sleep(0.3)
                await asyncio.to_thread(striking.kill)
                await router.queue("other").depth()

        killing = asyncio.ensure_future(kill())
        while not killing.done():
            await cancelling.run(cancelling.cancelled + 100)
        await killing
        await cancelling.finish()
        assert set(cancelling.got.values()) == {1}
        assert len(cancelling.got) == cancelling.sent

    run(striking, test)


def test_awaits_go_on_with_the_next_owner(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        held = [queue.send(b"%d" % n) for n in range(200)]
        await asyncio.gather(*held)
        messages = await queue.receive_many(100)
        waiting = asyncio.ensure_future(router.queue("late").receive(None))
        sending = [asyncio.ensure_future(queue.send(b"x%d" % n)) for n in range(500)]
        await asyncio.sleep(0)
        striking.kill()
        assert len({one.seq for one in await asyncio.gather(*sending)}) == 500
        await asyncio.gather(*(one.ack() for one in messages))
        await router.queue("late").send(b"late")
        message = await waiting
        assert message is not None
        await message.ack()
        await free(queue, 600)

    run(striking, test)


def test_another_owner_is_found_while_all_threads_of_the_loop_wait_for_it(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        loop, queue = asyncio.get_running_loop(), router.queue("q")
        loop.set_default_executor(ThreadPoolExecutor(1))
        await queue.declare()
        receiving = asyncio.run_coroutine_threadsafe(queue.receive(None), loop)
        waiting = asyncio.ensure_future(asyncio.to_thread(receiving.result, PATIENCE))
        await asyncio.sleep(0)
        striking.kill()
        await queue.send(b"x")
        message = await waiting
        assert message is not None
        await message.ack()

    run(striking, test)


def test_an_owner_that_is_stopped(striking: Striking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.4)

    async def test(router: aio.AsyncRouter) -> None:
        queue = router.queue("q")
        await queue.send(b"1")
        pid = striking.stop()
        waiting = asyncio.ensure_future(queue.receive(None))
        await asyncio.sleep(0)
        with pytest.raises(OutcomeUnknownError, match=str(pid)):
            await queue.send(b"2")
        with pytest.raises(StoreFailedError, match=str(pid)):
            await waiting
        with pytest.raises(StoreFailedError, match="Nothing was done"):
            await queue.depth()
        os.kill(pid, signal.SIGCONT)

        async def is_back() -> bool:
            with suppress(StoreFailedError):
                counts = await queue.counts()
                return (counts.ready, counts.leased) == (2, 0)
            return False

        await until(is_back)
        idle = asyncio.ensure_future(router.queue("idle").receive(1.5))
        assert await idle is None  # whoever waits long hears that the owner lives

    run(striking, test)


def test_a_call_that_is_not_made_twice_says_so(striking: Striking) -> None:
    async def test(router: aio.AsyncRouter) -> None:
        numbers = router.map("m")
        await numbers.increment("n")
        striking.stop()
        call = asyncio.ensure_future(numbers.increment("n"))
        await asyncio.sleep(0.05)
        striking.kill()
        with pytest.raises(OutcomeUnknownError):
            await call

    run(striking, test)


def test_without_greenlet_it_is_said_what_to_install() -> None:
    code = "import sys; sys.modules['greenlet'] = None\nimport anabranch.aio"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'anabranch[aio]'" in done.stderr
