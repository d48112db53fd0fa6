"""`manage.py anabranch_worker`: execute tasks until SIGTERM or Ctrl-C."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from django.tasks.exceptions import InvalidTaskBackend

from anabranch import AnabranchError

from ... import AnabranchBackend, work


class Command(BaseCommand):
    """Run any number of these beside the web processes."""

    help = (
        "Execute tasks until SIGTERM or Ctrl-C, which finish what is in hand; a second one gives that back. "
        "Any number of workers may run at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Describe the options."""
        parser.add_argument("--threads", type=int, default=1, help="tasks that are executed at once (1)")
        parser.add_argument("--queue", help="a queue_name whose tasks alone are executed; without it those of all")
        parser.add_argument("--backend", default=DEFAULT_TASK_BACKEND_ALIAS, help="which entry of TASKS (%(default)s)")

    def handle(self, *_: Any, threads: int, queue: str | None, backend: str, **options: Any) -> None:
        """Work. Raises CommandError for what cannot be, and where the store fails."""
        try:
            found = task_backends[backend]
        except InvalidTaskBackend as error:
            raise CommandError(str(error)) from error
        if not isinstance(found, AnabranchBackend):
            raise CommandError(f"TASKS[{backend!r}] is not Anabranch's; name one that is: --backend")
        if threads < 1:
            raise CommandError(f"--threads is {threads}; it has to be 1 or more")
        if queue is not None and found.queues and queue not in found.queues:
            raise CommandError(f"--queue is {queue!r}; TASKS[{backend!r}] has the QUEUES {sorted(found.queues)}")
        try:
            work(found, queue, threads)
        except AnabranchError as error:
            raise CommandError(str(error)) from error
