"""Commands over single messages: `browse`, `send`, `receive` and `tail`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

import click

from ...adapters.core.messages import Message, Receipt
from ...policies.config import Config
from ...policies.errors import DestinationError
from ...policies.names.destination import Destination, Kind
from ...policies.text import count_of
from ..api.consumer import Backlog
from ..api.endpoint import SendOptions
from ..inspection import Inspection
from ..placement.near_names import near_name
from ..router import Router, inspection_of
from .directory import on_directory, opened
from .output import LocalPath, Seconds, echo_result, echo_warnings, json_option
from .showing import Shown, as_given, backlog_in, destination_in, json_lines, queue_in, raw_option

BROWSED: Final = 20
TAILED: Final = 10
"""Messages that are shown unless a limit is given."""
PAUSE: Final = 0.2
"""Seconds between two looks of `tail`."""


@click.command()
@on_directory("QUEUE")
@click.option("--limit", "-n", type=click.IntRange(min=0), default=BROWSED, show_default=True, metavar="N",
              help="Show so many; 0: all.")  # fmt: skip
@raw_option
@json_lines
def browse_command(config: Config, queue: str, limit: int, raw: bool, as_json: bool) -> None:
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


def _header(_ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r} is no header; write name=value")
        if name in headers:
            raise click.BadParameter(f"{name!r} is given twice; a message has one header of a name")
        headers[name] = value
    return headers


@click.command()
@on_directory("QUEUE", "[BODY]")
@click.option("--file", "-f", "path", type=LocalPath(), metavar="FILE", help="Take the body from this file.")
@click.option("--header", "-H", "headers", multiple=True, callback=_header, metavar="NAME=VALUE",
              help="A header; may be given more than once.")  # fmt: skip
@click.option("--id", "message_id", metavar="ID", help="The message id: two sends under it are stored once.")
@click.option("--priority", type=click.IntRange(0, 65535), metavar="N", help="The priority; the highest comes first.")
@click.option("--group", metavar="GROUP", help="While a message of a group is leased, no other of it is received.")
@click.option("--delay", type=Seconds(min=0), metavar="SECONDS",
              help="Nobody receives the message before. A number, or 500ms, 2m.")  # fmt: skip
@click.option("--expires", type=Seconds(min=0, min_open=True), metavar="SECONDS",
              help="Nobody receives the message after that.")  # fmt: skip
@click.option("--create", is_flag=True, help="Make the data directory if it is not there.")
@json_option
def send_command(
    config: Config,
    queue: str,
    body: str | None,
    path: Path | None,
    headers: dict[str, str],
    message_id: str | None,
    priority: int | None,
    group: str | None,
    delay: float | None,
    expires: float | None,
    create: bool,
    as_json: bool,
) -> None:
    """Send a message to a queue, or to a topic (topic://...).

    BODY is its text. - reads the body from stdin, --file from a file, both as they are and of any size. Once the
    command has ended with 0, the message is as durable as its store's policy says.

    \b
    Example:
      anabranch send data jobs "hello" --header kind=greeting
      anabranch send data jobs --file photo.jpg --delay 60
      date | anabranch send data jobs -
    """
    if (body is None) == (path is None):
        raise click.UsageError("give the BODY, - for stdin, or --file FILE")
    options: SendOptions = {"expires_in": expires, "deliver_in": delay, "group": group}
    if priority is not None:
        options["priority"] = priority
    with ExitStack() as stack:
        content = _content(stack, body, path)
        router = stack.enter_context(opened(config, create=create))
        new = _new_queues(router, _destinations(queue))
        receipts = router.send(queue, content, headers, message_id, **options)
        lost = [f"{one.destination} {why}" for one in receipts if (why := _why_lost(router, one)) is not None]
    sent = [
        {"destination": str(one.destination), "seq": one.seq, "duplicate": one.duplicate, "dropped": one.dropped}
        for one in receipts
    ]
    said = {"directory": str(config.directory), "message_id": message_id, "sent": sent}
    echo_result(as_json, said, *map(_became, receipts))
    for note in new:
        click.echo(note, err=True)
    echo_warnings(f"{warning}, so nobody gets this message" for warning in lost)


def _content(stack: ExitStack, body: str | None, path: Path | None) -> bytes | BinaryIO:
    """Return the body to send; a file is closed with the stack."""
    if path is not None:
        try:
            return stack.enter_context(path.open("rb"))
        except OSError as error:
            raise click.UsageError(f"--file {path}: {error.strerror}") from error
    if body != "-":
        return os.fsencode(body or "")  # as it was given, also where it is no text
    if sys.stdin is None:
        raise click.UsageError("the BODY is - and stdin is closed")
    return sys.stdin.buffer


def _became(receipt: Receipt) -> str:
    what = "dropped, since it is full" if receipt.dropped else f"sent, number {receipt.seq}"
    return f"{receipt.destination}: {'there already' if receipt.duplicate else what}"


def _destinations(text: str) -> list[Destination]:
    destinations = [destination_in(part.strip()) for part in text.split(",")]
    for destination in destinations:
        if destination.kind is Kind.MAP:
            raise DestinationError(f"{destination} is a map, to which nothing is sent: give a queue or a topic")
    return destinations


def _new_queues(router: Router, destinations: Iterable[Destination]) -> list[str]:
    """Return a line for each queue that the message makes: its name may be a slip."""
    notes = []
    for destination in dict.fromkeys(destinations):
        if destination.kind is Kind.QUEUE and not router.exists(destination):
            near = near_name(destination, router.destinations(Kind.QUEUE.scheme))
            meant = f"; did you mean {as_given(near)}?" if near is not None else ""
            notes.append(f"{destination} is a new queue{meant}")
    return notes


def _why_lost(router: Router, receipt: Receipt) -> str | None:
    """Return why nobody ever gets what was sent; None where somebody may."""
    destination = receipt.destination
    if destination.kind is Kind.TOPIC and not router.topic(destination).subscriptions():
        return "has no durable subscription"
    if not receipt.dropped and inspection_of(router).is_volatile(destination):
        return "is in a memory store, whose messages go when this command ends"
    return None


@click.command()
@on_directory("QUEUE")
@click.option("--ack", is_flag=True, help="Remove each message once it has been written out.")
@click.option("--limit", "-n", type=click.IntRange(min=0), default=1, show_default=True, metavar="N",
              help="Receive so many; 0: all.")  # fmt: skip
@click.option("--timeout", type=Seconds(min=0), default=0.0, metavar="SECONDS",
              help="Wait so long for each message: for a scheduled one, say. A number, or 500ms, 2m.")  # fmt: skip
@raw_option
@json_lines
def receive_command(
    config: Config, queue: str, ack: bool, limit: int, timeout: float, raw: bool, as_json: bool
) -> None:
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


@click.command()
@on_directory("QUEUE")
@click.option("--limit", "-n", type=click.IntRange(min=0), default=TAILED, show_default=True, metavar="N",
              help="Begin with the last so many that are there.")  # fmt: skip
@raw_option
@json_lines
def tail_command(config: Config, queue: str, limit: int, raw: bool, as_json: bool) -> None:
    """Show the messages of a queue as they come, until Ctrl-C.

    The messages stay where they are. Where no program has the directory open, it is held while this runs: new messages
    come from the directory itself then, dead letters of messages that expire, say. In the example dlq is the queue
    that `dead_letter:` names in the configuration.

    \b
    Example:
      anabranch tail data dlq
      anabranch tail data dlq --limit 0 --json | jq .headers
    """
    with opened(config) as router:
        shown, backlog = Shown(as_json, raw), backlog_in(router, queue)
        is_ordered = not inspection_of(router).option(backlog.destination, "priorities")
        for message in _coming(backlog, inspection_of(router), limit, is_ordered):
            shown(message)


def _coming(backlog: Backlog, inspection: Inspection, limit: int, is_ordered: bool) -> Iterator[Message]:
    """Yield the last so many messages, then each that comes. `is_ordered`: messages that come are behind all that are
    there."""
    found = inspection.newest(backlog, max(limit, 1))
    last = found[-1].seq if found else 0
    yield from found if limit else ()
    while True:
        time.sleep(PAUSE)
        new = list(backlog.browse(after=last)) if is_ordered else inspection.newer(backlog, last)
        yield from new
        last = max((one.seq for one in new), default=last)
