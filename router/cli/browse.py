"""`anabranch browse`: look at the messages of a queue."""

from __future__ import annotations

import click

from ...policies.config import Config
from ...policies.text import count_of
from .directory import on_directory, opened
from .messages import Shown, backlog_in, json_lines, raw_option

LIMIT = 20


@click.command()
@on_directory("QUEUE")
@click.option("--limit", "-n", type=click.IntRange(min=0), default=LIMIT, show_default=True, metavar="N",
              help="Show so many; 0: all.")  # fmt: skip
@raw_option
@json_lines
def command(config: Config, queue: str, limit: int, raw: bool, as_json: bool) -> None:
    """Look at the messages of a queue, in order.

    The messages stay where they are, as if nobody had looked. Each is shown with its number, when it was sent (UTC),
    its headers, and its body. A body of text is shown as text; of any other the length and the first bytes are shown.
    For a topic (topic://...) the command shows the messages that a durable subscription has yet to ack.

    \b
    Example:
      anabranch browse data orders
      anabranch browse data orders --limit 0 --json | jq .headers
    """
    with opened(config) as router:
        shown, backlog = Shown(as_json, raw), backlog_in(router, queue)
        for message in backlog.browse(limit or None):
            shown(message)
        left = backlog.depth() - shown.count
        if left > 0:
            click.echo(f"... and {count_of(left, 'more message')}; --limit 0 shows all.", err=True)
        elif not shown.count:
            click.echo(f"{backlog.destination} is empty.", err=True)
