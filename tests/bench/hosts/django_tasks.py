from __future__ import annotations

from django.tasks import task

from .working import note


@task
def add(first: int, second: int) -> int:
    note()
    return first + second
