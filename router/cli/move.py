"""`anabranch move`: the messages of one queue become those of another."""

from __future__ import annotations

import click

from ...policies.config import Config
from ...policies.text import count_of
from .directory import on_directory, opened
from .messages import queue_in, queue_named, require_lasting
from .output import echo_json, json_option, working


@click.command()
@on_directory("SOURCE", "TARGET")
@click.option("--limit", "-n", type=click.IntRange(min=1), metavar="N", help="Move so many; else all that are ready.")
@json_option
def command(config: Config, source: str, target: str, limit: int | None, as_json: bool) -> None:
    """Move the messages of one queue into another.

    They keep their order, ids, headers, priorities and expiry, and come behind what TARGET holds; their time, and the
    count of their deliveries, begin anew. It is done in transactions of up to 1,000: killed at any moment, each message
    is in one of the two queues, and the same command goes on. What waits for its time stays in SOURCE.

    \b
    Example:
      anabranch move data orders.eu orders.all
      anabranch move data dlq inspected --limit 100
    """
    from ..migration.moving import move_messages
    from ..router import inspection_of

    with opened(config) as router:
        origin, destination = queue_in(router, source), queue_named(router, target)
        require_lasting(router, destination.destination)
        with working(f"Moving {origin.destination.name}") as progress:
            moved = move_messages(inspection_of(router).begin_unlimited, origin, destination, limit, progress)
        left = origin.depth()
    if as_json:
        echo_json(
            {"source": str(origin.destination), "target": str(destination.destination), "moved": moved, "left": left}
        )
        return
    click.echo(f"{count_of(moved, 'message')} moved from {origin.destination} to {destination.destination}.")
    if left:
        click.echo(f"{origin.destination} holds {count_of(left, 'message')} still.")
