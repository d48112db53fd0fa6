"""`anabranch tail`: the messages of a queue as they come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from ...policies.config import Config
from .directory import on_directory, opened
from .messages import Shown, backlog_in, json_lines, raw_option

if TYPE_CHECKING:
    from ...adapters.core.messages import Message
    from ..api.consumer import Backlog

LIMIT: Final = 10
PAUSE: Final = 0.2
"""Seconds between two looks."""


@click.command()
@on_directory("QUEUE")
@click.option("--limit", "-n", type=click.IntRange(min=0), default=LIMIT, show_default=True, metavar="N",
              help="Begin with the last so many that are there.")  # fmt: skip
@raw_option
@json_lines
def command(config: Config, queue: str, limit: int, raw: bool, as_json: bool) -> None:
    """Show the messages of a queue as they come, until Ctrl-C.

    They stay where they are. The directory is held while this runs, so what comes is what the directory itself does:
    dead letters of messages that expire, say. In the example dlq is the queue that `dead_letter:` names in the
    configuration.

    \b
    Example:
      anabranch tail data dlq
      anabranch tail data dlq --limit 0 --json | jq .headers
    """
    from ..router import inspection_of

    with opened(config) as router:
        shown, backlog = Shown(as_json, raw), backlog_in(router, queue)
        is_ordered = not inspection_of(router).option(backlog.destination, "priorities")
        for message in _coming(backlog, limit, is_ordered):
            shown(message)


def _coming(backlog: Backlog, limit: int, is_ordered: bool) -> Iterator[Message]:
    """Yield the last so many messages, then each that comes. `is_ordered`: messages that come are behind all that are
    there."""
    last = 0
    first: deque[Message] = deque(maxlen=limit)
    for message in backlog.browse():
        first.append(message)
        last = max(last, message.seq)
    yield from first
    while True:
        time.sleep(PAUSE)
        new = [one for one in backlog.browse(after=last if is_ordered else 0) if one.seq > last]
        yield from sorted(new, key=lambda one: one.seq)
        last = max((one.seq for one in new), default=last)
