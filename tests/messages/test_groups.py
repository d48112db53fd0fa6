"""Message groups, as a router's users send and receive them; dead letters, moves and killed processes."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.router.offline.repartition import repartition

from ..children import CONTEXT
from ..contract.disk import PATIENCE, eventually
from ..sharing.workers import owner_of
from ..taking import drained
from .stores import config


def all_there(queue: anabranch.Queue) -> list[anabranch.Message]:
    return list(iter(queue.receive, None))


def test_all_ways_to_send(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        queue, typed = router.queue("q"), router.queue("q", codec="json")
        queue.send(b"1", group="g")
        queue.send(b"2", {"n": 2, "message_group": "g"})
        queue.send(b"3", {"n": 3}, group="g", priority=7, persistent=False)
        queue.send_nowait(b"4", group="g").result(PATIENCE)
        queue.send_many([anabranch.Outgoing(b"5", group="g"), anabranch.Outgoing(b"6", {"n": 6}, group="g")])
        typed.send(7, group="g")
        typed.send_many([anabranch.Outgoing(8, group="g")])
        with router.transaction() as tx:
            tx.send(queue, b"9", group="g")
            tx.send("topic://t,queue://q", b"10", group="g")
        router.send("queue://q", b"11", group="g")
        with (tmp_path / "film").open("wb+") as film:
            film.write(bytes(2 << 20))
            film.seek(0)
            queue.send(film, group="g")
        queue.send(b"free")
        assert {message.group for message in queue.browse()} == {"g", None}
        assert queue.counts()[:3] == (13, 0, 0)
        first, free = all_there(queue)
        assert (first.body, free.body, first.group, free.group) == (b"1", b"free", "g", None)
        free.ack()
        first.ack()
        for number in range(2, 12):
            (message,) = all_there(queue)
            assert (message.body, message.group) == (b"%d" % number, "g")
            message.ack()
        (large,) = all_there(queue)
        assert (large.size, large.group) == (2 << 20, "g")


@pytest.mark.parametrize("group", [3, b"g", "", "x" * 1025])
def test_what_is_no_group_is_refused(tmp_path: Path, group: Any) -> None:
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("q")
        for send in (queue.send, queue.send_nowait):
            with pytest.raises((TypeError, ValueError), match="group"):
                send(b"x", group=group)
        with router.transaction() as tx, pytest.raises((TypeError, ValueError), match="group"):
            tx.send(queue, b"x", group=group)
        assert not router.exists("q") or queue.depth() == 0


def test_a_pattern_has_the_next_one(tmp_path: Path) -> None:
    """Also one that waits for it."""
    with anabranch.open(config(tmp_path)) as router:
        for name in ("tasks.a", "tasks.b"):
            router.queue(name).send_many([anabranch.Outgoing(b"%d" % n, group="g") for n in range(3)])
        held = [router.receive("tasks.>", timeout=PATIENCE) for _ in range(2)]
        assert router.receive("tasks.>", timeout=0) is None
        for number in (1, 2):
            for message in held:
                assert message is not None
                message.ack()
            held = [router.receive("tasks.>", timeout=PATIENCE) for _ in range(2)]
            assert [message.body for message in held if message is not None] == [b"%d" % number] * 2


def test_a_group_goes_on_where_one_is_rejected_and_comes_back(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, dead_letter="dlq", max_deliveries=1)) as router:
        queue, dead = router.queue("q"), router.queue("dlq")
        queue.send_many([anabranch.Outgoing(b"%d" % n, {"n": n}, group="g") for n in range(5)])
        for _ in range(2):
            (message,) = all_there(queue)
            message.reject("no")
        (message,) = all_there(queue)
        message.release()
        assert drained(queue) == [b"3", b"4"]
        eventually(lambda: router.sweep() or dead.depth() == 3)
        assert [message.group for message in dead.browse()] == ["g"] * 3
        (letter,) = all_there(dead)
        assert letter.body == b"0"
        letter.release(delivered=False)
        assert router.requeue("dlq") == 3
        (message,) = all_there(queue)
        assert (message.body, message.group, message.headers["n"]) == (b"0", "g", 0)
        message.ack()
        assert drained(queue) == [b"1", b"2"]


@pytest.mark.parametrize("live", [True, False], ids=["live", "closed"])
def test_groups_go_along_with_their_queue(tmp_path: Path, live: bool) -> None:
    sent = [anabranch.Outgoing(b"%d" % n, group=f"g{n % 2}") for n in range(6)]
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("q")
        queue.send_many(sent)
        if live:
            first, second = queue.receive_many(10)
            router.repartition(config(tmp_path, "two"))
            assert queue.receive() is None
            first.ack()
            (third,) = all_there(queue)
            assert third.body == b"2"
            second.release()
            third.release()
            assert drained(queue) == [b"1", b"2", b"3", b"4", b"5"]
            return
    repartition(config(tmp_path, "two"))
    with anabranch.open(config(tmp_path, "two")) as router:
        assert [message.body for message in all_there(router.queue("q"))] == [b"0", b"1"]


KEYS, EACH, WORKERS = 4, 150, 4


def work(directory: Path, kind: str, shared: bool, seed: int) -> None:
    """Receive and settle until there is nothing, with a line in the book before and behind each."""
    dice, me = random.Random(seed), os.getpid()
    book = os.open(directory / "book", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with anabranch.open(of_kind(directory, kind), shared=shared) as router:
        queue = router.queue("q")
        while queue.depth():
            for message in queue.receive_many(dice.choice((1, 4)), timeout=0.2):
                with suppress(anabranch.AnabranchError):
                    line = f"{message.group} {message.body.decode()} {me}\n"
                    os.write(book, f"begin {line}".encode())
                    time.sleep(dice.random() * 0.003)  # so that one who is killed often holds some
                    if dice.random() < 0.2:
                        os.write(book, f"end {line}".encode())
                        message.release()
                    else:
                        os.write(book, f"done {line}".encode())
                        message.ack()


def of_kind(directory: Path, kind: str) -> anabranch.Config:
    options: dict[str, object] = {kind: {"journal": anabranch.JournalOptions, "sql": anabranch.SqlOptions}[kind]()}
    return anabranch.Config(directory / "data", [anabranch.StoreConfig("all", [">"], **options)])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["journal", "sql"])
@pytest.mark.parametrize("shared", [True, False], ids=["clients", "owner"])
def test_whoever_is_killed_a_group_comes_in_order_one_by_one(tmp_path: Path, kind: str, shared: bool) -> None:
    """Several clients and their owner, or one process after the other."""
    with anabranch.open(of_kind(tmp_path, kind), shared=shared) as router:
        router.queue("q").send_many(
            [anabranch.Outgoing(b"%d" % n, group=f"g{key}") for n in range(EACH) for key in range(KEYS)]
        )
    dice, killed, seed = random.Random(1), set[int](), 0
    workers: list[BaseProcess] = []
    for _ in range(12):
        while len(workers) < (WORKERS if shared else 1):
            seed += 1
            workers.append(CONTEXT.Process(target=work, args=(tmp_path, kind, shared, seed)))
            workers[-1].start()
        time.sleep(0.1 + dice.random() * 0.1)
        if shared and dice.random() < 0.3:
            owner = owner_of(tmp_path / "data")
            if owner is not None:
                with suppress(ProcessLookupError):
                    os.kill(owner, signal.SIGKILL)
            continue
        worker = workers.pop(dice.randrange(len(workers)))
        if worker.is_alive():
            assert worker.pid is not None
            killed.add(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
        worker.join(PATIENCE)
    for worker in workers:
        worker.join(PATIENCE)
        assert worker.exitcode == 0
    work(tmp_path, kind, shared, 0)
    assert_in_order((tmp_path / "book").read_text(), killed)


def assert_in_order(book: str, killed: set[int]) -> None:
    """In the book nobody begins with a message of a group that somebody living has in hand, and none is passed."""
    held: dict[str, tuple[int, int]] = {}
    done: dict[str, int] = {}
    gone = set[int]()
    for what, group, number, pid in re.findall(r"^(\w+) (\w+) (\d+) (\d+)$", book, re.MULTILINE):
        n, who = int(number), int(pid)
        assert who not in gone, f"{who} had been killed"
        if what != "begin":
            assert held.pop(group) == (n, who)
            if what == "done":
                done[group] = n
            continue
        if group in held:
            _, before = held[group]
            assert before in killed, f"{before} has {group} in hand, and {who} begins with {n}"
            gone.add(before)
        last = done.get(group, -1)
        assert n == last + 1 or (n == last and killed), f"{n} of {group} comes behind {last}"
        held[group] = n, who
    assert done == {f"g{key}": EACH - 1 for key in range(KEYS)}
