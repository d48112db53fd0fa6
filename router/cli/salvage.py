"""`anabranch salvage`: what can be read of a damaged directory, as a new one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...policies.text import count_of, human_bytes
from .output import LocalPath, echo_json, json_option, working

if TYPE_CHECKING:
    from ...policies.config import Config
    from ..upkeep.salvage import Salvaged

SHOWN = 20
"""Lost messages that are printed of each store; the report has all."""


@click.command()
@click.argument("directory", type=LocalPath(), metavar="DIR")
@click.option("--to", "target", type=LocalPath(), required=True, metavar="NEW", help="The directory to make.")
@click.option(
    "--config",
    "-c",
    "config_path",
    type=LocalPath(),
    help="Anabranch's configuration of DIR, where indexes lie elsewhere.",
)
@json_option
def command(directory: Path, target: Path, config_path: Path | None, as_json: bool) -> None:
    """Make NEW of all that can be read of the damaged DIR.

    DIR is a data directory, or that of one journal store. Nothing is written to DIR, and no process may have it open.
    NEW takes as much room as DIR. It is there once it is whole. A damaged message costs that message alone.
    NEW/salvage.json, and the loss-*.json of each store, name what is lost: destination, seq and id. Look at them, then
    put NEW where DIR was, and open it as always.

    The exit code is 0 also where something is lost: the output says so.

    \b
    Example:
      anabranch salvage data --to data.new
      anabranch salvage data/stores/orders --to orders.new
    """
    from ...policies.config import load
    from ..placement.in_force import known_configuration
    from ..upkeep.salvage import salvage

    if config_path is not None:
        config: Config | None = load(config_path, names_suffice=True)
    else:
        config = known_configuration(directory.absolute())
    with working(f"Reading {directory.absolute().name}"):
        found = salvage(directory, target, config)
    if as_json:
        echo_json(asdict(found))
    else:
        click.echo("\n".join(_lines(found)))


def _lines(found: Salvaged) -> list[str]:
    lines = [f"{found.directory} holds all that can be read."]
    for store in found.stores:
        lines.append(f"  {store.directory}: {count_of(store.messages, 'message')}; {store.text}")
        lost = store.loss["messages"] if store.loss is not None else []
        for message in lost[:SHOWN]:
            named = f", id {message['message_id']}" if message["message_id"] is not None else ""
            lines.append(f"    lost: seq {message['seq']} of {message['destination']}{named}")
        if len(lost) > SHOWN:
            lines.append(f"    and {len(lost) - SHOWN} more: see {found.directory}/salvage.json")
    for path, lost_bytes in found.unreadable.items():
        lines.append(f"  {path}: the disk did not give {human_bytes(lost_bytes)} of it")
    lines += [f"  {note}" for note in found.notes]
    return lines
