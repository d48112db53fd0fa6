"""`anabranch requeue`: dead letters go back where they came from."""

from __future__ import annotations

from contextlib import suppress

import click

from ...policies.config import Config
from ...policies.errors import NoRouteError
from ...policies.text import count_of
from .directory import on_directory, opened
from .messages import queue_in, require_lasting
from .output import echo_json, json_option


@click.command()
@on_directory("QUEUE")
@click.option("--limit", "-n", type=click.IntRange(min=1), metavar="N", help="Put so many back; else all.")
@json_option
def command(config: Config, queue: str, limit: int | None, as_json: bool) -> None:
    """Put the dead letters of a queue back where they came from.

    QUEUE is the dead-letter queue: the one that `dead_letter:` names in the configuration. Each letter has its message
    id, its headers and its priority again, and its count of deliveries begins anew. The command puts back up to 100
    letters in one transaction. Letters that were put back before an error stay so. Nothing is lost, so the command does
    not ask.

    \b
    Example:
      anabranch requeue data dlq
      anabranch requeue data dlq --limit 10 --json
    """
    from ..api.dead_letter import dead_letter_of

    with opened(config) as router:
        letters = queue_in(router, queue)
        sources = {letter.source for one in letters.browse(limit) if (letter := dead_letter_of(one)) is not None}
        for source in sources:
            with suppress(NoRouteError):  # said when it is its turn
                require_lasting(router, source)
        done = router.requeue(letters, limit)
        left = letters.depth()
    if as_json:
        echo_json({"queue": str(letters.destination), "requeued": done, "left": left})
    else:
        click.echo(f"{count_of(done, 'dead letter')} of {letters.destination} put back; {left:,} left.")
