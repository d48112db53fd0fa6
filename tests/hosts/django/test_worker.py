"""Web process and workers: what is called is executed, whoever is killed, and what a task gives is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.tasks import TaskResult, TaskResultStatus, task_backends
from django.tasks.exceptions import TaskResultDoesNotExist
from django.utils import timezone

import anabranch
from anabranch.hosts.django import AnabranchBackend

from . import tasks

DIRECTORY = Path(os.environ["ANABRANCH_TASKS"], "tasks")
TASKS = 100
PATIENCE = 300.0
"""Seconds after which a task is taken for lost, on the busiest machine."""


@pytest.fixture(scope="module", autouse=True)
def owner() -> Iterator[None]:
    yield
    task_backends["default"].router.close()
    os.kill(owner_of(DIRECTORY), signal.SIGTERM)


def owner_of(directory: Path) -> int:
    return int((directory / "router.lock").read_text().split()[0])


def worker(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "django", "anabranch_worker", "--threads=4", *arguments])


@pytest.fixture
def working() -> Iterator[subprocess.Popen[bytes]]:
    with worker() as process:
        yield process
        process.terminate()
        assert process.wait() == 0


def ended(*results: TaskResult) -> None:
    """Wait for the ends of tasks."""
    until = time.monotonic() + PATIENCE
    for result in results:
        while not result.is_finished:
            assert time.monotonic() < until
            time.sleep(0.005)
            result.refresh()


def test_what_is_called_is_executed_whoever_is_killed() -> None:
    """Workers, and once the owner of the directory, with delayed and asynchronous tasks among the load."""
    soon = tasks.double.using(run_after=timezone.now() + timedelta(seconds=1))
    kinds: list[Any] = [tasks.double, tasks.double_async, soon, tasks.double.using(priority=50, queue_name="mail")]
    called: list[TaskResult] = []
    progress = threading.Semaphore(0)

    def web() -> None:
        for number in range(TASKS):
            called.append(kinds[number % len(kinds)].enqueue(number))
            progress.release()

    thread = threading.Thread(target=web)
    running = worker()
    try:
        thread.start()
        for kill in range(4):
            for _ in range(TASKS // 6):
                assert progress.acquire(timeout=PATIENCE)
            ended(called[kill * (TASKS // 6)])
            if kill == 2:
                os.kill(owner_of(DIRECTORY), signal.SIGKILL)
            running.kill()
            running.wait()
            running = worker()
        thread.join()
        ended(*called)
    finally:
        running.kill()
        running.wait()
    assert [result.return_value for result in called] == [2 * number for number in range(TASKS)]


def test_the_outcome_is_told(working: subprocess.Popen[bytes]) -> None:
    third, failing = tasks.third_time.enqueue(), tasks.fail.enqueue()
    given = {what: tasks.give.enqueue(what) for what in ("set", "large", "large error")}
    ended(third, failing, *given.values())
    assert (third.return_value, third.attempts, len(third.errors)) == (3, 3, 2)
    assert [error.exception_class for error in failing.errors] == [ValueError] * 3
    assert {what: result.status for what, result in given.items()} == dict.fromkeys(given, TaskResultStatus.FAILED)
    assert "give has returned {1}, which has to be JSON" in given["set"].errors[-1].traceback
    assert [error.exception_class for error in given["large"].errors] == [anabranch.TransactionError]
    told = given["large error"].errors[-1].traceback
    assert told.startswith("Traceback") and told.endswith("xxx\n") and "characters are left out" in told


def test_a_worker_takes_the_most_important_of_its_queue() -> None:
    backend: Any = task_backends["default"]
    for number in (-100, 7, 100):
        tasks.double.using(priority=number, queue_name="levels").enqueue(number)
    other = tasks.double.using(queue_name="other").enqueue(0)
    taken = [backend.queue("levels").receive() for _ in range(3)]
    assert [backend.get_result(message.body.decode()).args for message in taken] == [[100], [7], [-100]]
    for message in taken:
        message.release()
    with worker("--queue=levels") as process:
        ended(*(backend.get_result(message.body.decode()) for message in taken))
        process.terminate()
    other.refresh()
    assert other.status == TaskResultStatus.READY and backend.queue("other").purge() == 1


def test_a_signal_finishes_what_is_in_hand_and_a_second_one_gives_it_back(tmp_path: Path) -> None:
    """The test and the task wait for each other at two pipes."""
    begun, end = tmp_path / "begun", tmp_path / "end"
    os.mkfifo(begun)
    os.mkfifo(end)
    result = tasks.wait_for.using(queue_name="long").enqueue(str(tmp_path))
    for is_last in (False, True):
        with worker("--queue=long") as process:
            begun.read_bytes()
            process.terminate()
            if is_last:
                end.write_bytes(b"1")
            while process.poll() is None and not is_last:
                process.terminate()  # two at once would be one; a third may end it
            assert process.wait() in ({0} if is_last else {0, -signal.SIGTERM})
    result.refresh()
    assert (result.return_value, result.attempts) == ("ended", 2)


def test_a_call_in_a_transaction_is_sent_once_that_is_committed() -> None:
    queue = task_backends["default"].queue("pages")
    task = tasks.double.using(queue_name="pages")
    with transaction.atomic():
        result = task.enqueue(1)
        with pytest.raises(TaskResultDoesNotExist):
            result.refresh()
    assert queue.depth() == 1
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        task.enqueue(1 // 0 or 2)
    assert queue.purge() == 1


def test_a_call_is_part_of_the_transaction_where_the_store_is_in_the_database(tmp_path: Path) -> None:
    database = Path(connection.settings_dict["NAME"])
    everything = anabranch.StoreConfig("all", [">"], sql=anabranch.SqlOptions(url=f"sqlite:///{database}"))
    with anabranch.open(anabranch.Config(tmp_path, [everything])) as router:
        backend = AnabranchBackend("default", {"OPTIONS": {"router": router, "in_transaction": True}})
        queue = backend.queue("default")
        queue.declare()
        with connection.cursor() as cursor:
            cursor.execute("create table if not exists sold (number integer)")
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("insert into sold values (1)")
            kept = backend.enqueue(tasks.double, [1], {})
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                backend.enqueue(tasks.double, [2], {})
                1 / 0  # noqa: B018
            assert queue.depth() == 0
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            backend.enqueue(tasks.double, [3], {})
            1 / 0  # noqa: B018
        message = queue.receive(PATIENCE)
        assert message is not None and json.loads(message.body)["id"] == kept.id and queue.depth() == 1
        assert backend.get_result(kept.id) == kept
        backend.run(message, "worker")
        assert backend.get_result(kept.id).return_value == 2
        with transaction.atomic():
            queue.send(b"1", connection=connection)
        message = queue.receive()
        assert message is not None
        with transaction.atomic():
            message.ack(connection=connection)
        assert queue.depth() == 0
        with pytest.raises(anabranch.TransactionError, match="autocommit"):
            queue.send(b"2", connection=connection)
        assert connection.cursor().execute("select 1 where 'a' regexp 'A'").fetchall() == []  # Django's still


WRONG: list[tuple[Any, str]] = [
    ({}, r"TASKS\['x'\]\['OPTIONS'\] needs 'directory', or 'router', and not both"),
    ([], "is \\[\\]; it has to be a dict"),
    ({"directry": "/"}, "has 'directry', which is no option; did you mean 'directory'?"),
    ({"directory": 1}, "\\['directory'\\] is 1; it has to be a path"),
    ({"directory": "/", "database": "other"}, "'other'; it has to be one of DATABASES \\(default\\), or None"),
    ({"directory": "/", "retries": -1}, "is -1; it has to be a whole number from 0 on"),
    ({"directory": "/", "result_ttl": 0}, "is 0; it has to be a number of seconds above 0"),
    ({"directory": "/", "in_transaction": True}, "give a 'router' that has a store in the database"),
]


@pytest.mark.parametrize(("options", "told"), WRONG)
def test_a_wrong_option_is_told(options: Any, told: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=told):
        AnabranchBackend("x", {"OPTIONS": options})


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    backend = AnabranchBackend("x", {"OPTIONS": {"directory": tmp_path / "none"}})
    assert [error.msg for error in backend.check()] == [
        f"TASKS['x']['OPTIONS']['directory']: {tmp_path}/none is not there; make the directory (mkdir {tmp_path}/none)"
    ]
    with pytest.raises(ImproperlyConfigured, match="none is not there; make the directory"):
        backend.enqueue(tasks.double, [1], {})


def test_arguments_that_are_not_json_are_told() -> None:
    told = re.escape("tasks.double is called with ({1},), which has to be JSON. Unsupported type")
    with pytest.raises(TypeError, match=told):
        tasks.double.enqueue({1})
