"""Senders and receivers of every sort, each of which knows what it must see: for moves of what they use meanwhile.

    with Traffic(router) as traffic:
        ...                                   # anything that they shall not notice
    assert traffic.wrong() == []

Each sender numbers what it sends. A receiver that acks in order must have seen 0, 1, 2 ..., each once; one that gives
some back, each once.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import anabranch

QUEUES: Final = ("plain", "nowait", "held", "tx", "out", "listen", "released", "tokens", "stays")
END_SECONDS: Final = 60.0
AHEAD: Final = 300
"""Messages that a sender may be ahead of who receives them."""


class Traffic:
    """Threads that send and receive until it ends, and what they have seen."""

    def __init__(self, router: anabranch.Router, pause: float = 0.0002, prefix: str = "") -> None:
        self.router, self._pause, self._prefix = router, pause, prefix
        self.sent: dict[str, int] = dict.fromkeys((*QUEUES, "topic"), 0)
        self.seen: dict[str, list[int]] = {name: [] for name in (*QUEUES, "first", "second")}
        self.errors: list[str] = []
        self.longest: dict[str, float] = dict.fromkeys(self.sent, 0.0)
        """Seconds that the slowest send took."""
        self._sending, self._receiving = threading.Event(), threading.Event()
        self._senders: list[threading.Thread] = []
        self._receivers: list[threading.Thread] = []
        self._chance = random.Random(1)

    def __enter__(self) -> Self:
        topic = self.router.topic(self._prefix + "topic")
        self._subscribers = {name: topic.subscribe(name) for name in ("first", "second")}
        for name in ("plain", "held", "listen", "released", "tokens", "stays"):
            self._start(self._senders, partial(self._send, name))
        self._start(self._senders, self._send_nowait)
        self._start(self._senders, self._send_in_transactions)
        self._start(self._senders, self._send_to_topic)
        for name in ("plain", "stays", "out"):
            self._start(self._receivers, partial(self._receive, name))
        for each in (self._receive_nowait, self._hold, self._pass_on, self._release, self._settle):
            self._start(self._receivers, each)
        for name in self._subscribers:
            self._start(self._receivers, partial(self._receive_for, name))
        self._listener = self.queue("listen").listen(self._on_message, credit=5, on_end=self._on_end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sending.set()
        for thread in self._senders:
            thread.join(END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while self._left() and not self.errors and time.monotonic() < deadline:
            time.sleep(0.01)
        self._receiving.set()
        for thread in self._receivers:
            thread.join(END_SECONDS)
        self._listener.close()
        self.errors += [f"{t.name} hangs" for t in (*self._senders, *self._receivers) if t.is_alive()]

    def wrong(self) -> list[str]:
        """What should not be."""
        found = list(self.errors)
        for name, numbers in self.seen.items():
            count = self.sent["topic" if name in self._subscribers else "tx" if name == "out" else name]
            ordered = sorted(numbers) if name == "released" else numbers
            if ordered != list(range(count)):
                at = next((i for i, (a, b) in enumerate(zip(ordered, range(count), strict=False)) if a != b), None)
                at = min(len(ordered), count) if at is None else at
                found.append(f"{name}: {count} sent, {len(numbers)} seen; at {at}: {ordered[max(0, at - 2) : at + 6]}")
        return found

    def queue(self, name: str) -> anabranch.Queue:
        return self.router.queue(self._prefix + name)

    def _left(self) -> int:
        names = [name for name in QUEUES if name not in ("out", "tx")]
        left = sum(self.sent[name] - len(self.seen[name]) for name in names)
        left += sum(self.sent["topic"] - len(self.seen[name]) for name in self._subscribers)
        return left + self.sent["tx"] - len(self.seen["out"])

    def _start(self, threads: list[threading.Thread], work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(
                    f"{thread.name}: {type(error).__name__}: {error}" + __import__("traceback").format_exc()
                )

        thread = threading.Thread(target=run, name=f"traffic {len(threads)}, {work}", daemon=True)
        threads.append(thread)
        thread.start()

    # Senders

    def _waits(self, name: str, *seen: str) -> bool:
        """Whether it is to go on, once there is not too much that nobody has seen."""
        while not self._sending.is_set() and self.sent[name] - min(len(self.seen[one]) for one in seen) > AHEAD:
            time.sleep(0.005)
        return not self._sending.is_set()

    def _timed(self, name: str, send: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        done = send()
        self.longest[name] = max(self.longest[name], time.monotonic() - begun)
        return done

    def _send(self, name: str) -> None:
        queue = self.queue(name)
        for number in itertools.count():
            if not self._waits(name, name):
                return
            body, identity = b"%d" % number, f"{name}-{number}" if number % 3 == 0 else None
            self._timed(name, partial(queue.send, body, {"n": 1}, identity))
            self.sent[name] += 1
            time.sleep(self._pause)

    def _send_nowait(self) -> None:
        queue, futures = self.queue("nowait"), deque[Future[anabranch.Receipt]]()
        for number in itertools.count():
            if not self._waits("nowait", "nowait"):
                break
            futures.append(queue.send_nowait(b"%d" % number))
            self.sent["nowait"] += 1
            if len(futures) > 20:
                futures.popleft().result(END_SECONDS)
            time.sleep(self._pause)
        for future in futures:
            future.result(END_SECONDS)

    def _send_in_transactions(self) -> None:
        number = 0
        while self._waits("tx", "out"):
            with self.router.transaction() as transaction:
                for at in range(3):
                    transaction.send(self._prefix + "tx", b"%d" % (number + at))
                    time.sleep(self._pause)
            self.sent["tx"] += 3
            self.seen["tx"] += range(number, number + 3)
            number += 3

    def _send_to_topic(self) -> None:
        topic = self.router.topic(self._prefix + "topic")
        for number in itertools.count():
            if not self._waits("topic", "first", "second"):
                return
            self._timed("topic", partial(topic.send, b"%d" % number))
            self.sent["topic"] += 1
            time.sleep(self._pause)

    # Receivers

    def _receive(self, name: str) -> None:
        queue = self.queue(name)
        while not self._receiving.is_set():
            message = queue.receive(timeout=0.05)
            if message is not None:
                message.ack()
                self.seen[name].append(int(message.body))

    def _receive_for(self, name: str) -> None:
        subscriber = self._subscribers[name]
        while not self._receiving.is_set():
            message = subscriber.receive(timeout=0.05)
            if message is not None:
                time.sleep(self._pause / 2)
                message.ack()
                self.seen[name].append(int(message.body))

    def _receive_nowait(self) -> None:
        queue = self.queue("nowait")
        while not self._receiving.is_set():
            message = queue.receive()
            if message is None:
                time.sleep(0.001)
                continue
            message.ack_nowait().result(END_SECONDS)
            self.seen["nowait"].append(int(message.body))

    def _hold(self) -> None:
        """Many in hand at once, over a move too."""
        queue = self.queue("held")
        while not self._receiving.is_set():
            held = [message for _ in range(20) if (message := queue.receive(timeout=0.02)) is not None]
            time.sleep(0.005)
            self.router.ack(held)
            self.seen["held"] += [int(message.body) for message in held]

    def _pass_on(self) -> None:
        """From one queue to another, in transactions; every other one is rolled back first."""
        queue = self.queue("tx")
        for turn in itertools.count():
            if self._receiving.is_set():
                return
            message = queue.receive(timeout=0.05)
            if message is None:
                continue
            transaction = self.router.transaction()
            transaction.ack(message)
            transaction.send(self._prefix + "out", message.body)
            if turn % 7 == 0:
                time.sleep(0.01)
            if turn % 5 == 0:
                transaction.rollback()
            else:
                transaction.commit()

    def _release(self) -> None:
        queue = self.queue("released")
        while not self._receiving.is_set():
            message = queue.receive(timeout=0.05)
            if message is not None and self._chance.random() < 0.3:
                time.sleep(0.001)
                message.release()
            elif message is not None:
                message.ack()
                self.seen["released"].append(int(message.body))

    def _settle(self) -> None:
        queue = self.queue("tokens")
        while not self._receiving.is_set():
            message = queue.receive(timeout=0.05)
            if message is None:
                continue
            number, token = int(message.body), message.token
            del message
            time.sleep(self._pause)
            self.router.settle(token, anabranch.Settlement.ACK)
            self.seen["tokens"].append(number)

    def _on_message(self, message: anabranch.Message) -> None:
        message.ack()
        self.seen["listen"].append(int(message.body))
        self._listener.add_credit(1)

    def _on_end(self, error: Exception) -> None:
        self.errors.append(f"the listener has ended: {error}")
