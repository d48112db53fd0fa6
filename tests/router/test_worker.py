"""anabranch.worker: a function is called with each message until the process is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import anabranch
import anabranch.aio
from anabranch import worker
from anabranch.aio import AsyncMessage, AsyncRouter
from anabranch.policies.errors import StoreFailedError, UnknownSubscriptionError

from ..contract.disk import PATIENCE, eventually

PROGRAM = """
import asyncio, logging, os, sys
import anabranch
from anabranch import worker

directory, kind = sys.argv[1:]
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
told = logging.StreamHandler(sys.stdout)
worker.log.setLevel(logging.INFO)
worker.log.addHandler(told)

def say(text):
    os.write(1, f"{text}\\n".encode())  # whole, whoever else says something

def act(body):
    say(f"took {body.decode()}")
    if body == b"bad":
        raise RuntimeError("it cannot be done")

def function(message):
    act(message.body)
    if message.body == b"long":
        sys.stdin.readline()
        say("finished")

async def awaited(message):
    act(message.body)
    if message.body == b"long":
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        say("finished")

async def main():
    async with anabranch.aio.open(directory) as router:
        say("begins")
        await worker.run_async(router.queue("q"), awaited, tasks=3)

if kind == "async":
    import anabranch.aio
    asyncio.run(main())
else:
    with anabranch.open(directory, shared=True) as router:
        say("begins")
        worker.run(router.queue("q"), function, threads=3)
say("ended")
"""


class Working:
    """A process that works."""

    def __init__(self, directory: Path, kind: str) -> None:
        command = [sys.executable, "-c", PROGRAM, str(directory), kind]
        self.process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def wait_for(self, line: str, times: int = 1) -> None:
        eventually(lambda: self.lines.count(line) >= times, lambda: f"no {line!r}: {self.lines}")

    def end(self) -> None:
        """It ends by itself, and says so."""
        assert self.process.wait(PATIENCE) == 0, self.process.stderr.read()
        self._reading.join(PATIENCE)
        assert self.lines[-1] == "ended"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    journal = anabranch.JournalOptions(max_deliveries=2, dead_letter="dead")
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], journal=journal)])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stores.yaml").write_text(
        'directory: .\nstores: [{name: all, match: [">"], journal: {max_deliveries: 2, dead_letter: dead}}]\n'
    )
    with anabranch.open(config) as router:
        router.serve()
        yield router


@contextmanager
def working(router: anabranch.Router, kind: str) -> Iterator[Working]:
    one = Working(router.config.directory, kind)
    try:
        one.wait_for("begins")
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


both = pytest.mark.parametrize("kind", ["threads", "async"])


@both
def test_each_message_is_acked_or_becomes_a_dead_letter(router: anabranch.Router, kind: str) -> None:
    queue = router.queue("q")
    with working(router, kind) as one:
        queue.send_many([b"1", b"bad", b"2"])
        one.wait_for("took 1")
        one.wait_for("took 2")
        one.wait_for("took bad", 2)
        eventually(lambda: router.queue("dead").depth() == 1)
        eventually(lambda: queue.depth() == 0)
        one.process.send_signal(signal.SIGTERM)
        one.end()
        assert "RuntimeError: it cannot be done" in one.process.stderr.read()
    (letter,) = queue.dead_letters()
    assert (letter.reason, letter.error_text) == ("delivery_limit", "it cannot be done")


@both
@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_is_in_hand(router: anabranch.Router, kind: str, which: signal.Signals) -> None:
    queue = router.queue("q")
    with working(router, kind) as one:
        queue.send(b"long")
        one.wait_for("took long")
        one.process.send_signal(which)
        one.wait_for(worker._ENDING)
        queue.send(b"later")
        one.process.stdin.write("\n")
        one.process.stdin.flush()
        one.end()
        assert "finished" in one.lines
        assert "took later" not in one.lines or kind == "async", "one that was just received is in hand"
    assert queue.depth() == 1 - one.lines.count("took later")


@both
def test_a_second_signal_gives_it_back(router: anabranch.Router, kind: str) -> None:
    queue = router.queue("q")
    with working(router, kind) as one:
        queue.send(b"long")
        one.wait_for("took long")
        one.process.send_signal(signal.SIGTERM)
        one.wait_for(worker._ENDING)
        one.process.send_signal(signal.SIGTERM)
        message = queue.receive(timeout=PATIENCE)
        assert message is not None and (message.body, message.deliveries) == (b"long", 1)
        message.ack()


def in_a_loop(
    router: anabranch.Router, then: Callable[[Callable[..., Any], AsyncRouter], Coroutine[Any, Any, None]]
) -> None:
    """Await `then` with what begins a worker of a queue, and its router."""

    async def run() -> None:
        async with asyncio.timeout(PATIENCE), anabranch.aio.open(router.config.directory) as client:
            await then(lambda name, f: asyncio.create_task(worker.run_async(client.queue(name), f)), client)

    asyncio.run(run())


def going_on() -> tuple[Callable[[AsyncMessage[bytes]], Coroutine[Any, Any, None]], asyncio.Event, asyncio.Event]:
    """A function that goes on though it is cancelled, what tells that it has begun, and what ends it."""
    began, ends = asyncio.Event(), asyncio.Event()

    async def function(message: AsyncMessage[bytes]) -> None:
        began.set()
        while not ends.is_set():
            with suppress(asyncio.CancelledError):
                await ends.wait()

    return function, began, ends


def test_a_second_signal_gives_back_what_a_function_holds_that_goes_on_though_cancelled(
    router: anabranch.Router,
) -> None:
    router.queue("q").send(b"1")

    async def then(work: Any, client: AsyncRouter) -> None:
        function, began, ends = going_on()
        working = work("q", function)
        await began.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert not working.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await working
        message = await client.queue("q").receive()
        assert message is not None and (message.body, message.deliveries) == (b"1", 1)
        ends.set()

    in_a_loop(router, then)


def test_a_signal_ends_all_workers_of_an_event_loop(router: anabranch.Router) -> None:
    router.queue("q").send(b"1")

    async def then(work: Any, client: AsyncRouter) -> None:
        began = asyncio.Event()

        async def function(message: AsyncMessage[bytes]) -> None:
            began.set()

        workers = [work("q", function), work("r", function)]
        await began.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.gather(*workers)

    in_a_loop(router, then)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert router.queue("q").depth() == 0


def test_a_function_that_awaits_what_was_cancelled_has_failed_and_others_go_on(router: anabranch.Router) -> None:
    queue = router.queue("q")
    queue.send_many([b"bad", b"good"])

    async def then(work: Any, client: AsyncRouter) -> None:
        done = asyncio.Event()

        async def function(message: AsyncMessage[bytes]) -> None:
            if message.body == b"good":
                done.set()
                return
            other = asyncio.get_running_loop().create_future()
            other.cancel()
            await other

        working = work("q", function)
        await done.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await working

    in_a_loop(router, then)
    eventually(lambda: queue.depth() == 0)
    (letter,) = queue.dead_letters()
    assert (letter.message.body, letter.reason) == (b"bad", "delivery_limit")


def test_a_worker_that_is_cancelled_ends_though_its_function_ignores_it(router: anabranch.Router) -> None:
    queue = router.queue("q")
    queue.send_many([b"1", b"2"])
    worked: list[bytes] = []

    async def then(work: Any, client: AsyncRouter) -> None:
        began = asyncio.Event()

        async def function(message: AsyncMessage[bytes]) -> None:
            worked.append(message.body)
            began.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

        working = work("q", function)
        await began.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    in_a_loop(router, then)
    assert worked == [b"1"]
    assert [message.body for message in queue.browse()] == [b"2"]


def test_a_worker_that_is_cancelled_twice_gives_back_what_goes_on(router: anabranch.Router) -> None:
    router.queue("q").send(b"1")

    async def then(work: Any, client: AsyncRouter) -> None:
        function, began, ends = going_on()
        working = work("q", function)
        await began.wait()
        working.cancel()
        await asyncio.sleep(0.01)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert (await client.queue("q").counts())[:2] == (1, 0)
        ends.set()

    in_a_loop(router, then)


def test_the_end_of_its_subscription_is_raised(router: anabranch.Router) -> None:
    topic = router.topic("t")
    subscriber = topic.subscribe("audit")
    topic.send(b"x")
    ends = threading.Event()

    def function(message: anabranch.Message[bytes]) -> None:
        ends.set()

    def end() -> None:
        assert ends.wait(PATIENCE)
        eventually(lambda: subscriber.depth() == 0)
        subscriber.unsubscribe()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(UnknownSubscriptionError):
        worker.run(subscriber, function)
    ending.join(PATIENCE)


class Ended:
    """A source whose listener gives one message and ends with an error; it gets a signal once it is closed."""

    def __init__(self, message: anabranch.Message[bytes]) -> None:
        self.message, self.was_told = message, threading.Event()

    def listen(
        self, take: Callable[[Any], None], credit: int, on_end: Callable[[Exception], None], lease: object
    ) -> Ended:
        take(self.message)
        on_end(StoreFailedError("it has failed"))
        return self

    def close(self) -> None:
        threading.Thread(target=self._tell).start()

    def _tell(self) -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        self.was_told.set()


def test_the_first_signal_after_the_end_of_a_listener_finishes_what_is_in_hand(router: anabranch.Router) -> None:
    queue = router.queue("q")
    queue.send(b"x")
    message = queue.receive(timeout=PATIENCE)
    assert message is not None
    source: Any = Ended(message)
    with pytest.raises(StoreFailedError, match="it has failed"):
        worker.run(source, lambda message: source.was_told.wait(PATIENCE))
    assert queue.depth() == 0


def test_bad_input(router: anabranch.Router) -> None:
    with pytest.raises(ValueError, match="threads: expected a whole number from 1 on; found 0"):
        worker.run(router.queue("q"), print, threads=0)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run(router.queue("q"), print)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    assert "main thread" in str(errors[0])


def test_a_failure_is_logged_with_id_and_delivery_and_its_traceback_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with anabranch.open(tmp_path / "data") as router:
        queue = router.queue("q")
        queue.send(b"1", message_id="order-1")

        def fail(message: anabranch.Message[bytes]) -> None:
            raise ValueError("no box")

        for number in (1, 2):
            message = queue.receive(timeout=0)
            assert message is not None
            worker._work(message, fail)
            told = caplog.records[-1]
            assert f", message_id 'order-1', was given back after delivery {number}, since" in told.getMessage()
            assert told.getMessage().endswith("ValueError('no box')")
            assert bool(told.exc_info) is (number == 1)
