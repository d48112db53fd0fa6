"""The tasks that the test calls and `manage.py anabranch_worker` executes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.tasks import TaskContext, task


@task
def double(number: int) -> int:
    return 2 * number


@task
async def double_async(number: int) -> int:
    return 2 * number


@task(takes_context=True)
def third_time(context: TaskContext) -> int:
    attempt: int = context.attempt
    if attempt < 3:
        raise ValueError(f"attempt {attempt}")
    return attempt


@task
def fail() -> None:
    raise ValueError("always")


@task
def give(what: str) -> Any:
    if what == "large error":
        raise ValueError("x" * (65 << 20))
    return {"set": {1}, "large": "x" * (65 << 20)}[what]


@task
def wait_for(place: str) -> str:
    Path(place, "begun").write_bytes(b"1")  # the test reads it
    Path(place, "end").read_bytes()
    return "ended"
