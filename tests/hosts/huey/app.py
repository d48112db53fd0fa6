"""The tasks that a web process calls and `huey_consumer tests.hosts.huey.app.huey` executes."""

from __future__ import annotations

import os

from anabranch.hosts.huey import AnabranchHuey

huey = AnabranchHuey("app", directory=os.environ["HUEY_DIRECTORY"], read_timeout=0.2)


@huey.task()
def double(number: int) -> int:
    return 2 * number


@huey.task()
def add(first: int, second: int) -> int:
    return first + second


@huey.task()
def total(numbers: list[int]) -> int:
    return sum(numbers)
