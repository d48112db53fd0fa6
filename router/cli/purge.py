"""`anabranch purge`: remove the messages of a queue."""

from __future__ import annotations

import click

from ...policies.config import Config
from ...policies.text import count_of
from .directory import on_directory, opened
from .messages import confirm, queue_in, yes_option
from .output import echo_json, json_option


@click.command()
@on_directory("QUEUE")
@yes_option
@json_option
def command(config: Config, queue: str, yes: bool, as_json: bool) -> None:
    """Remove all messages of a queue, which stays.

    The command asks first, and says how many messages there are. --yes does not ask, and is needed where there is no
    terminal. Messages that a prepared transaction has claimed stay. All others are gone for good: `move` puts them
    elsewhere instead.

    \b
    Example:
      anabranch purge data orders
      anabranch purge data orders --yes --json
    """
    with opened(config) as router:
        target = queue_in(router, queue, loses=True)
        count = target.depth()
        if count:
            confirm(f"Remove {count_of(count, 'message')} of {target.destination} in {config.directory}?", yes)
        removed = target.purge()
        left = target.depth()
    if as_json:
        echo_json({"queue": str(target.destination), "removed": removed, "left": left})
    else:
        click.echo(f"{count_of(removed, 'message')} of {target.destination} removed; {left:,} left.")
