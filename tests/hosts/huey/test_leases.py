"""What becomes of the lease of a task that is not executed to its end, or more than once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from huey import chord

import anabranch
from anabranch.hosts.huey import AnabranchHuey


@pytest.fixture
def huey(tmp_path: Path) -> Iterator[AnabranchHuey]:
    journal = anabranch.JournalOptions(priorities=True, dead_letter="dead.{name}")
    with anabranch.open(anabranch.Config(tmp_path, [anabranch.StoreConfig("all", [">"], journal=journal)])) as router:
        yield AnabranchHuey("app", router=router, read_timeout=0, utc=False)


def test_a_directory_or_a_router_is_needed() -> None:
    with pytest.raises(TypeError, match="huey 'app' needs a directory=, or an open router=, and not both"):
        AnabranchHuey("app")


def test_an_interrupted_task_is_given_back(huey: Any) -> None:
    @huey.task()
    def interrupted() -> None:
        raise KeyboardInterrupt

    interrupted()
    huey.execute(huey.dequeue())
    assert huey.pending_count() == 1


def test_a_task_that_cannot_be_finished_is_a_dead_letter(huey: Any) -> None:
    """Nothing of it can be pickled; and nobody knows the other one."""

    @huey.task()
    def lasting() -> Any:
        return lambda: None

    lasting()
    with pytest.raises(Exception, match="pickle") as failure:
        huey.execute(huey.dequeue())
    huey.storage.enqueue(b"no task")
    with pytest.raises(Exception, match=r"."):
        huey.dequeue()
    first, second = huey.storage.tasks.dead_letters()
    assert str(failure.value) == first.error_text and second.message.body == b"no task"
    assert huey.pending_count() == 0


def test_a_task_whose_result_is_too_large_is_a_dead_letter(huey: Any) -> None:
    @huey.task()
    def large() -> bytes:
        return bytes(101 << 20)

    large()
    with pytest.raises(anabranch.AnabranchError):
        huey.execute(huey.dequeue())
    (letter,) = huey.storage.tasks.dead_letters()
    assert letter.error_type == "anabranch.policies.errors.TransactionError"
    assert huey.pending_count() == 0


def test_a_task_that_is_in_the_schedule_twice_is_enqueued_twice(huey: Any) -> None:
    """A worker was killed once it had put it there, and before its message was acked."""

    @huey.task()
    def task() -> None: ...

    one, later = task.s(), datetime.now() + timedelta(hours=1)
    one.eta = datetime.now()
    huey.add_schedule(one)
    huey.add_schedule(one)
    for read in huey.read_schedule(later):
        huey.enqueue(read)
    assert huey.pending_count() == 2 and huey.storage.due.depth() == 0 and not huey._hand.read


def test_a_chord_whose_members_are_executed_twice_calls_back_once(huey: Any) -> None:
    @huey.task()
    def one() -> int:
        return 1

    @huey.task()
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    result = huey.enqueue(chord([one.s(), one.s()], total.s())).callback
    for data in huey.storage.enqueued_items():
        huey.storage.enqueue(data)
    for _ in range(5):
        huey.execute(huey.dequeue())
    assert result.get() == 2
    assert huey.dequeue() is None


def test_of_two_schedulers_one_enqueues_a_task(huey: Any, tmp_path: Path) -> None:
    """What one has read, and not enqueued yet, is gone for the other; given back, it comes again."""

    @huey.task()
    def task() -> None: ...

    later = datetime.now() + timedelta(hours=1)
    task.schedule(delay=60)
    huey.execute(huey.dequeue())  # which puts it into the schedule
    other = AnabranchHuey("app", router=huey.storage.router, read_timeout=0, utc=False)
    other._registry = huey._registry
    (read,) = other.read_schedule(later)
    assert huey.read_schedule(later) == [] and huey.scheduled_count() == 0
    other._hand.read.pop(read.id)[0].release()
    (again,) = huey.read_schedule(later)
    assert again.id == read.id
    huey.enqueue(again)
    assert huey.pending_count() == 1 and huey.storage.due.depth() == 0
