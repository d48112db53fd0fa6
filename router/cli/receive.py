"""`anabranch receive`: take messages from a queue."""

from __future__ import annotations

import click

from ...policies.config import Config
from .directory import on_directory, opened
from .messages import Shown, json_lines, queue_in, raw_option
from .output import Seconds


@click.command()
@on_directory("QUEUE")
@click.option("--ack", is_flag=True, help="Remove each message once it has been written out.")
@click.option("--limit", "-n", type=click.IntRange(min=0), default=1, show_default=True, metavar="N",
              help="Receive so many; 0: all.")  # fmt: skip
@click.option("--timeout", type=Seconds(min=0), default=0.0, metavar="SECONDS",
              help="Wait so long for each message: for a scheduled one, say. A number, or 500ms, 2m.")  # fmt: skip
@raw_option
@json_lines
def command(config: Config, queue: str, ack: bool, limit: int, timeout: float, raw: bool, as_json: bool) -> None:
    """Receive messages as a consumer does, and print them.

    With --ack each message is removed once it has been written out, one after the other. If the reader of a pipe goes,
    or the command is ended, messages that were not written stay. The last message that was written may come again. None
    is lost. Without --ack the messages are given back, and count as delivered once more: `browse` only looks.

    \b
    Example:
      anabranch receive data orders --ack
      anabranch receive data orders --ack --limit 0 --json > orders.jsonl
      anabranch receive data orders --ack --raw > photo.jpg
    """
    with opened(config) as router:
        shown, source = Shown(as_json, raw), queue_in(router, queue)
        held = []
        while not limit or shown.count < limit:
            message = source.receive(timeout)
            if message is None:
                break
            shown(message)
            if ack:
                message.ack()
            else:
                held.append(message)  # else it would come again
        router.release(held)
        if not shown.count:
            click.echo(f"{source.destination} has no message that is ready.", err=True)
