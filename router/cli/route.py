"""`anabranch route`: which store a destination goes to, and why."""

from __future__ import annotations

from pathlib import Path

import click

from ...policies.errors import NoRouteError
from ...policies.names.destination import Destination, wildcard_in
from .directory import named
from .output import config_option, echo_json, json_option


@click.command()
@click.argument("name")
@config_option
@json_option
def command(name: str, config_path: Path, as_json: bool) -> None:
    """Say which store a destination goes to, and why.

    NAME is queue://..., topic://... or map://...; a bare name is a queue. Every pattern that matches it is listed,
    the winner first, with the reason why each stands where it stands.

    \b
    Example:
      anabranch route --config stores.yaml orders.custom
      anabranch route -c data --json topic://ticks.eu
    """
    destination = Destination.parse(name)
    wildcard = wildcard_in(destination.name)
    if wildcard is not None:
        click.echo(
            f"Warning: {destination} holds the wildcard {wildcard}, which only patterns have; the answer is for a "
            "destination that is really named so",
            err=True,
        )
    routes = named(config_path).routes()
    matches = routes.matches(destination)
    if not matches:
        nearest = ", ".join(routes.nearest(destination))
        raise NoRouteError(f"no pattern in {config_path} matches {destination}; the closest are: {nearest}")
    winner = matches[0]
    if as_json:
        rows = [{"store": m.target.name, "pattern": m.pattern.text, "reason": m.reason} for m in matches]
        echo_json(
            {
                "destination": str(destination),
                "store": winner.target.name,
                "pattern": winner.pattern.text,
                "per_destination": winner.target.per_destination,
                "matches": rows,
            }
        )
        return
    own = " (a store of its own there)" if winner.target.per_destination else ""
    click.echo(f"{destination} goes to store {winner.target.name}{own} by pattern {winner.pattern.text}")
    width = max(len(match.pattern.text) for match in matches)
    store_width = max(len(match.target.name) for match in matches)
    for match in matches:
        click.echo(f"  {match.pattern.text:{width}}  {match.target.name:{store_width}}  {match.reason}")
