"""`anabranch delete`: remove a queue, a topic or a map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ...policies.config import Config
from ...policies.names.destination import Kind
from ...policies.text import count_of
from .directory import on_directory, opened
from .messages import confirm, destination_in, require_known, yes_option
from .output import echo_json, json_option

if TYPE_CHECKING:
    from ...policies.names.destination import Destination
    from ..router import Router


@click.command()
@on_directory("NAME")
@yes_option
@json_option
def command(config: Config, name: str, yes: bool, as_json: bool) -> None:
    """Remove a queue, a topic or a map, with all in it.

    It asks first, and says how many messages and durable subscriptions go with it; --yes does not ask, and is needed
    where there is no terminal. What is sent there later makes it anew.

    \b
    Example:
      anabranch delete data orders.old
      anabranch delete data topic://prices --yes
    """
    with opened(config) as router:
        destination = destination_in(name)
        require_known(router, destination, loses=True)
        confirm(f"Delete {destination} in {config.directory}, {_held(router, destination)}?", yes)
        removed = router.delete(destination)
    if as_json:
        echo_json({"destination": str(destination), "removed": removed})
    else:
        click.echo(f"{destination} deleted, with {count_of(removed, 'message')}.")


def _held(router: Router, destination: Destination) -> str:
    from ..router import inspection_of

    count = inspection_of(router).depth(destination)
    if destination.kind is Kind.MAP:
        return f"with {count_of(count, 'value')}"
    held = f"with {count_of(count, 'message')}"
    if destination.kind is Kind.TOPIC:
        held += f" and {count_of(len(router.topic(destination).subscriptions()), 'durable subscription')}"
    return held
