"""`anabranch send`: put a message into a queue."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from ...policies.config import Config
from ...policies.errors import DestinationError
from ...policies.names.destination import Destination, Kind
from .directory import on_directory, opened
from .messages import as_given, destination_in
from .output import LocalPath, Seconds, echo_json, json_option

if TYPE_CHECKING:
    from ...adapters.core.messages import Receipt
    from ..api.endpoint import SendOptions
    from ..router import Router


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
@click.option("--file", "-f", "path", type=LocalPath(), metavar="FILE", help="The body is what is in this file.")
@click.option("--header", "-H", "headers", multiple=True, callback=_header, metavar="NAME=VALUE",
              help="A header; may be given more than once.")  # fmt: skip
@click.option("--id", "message_id", metavar="ID", help="The message id: sent again under it, it is stored once.")
@click.option("--priority", type=click.IntRange(0, 65535), metavar="N", help="Its priority; the highest comes first.")
@click.option("--delay", type=Seconds(min=0), metavar="SECONDS",
              help="Nobody receives it before. A number, or 500ms, 2m.")  # fmt: skip
@click.option("--expires", type=Seconds(min=0, min_open=True), metavar="SECONDS",
              help="Nobody receives it after that.")  # fmt: skip
@click.option("--create", is_flag=True, help="Make the data directory if it is not there.")
@json_option
def command(
    config: Config,
    queue: str,
    body: str | None,
    path: Path | None,
    headers: dict[str, str],
    message_id: str | None,
    priority: int | None,
    delay: float | None,
    expires: float | None,
    create: bool,
    as_json: bool,
) -> None:
    """Send a message to a queue, or to a topic (topic://...).

    BODY is its text; - reads it from stdin, --file from a file, both as they are and of any size. It is as durable as
    its store's policy says once the command has ended with 0.

    \b
    Example:
      anabranch send data jobs "hello" --header kind=greeting
      anabranch send data jobs --file photo.jpg --delay 60
      date | anabranch send data jobs -
    """
    if (body is None) == (path is None):
        raise click.UsageError("give the BODY, - for stdin, or --file FILE")
    options: SendOptions = {"expires_in": expires, "deliver_in": delay}
    if priority is not None:
        options["priority"] = priority
    with ExitStack() as stack:
        content: bytes | BinaryIO = os.fsencode(body or "")  # as it was given, also where it is no text
        if path is not None:
            try:
                content = stack.enter_context(path.open("rb"))
            except OSError as error:
                raise click.UsageError(f"--file {path}: {error.strerror}") from error
        elif body == "-":
            if sys.stdin is None:
                raise click.UsageError("the BODY is - and stdin is closed")
            content = sys.stdin.buffer
        router = stack.enter_context(opened(config, create=create))
        new = _new_queues(router, _destinations(queue))
        receipts = router.send(queue, content, headers, message_id, **options)
        lost = [f"{one.destination} {why}" for one in receipts if (why := _why_lost(router, one)) is not None]
    if as_json:
        sent = [
            {"destination": str(one.destination), "seq": one.seq, "duplicate": one.duplicate, "dropped": one.dropped}
            for one in receipts
        ]
        echo_json({"directory": str(config.directory), "message_id": message_id, "sent": sent})
    else:
        for one in receipts:
            what = "dropped, since it is full" if one.dropped else f"sent, number {one.seq}"
            click.echo(f"{one.destination}: {'there already' if one.duplicate else what}")
    for note in new:
        click.echo(note, err=True)
    for warning in lost:
        click.echo(f"Warning: {warning}, so nobody gets this message", err=True)


def _destinations(text: str) -> list[Destination]:
    destinations = [destination_in(part.strip()) for part in text.split(",")]
    for destination in destinations:
        if destination.kind is Kind.MAP:
            raise DestinationError(f"{destination} is a map, to which nothing is sent: give a queue or a topic")
    return destinations


def _new_queues(router: Router, destinations: Iterable[Destination]) -> list[str]:
    """Return a line for each queue that the message makes: its name may be a slip."""
    from ..placement.near_names import near_name

    notes = []
    for destination in dict.fromkeys(destinations):
        if destination.kind is Kind.QUEUE and not router.exists(destination):
            near = near_name(destination, router.destinations(Kind.QUEUE.scheme))
            meant = f"; did you mean {as_given(near)}?" if near is not None else ""
            notes.append(f"{destination} is a new queue{meant}")
    return notes


def _why_lost(router: Router, receipt: Receipt) -> str | None:
    """Return why nobody ever gets what was sent; None where somebody may."""
    from ..router import inspection_of

    destination = receipt.destination
    if destination.kind is Kind.TOPIC and not router.topic(destination).subscriptions():
        return "has no durable subscription"
    if not receipt.dropped and inspection_of(router).is_volatile(destination):
        return "is in a store that is in memory alone, and that goes when this command ends"
    return None
