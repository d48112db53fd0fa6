"""Forks of clients, and clients whose threads share a connection and are interrupted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.policies.errors import ClosedError, UnknownMessageError

from ..contract.children import forked, reaped
from ..contract.disk import Parallel, eventually
from ..crash.interrupts import everywhere
from ..shares import Share
from ..taking import take
from .striking import PATIENCE, Striking, owners

striking = pytest.fixture(owners)


def in_child(run: Callable[[], list[str] | None]) -> None:
    """Run it in a forked child, which must have nothing to complain about."""
    assert reaped(forked(run)) == 0


def test_a_child_that_closes_the_router_takes_nothing_of_its_parents(striking: Striking) -> None:
    """The owner still takes the parent for a client that lives, whose leases wait where its connection is lost."""
    with striking.client() as router:
        router.queue("q").send(b"1")
        message = take(router.queue("q"))

        def child() -> None:
            router.close()
            with pytest.raises(ClosedError):
                router.queue("q").send(b"2")

        in_child(child)
        assert len(list((striking.directory / "clients").iterdir())) == 1
        message.ack()


def test_a_child_is_a_client_of_its_own(striking: Striking) -> None:
    """It holds nothing, and what its parent holds stays the parent's, also once the child has ended."""
    with striking.client() as router:
        queue = router.queue("q")
        queue.send_many([b"1", b"2", b"3"])
        message = take(queue)

        def child() -> list[str] | None:
            wrong = []
            try:
                message.ack()
                wrong.append("it acked its parent's message")
            except UnknownMessageError:
                pass
            second = take(queue)
            if second.body != b"2":
                wrong.append(f"it received {second.body!r}")
            queue.send(b"4")
            second.ack()
            held = take(queue)
            if held.body != b"3":
                wrong.append(f"it received {held.body!r}")
            return wrong  # and ends with it in hand

        in_child(child)
        message.ack()
        deadline = time.monotonic() + PATIENCE
        while queue.counts().ready < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert [message.body for message in queue.receive_many(9)] == [b"3", b"4"]


def test_a_child_that_asks_for_nothing_takes_nothing_from_its_parent(striking: Striking) -> None:
    """Nor does one that ends with all that Python does at its end."""
    with striking.client() as router:
        message = _held(router)
        process = multiprocessing.get_context("fork").Process(target=len, args=([],))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
        in_child(lambda: router.close())
        with striking.client() as other:
            assert other.queue("q").receive() is None
        message.ack()
        assert router.queue("q").depth() == 0


def _held(router: anabranch.Router) -> anabranch.Message[bytes]:
    router.queue("q").send(b"1")
    return take(router.queue("q"))


def test_a_parent_may_die_before_its_children(striking: Striking) -> None:
    """What it held is free then: a child has the files of its client no more."""
    striking.grace = PATIENCE
    with striking.client() as router:
        router.queue("q").send(b"1")
        reading, writing = os.pipe()

        def parent() -> list[str] | None:
            with anabranch.open(striking.source, shared=True) as mine:
                take(mine.queue("q"))
                if not os.fork():
                    time.sleep(PATIENCE)
                    os._exit(0)
                os.write(writing, b"x")
                os.kill(os.getpid(), 9)
            return None

        pid = forked(parent)
        assert os.read(reading, 1) == b"x"
        assert reaped(pid) == -9
        take(router.queue("q"), PATIENCE / 2)  # at once, and not as if the dead client lived
        os.close(reading)
        os.close(writing)


def test_a_parent_that_opens_before_it_forks(striking: Striking) -> None:
    """As a server does that loads its application first: each worker sends, receives and listens as its own client."""
    with striking.client() as router:
        queue = router.queue("q")
        queue.send(b"0")

        def worker(number: int) -> list[str] | None:
            taken = threading.Semaphore(0)
            with anabranch.open(striking.source, shared=True) as own:
                listener = own.queue(f"own{number}").listen(partial(_acked, taken))
                for n in range(20):
                    queue.send(b"%d.%d" % (number, n))
                    router.queue(f"own{number}").send(b"x")
                    assert taken.acquire(timeout=PATIENCE)
                    listener.add_credit(1)
            return None

        pids = [forked(lambda number=number: worker(number)) for number in range(4)]  # type: ignore[misc]
        assert [reaped(pid) for pid in pids] == [0] * 4
        bodies = [message.body for message in queue.browse()]
        assert sorted(bodies) == sorted([b"0", *(b"%d.%d" % (one, n) for one in range(4) for n in range(20))])
        for one in range(4):
            assert [body for body in bodies if body.startswith(b"%d." % one)] == [
                b"%d.%d" % (one, n) for n in range(20)
            ]


def _acked(taken: threading.Semaphore, message: anabranch.Message[bytes]) -> None:
    message.ack()
    taken.release()


def test_a_process_that_was_spawned_opens_as_any(striking: Striking) -> None:
    with striking.client() as router:
        process = multiprocessing.get_context("spawn").Process(target=_send_there, args=(striking.source, b"x"))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert [message.body for message in router.queue("q").browse()] == [b"x"]


def _send_there(source: Any, body: bytes) -> None:
    with anabranch.open(source, shared=True) as router:
        router.queue("q").send(body)


def test_a_child_that_is_forked_while_other_threads_work(striking: Striking) -> None:
    """Whatever lock they have."""
    with striking.client() as router:
        over = threading.Event()

        def work() -> None:
            queue = router.queue("work")
            while not over.is_set():
                queue.send_nowait(b"x").result(PATIENCE)
                queue.send(b"x")
                take(queue).ack()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for one in threads:
            one.start()
        try:
            for n in range(20):
                in_child(lambda n=n: router.queue("q").send(b"%d" % n) and None)  # type: ignore[misc]
        finally:
            over.set()
            for one in threads:
                one.join(PATIENCE)
        assert sorted(message.body for message in router.queue("q").browse()) == sorted(b"%d" % n for n in range(20))


def test_threads_of_a_child_may_come_at_once(striking: Striking) -> None:
    """The first of them connects, and the others wait for that."""
    with striking.client() as router:

        def child() -> list[str] | None:
            threads = [threading.Thread(target=router.queue("q").send, args=(b"%d" % n,)) for n in range(8)]
            for one in threads:
                one.start()
            for one in threads:
                one.join(PATIENCE)
            return None

        for _ in range(5):
            in_child(child)
        assert sorted(message.body for message in router.queue("q").browse()) == sorted(
            b"%d" % n for n in range(8) for _ in range(5)
        )


def test_workers_of_gunicorn_do_each_job_once(striking: Striking) -> None:
    """Its master has loaded the application, and opened the directory. Who has just done a job is killed, four times;
    what it holds by then is another's."""
    jobs, kills = 400, 4
    with striking.client() as router, socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        router.queue("jobs").send_many([b"%d" % n for n in range(jobs)])
        done = router.queue("done")
        words = ["--preload", "--workers", "4", "--bind", f"fd://{listening.fileno()}", "tests.sharing.web:app"]
        master = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", *words], cwd=Path(__file__).parents[2], pass_fds=[listening.fileno()],
            env=os.environ | {"ANABRANCH_DIRECTORY": os.fspath(striking.directory)},
        )  # fmt: skip
        stack.callback(master.wait, PATIENCE)
        stack.callback(master.terminate)

        def request() -> None:
            while done.depth() < jobs:
                connection = HTTPConnection("127.0.0.1", listening.getsockname()[1], timeout=PATIENCE)
                with closing(connection), suppress(ConnectionError):  # its worker was killed
                    connection.request("POST", "/")
                    assert connection.getresponse().status == 204

        requests = [threading.Thread(target=request) for _ in range(4)]
        for one in requests:
            one.start()
        for number in range(kills):
            eventually(lambda number=number: done.depth() >= (number + 1) * 80)  # type: ignore[misc]
            os.kill(int([message.body for message in done.browse()][-1].split()[1]), signal.SIGKILL)
        for one in requests:
            one.join(PATIENCE)
        found = [message.body.split() for message in done.browse()]
        assert sorted(int(job) for job, _ in found) == list(range(jobs))
        assert len({worker for _, worker in found}) > kills and router.queue("jobs").depth() == 0


def test_a_client_says_nothing_at_the_end_of_its_process(striking: Striking) -> None:
    """With all warnings shown: whether it closed its router or not."""
    with striking.client():
        program = "import anabranch, sys; r = anabranch.open(sys.argv[1], shared=True); r.queue('q').send(b'x')"
        for end in ("", "; r.close()", "; r.queue('q').send_nowait(b'x').result()"):
            told = subprocess.run(
                [sys.executable, "-X", "dev", "-W", "always", "-c", program + end, striking.directory],
                capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
            assert (told.returncode, told.stderr) == (0, "")


# Ctrl-C


def _interrupted(striking: Striking, share: Share, call: Callable[[anabranch.Router, int], object], every: int) -> int:
    """Interrupt a call everywhere, while another thread uses the connection; nothing hangs, is lost or held."""
    with striking.client() as router:
        router.queue("other").send(b"x")

        def prepare(at: int) -> Callable[[], object]:
            return lambda: call(router, at)

        def check(at: int, where: str) -> None:
            done = threading.Thread(target=lambda: router.queue("other").depth())
            done.start()
            done.join(PATIENCE)
            assert not done.is_alive(), f"struck at {where}, others hang"
            assert router.queue("other").depth() == 1

        return everywhere(prepare, check, every=every, share=share)


def test_a_send_is_interrupted(striking: Striking, share: Share) -> None:
    sent: set[int] = set()

    def send(router: anabranch.Router, at: int) -> None:
        router.queue("q").send(b"%d" % at)
        sent.add(at)

    _interrupted(striking, share, send, every=5)
    with striking.client() as router:
        bodies = [int(message.body) for message in router.queue("q").browse()]
        assert len(bodies) == len(set(bodies)) and sent <= set(bodies)


def test_a_receive_is_interrupted(striking: Striking, share: Share) -> None:
    """What it was given, and nobody got, is free again."""
    with striking.client() as other:
        queue = other.queue("q")
        queue.send(b"x")

        def receive(router: anabranch.Router, at: int) -> None:
            message = take(router.queue("q"), PATIENCE)
            message.release(delivered=False)

        _interrupted(striking, share, receive, every=11)
        take(queue, PATIENCE).ack()
        assert queue.depth() == 0


def test_a_receive_that_waits_is_interrupted_and_takes_nothing_then(striking: Striking) -> None:
    """A thread of the library raises it in the main thread, as a signal does."""
    with striking.client() as router, striking.client() as other:
        asked = router._store.connection._unanswered  # type: ignore[attr-defined]

        def strike() -> None:
            eventually(lambda: asked)
            os.kill(os.getpid(), signal.SIGINT)

        for _ in range(5):
            with pytest.raises(KeyboardInterrupt), Parallel(strike):
                router.queue("q").receive(PATIENCE)
        other.queue("q").send(b"x")
        message = take(other.queue("q"))
        assert message.deliveries == 1
        message.ack()


def _all(queue: anabranch.Queue[bytes]) -> list[int]:
    """Return all messages of a queue, none of which anybody may hold for long."""
    taken: list[anabranch.Message[bytes]] = []
    deadline = time.monotonic() + PATIENCE
    while len(taken) < queue.depth() and time.monotonic() < deadline:
        taken.append(take(queue, PATIENCE))
    return [int(message.body) for message in taken]


def test_an_ack_is_interrupted(striking: Striking, share: Share) -> None:
    with striking.client() as other:
        queue = other.queue("q")
        acked: set[int] = set()

        def ack(router: anabranch.Router, at: int) -> None:
            queue.send(b"%d" % at)
            message = take(router.queue("q"), PATIENCE)
            message.ack()
            acked.add(int(message.body))

        _interrupted(striking, share, ack, every=23)
        left = _all(queue)
        assert len(left) == len(set(left)) and not acked & set(left)


def test_a_commit_is_interrupted(striking: Striking, share: Share) -> None:
    with striking.client() as other:
        queue = other.queue("q")
        committed: set[int] = set()

        def commit(router: anabranch.Router, at: int) -> None:
            queue.send(b"%d" % at)
            message = take(router.queue("q"), PATIENCE)
            with router.transaction() as transaction:
                transaction.ack(message)
                transaction.send("done", message.body)
            committed.add(int(message.body))

        _interrupted(striking, share, commit, every=47)
        left = _all(queue)
        done = [int(message.body) for message in other.queue("done").browse()]
        assert len(done) == len(set(done)) and len(left) == len(set(left)) and not set(done) & set(left)
        assert committed <= set(done)
