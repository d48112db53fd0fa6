"""Celery's own worker, with its pool of forked processes, beside this process over one directory."""

from __future__ import annotations

import importlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from kombu.exceptions import EncodeError

import anabranch

ROOT = Path(__file__).parents[3]
TASKS = f"{__package__}.tasks"
PATIENCE = 120.0
KILLS = int(os.environ.get("ANABRANCH_TEST_KILLS", "4"))
"""How often something is killed under load; CI takes a few."""
TASKS_A_KILL = 60


STORES = """\
directory: .
stores:
  - {name: all, match: [">"], journal: {priorities: true, message_bytes_max: 4MiB}}
"""


class Worker:
    """A `celery worker` process and its pool."""

    def __init__(self, tasks: ModuleType, log: Path) -> None:
        self._tasks, self.log = tasks, log
        self.start()

    def start(self) -> None:
        options = ["-c", "2", "-n", "tested@%h", "--max-tasks-per-child", "40", "-l", "INFO"]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", TASKS, "worker", *options],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until it answers remote control."""
        deadline = time.monotonic() + PATIENCE
        while not self._tasks.app.control.inspect(timeout=0.5).ping():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()

    def children(self) -> list[int]:
        """Return the processes of its pool."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    def kill(self) -> None:
        """Kill it, its pool too: orphans would go on with what is somebody else's by then."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "stores.yaml").write_text(STORES)
    return directory


@pytest.fixture(scope="module")
def tasks(directory: Path) -> ModuleType:
    os.environ["ANABRANCH_TEST_URL"] = f"anabranch://{directory}"
    return importlib.import_module(TASKS)


@pytest.fixture(scope="module")
def before(tasks: ModuleType) -> list[Any]:
    """Tasks of three priorities, sent before there was a worker; returned in the order that they are to have."""
    sent = {priority: tasks.add.apply_async((priority, 0), priority=priority) for priority in (1, 9, 5)}
    return [sent[priority] for priority in (9, 5, 1)]


@pytest.fixture(scope="module")
def worker(tasks: ModuleType, before: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tasks, tmp_path_factory.mktemp("worker") / "log")
    try:
        worker.wait()
        yield worker
        worker.process.terminate()
        assert worker.process.wait(PATIENCE) == 0  # in order
    finally:
        if worker.process.poll() is None:
            worker.kill()


def test_a_higher_priority_goes_first(before: list[Any], worker: Worker) -> None:
    assert [result.get(timeout=PATIENCE) for result in before] == [9, 5, 1]
    received = re.findall(r"Task \S+\[(\S+)\] received", worker.log.read_text())
    assert [task for task in received if task in {result.id for result in before}] == [result.id for result in before]


def test_chains_groups_and_chords(worker: Worker, tasks: ModuleType) -> None:
    add = tasks.add
    assert chain(add.s(1, 2), add.s(3), add.s(4))().get(timeout=PATIENCE) == 10
    assert group(add.s(n, n) for n in range(10))().get(timeout=PATIENCE) == [2 * n for n in range(10)]
    assert chord((add.s(n, n) for n in range(20)), tasks.total.s())().get(timeout=PATIENCE) == 380
    nested = chain(group(add.s(1, 1), add.s(2, 2)), tasks.total.s(), group(add.s(1), add.s(2)), tasks.total.s())
    assert nested().get(timeout=PATIENCE) == 15
    ignored = chord((add.s(n, n).set(ignore_result=True) for n in range(3)), tasks.total.s())
    assert ignored().get(timeout=PATIENCE) == 6
    with pytest.raises(ChordError, match="unsupported operand"):
        chord([add.s(1, 1), add.s(1, "one")], tasks.total.s())().get(timeout=PATIENCE)


def test_what_chords_need_is_gone_afterwards(worker: Worker, tasks: ModuleType, directory: Path) -> None:
    assert chord([tasks.add.s(1, 1)] * 3, tasks.total.s())().get(timeout=PATIENCE) == 6
    with anabranch.open(directory, shared=True) as router:
        deadline = time.monotonic() + PATIENCE
        while left := list(router.destinations("map://kombu.chord")):
            assert time.monotonic() < deadline, left


def test_retries_and_times(worker: Worker, tasks: ModuleType, tmp_path: Path) -> None:
    assert tasks.twice_wrong.delay(str(tmp_path / "tries")).get(timeout=PATIENCE) == 2
    assert (tmp_path / "tries").read_text().split() == ["0", "1", "2"]
    begun = time.time()
    assert tasks.now.apply_async(countdown=1).get(timeout=PATIENCE) >= begun + 1


def test_more_tasks_that_wait_for_their_time_than_are_prefetched(worker: Worker, tasks: ModuleType) -> None:
    later = [tasks.add.apply_async((n, 0), countdown=3600) for n in range(30)]
    assert tasks.add.delay(1, 1).get(timeout=PATIENCE) == 2
    for result in later:
        result.revoke()


def test_revoking_and_looking(worker: Worker, tasks: ModuleType, tmp_path: Path) -> None:
    control = tasks.app.control
    held, later = tasks.wait_for.delay(str(tmp_path / "go")), tasks.add.apply_async((1, 1), countdown=3600)
    inspect = control.inspect(timeout=PATIENCE, limit=1)  # as soon as it has answered
    deadline = time.monotonic() + PATIENCE
    while not (active := inspect.active()["tested@" + os.uname().nodename]) or not inspect.scheduled():
        assert time.monotonic() < deadline
    assert [task["id"] for task in active] == [held.id]
    later.revoke()
    held.revoke(terminate=True, signal="SIGKILL")
    for result in (held, later):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=PATIENCE)


def test_a_part_of_a_chord_that_is_done_twice_counts_once(
    worker: Worker, tasks: ModuleType, directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "done"
    path.touch()
    with anabranch.open(directory, shared=True) as router:
        queue = router.queue("kombu.celery")
        waiting = queue.depth()  # of other tests, for their time
        parts = [tasks.part.si(str(path), number, number != 1) for number in range(3)]
        result = chord(parts, tasks.body.s(str(path)))()
        deadline = time.monotonic() + PATIENCE
        while path.read_text().count("2") < 2 or queue.depth() > waiting:
            assert time.monotonic() < deadline, path.read_text()
            if worker.process.poll() is not None:
                worker.start()
    # The body, too, may have been executed again: the worker died beside it. No part has made it fail.
    assert (result.get(timeout=PATIENCE), result.state) == (3, "SUCCESS")


def test_a_result_that_is_too_large_is_an_error_of_its_task(worker: Worker, tasks: ModuleType) -> None:
    assert len(tasks.large.delay(3_000_000).get(timeout=PATIENCE)) == 3_000_000
    with pytest.raises(EncodeError, match=r"too large to be stored: .* message_bytes_max, 4194304"):
        tasks.large.delay(5_000_000).get(timeout=PATIENCE)


def test_nothing_is_lost_whatever_is_killed(worker: Worker, tasks: ModuleType, directory: Path, tmp_path: Path) -> None:
    done, chance = tmp_path / "done", random.Random(27)
    sent: list[Any] = []
    chords: list[Any] = []
    with anabranch.open(directory, shared=True) as router:
        waiting = router.queue("kombu.celery").depth()  # of other tests, for their time
    for kill in range(KILLS):
        for n in range(TASKS_A_KILL):
            sent.append(tasks.write.delay(str(done), len(sent)))
            if n == TASKS_A_KILL // 2:
                chords.append(chord((tasks.add.s(n, kill) for n in range(10)), tasks.total.s())())
            if n == chance.randrange(TASKS_A_KILL):
                sent[chance.randrange(len(sent))].get(timeout=PATIENCE)
        if kill % 2:
            sent[-TASKS_A_KILL // 2].get(timeout=PATIENCE)  # the worker has come so far, and works on the others
        if kill % 4 == 3:
            worker.kill()
            worker.start()
        elif kill % 4 == 1:
            for pid in worker.children()[:1]:
                os.kill(pid, signal.SIGKILL)
        else:
            os.kill(int((directory / "router.lock").read_text().split()[0]), signal.SIGKILL)
    assert [result.get(timeout=PATIENCE) for result in sent] == [*range(len(sent))]
    assert {int(line) for line in done.read_text().split()} == {*range(len(sent))}
    assert [result.get(timeout=PATIENCE) for result in chords] == [45 + 10 * kill for kill in range(KILLS)]
    lines = len(done.read_text().split())
    print(f"{KILLS} kills, {len(sent)} tasks, {lines - len(sent)} of them run again, {len(chords)} chords")
    with anabranch.open(directory, shared=True) as router:
        deadline = time.monotonic() + PATIENCE
        while (depth := router.queue("kombu.celery").depth()) > waiting:
            assert time.monotonic() < deadline, depth


def test_a_task_sees_the_failure_of_its_broker(tasks: ModuleType, tmp_path: Path) -> None:
    other: Any = type(tasks.app)("other", broker=f"anabranch://{tmp_path}/none", backend=f"anabranch://{tmp_path}/none")
    with pytest.raises(anabranch.ConfigError, match="none is not there; make the directory"):
        other.send_task("add", (1, 1))
    with pytest.raises(anabranch.ConfigError, match="none is not there; make the directory"):
        other.AsyncResult("1").get(timeout=PATIENCE)
