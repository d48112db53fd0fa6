"""`anabranch repartition`: move what a data directory holds to where a new configuration routes it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...policies.text import count_of, human_bytes
from .output import LocalPath, echo_json, echo_table, json_option, warnings_shown, working

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..migration.plan import Move


@click.command()
@click.argument("directory", type=LocalPath(), metavar="DIR")
@click.option("--config", "-c", "config_path", type=LocalPath(), required=True, metavar="NEW",
              help="The configuration to move to.")  # fmt: skip
@click.option("--old", "old_path", type=LocalPath(), metavar="FILE",
              help="The configuration until now, where DIR does not say it: one with secrets, or of an interrupted "
              "run. Only for stores that NEW does not have and that do not open with defaults.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would move, and change nothing.")
@click.option("--restart", is_flag=True,
              help="Move to NEW though an interrupted run was moving to another configuration.")  # fmt: skip
@json_option
def command(
    directory: Path, config_path: Path, old_path: Path | None, dry_run: bool, restart: bool, as_json: bool
) -> None:
    """Move what a data directory holds to where NEW routes it.

    NEW is a configuration of the data directory DIR, which no other process may have open. Messages keep their order,
    ids, headers, priorities, times and counts of deliveries. Durable subscriptions and duplicate windows come along.
    Each destination is copied. Both copies are compared by count and digest, and only then the old one goes. A store
    that is empty then and not in NEW is removed.

    After a crash, or an error, run the command again with the same NEW: it goes on where it was. Until it is done no
    router opens DIR. There must be room on the disk for a second copy of the largest destination.

    A dry run looks at copies of the stores that messages would leave, one at a time, in the directory for temporary
    files (TMPDIR).

    \b
    Example:
      anabranch repartition --config new.yaml --dry-run data
      anabranch repartition --config new.yaml data
    """
    from ...policies.config import load
    from ...policies.errors import ConfigError
    from ..migration.plan import plan_of
    from ..offline.repartition import repartition

    config, before = load(config_path), load(old_path) if old_path is not None else None
    if directory.resolve() != config.directory.resolve():
        raise ConfigError(
            [
                f"{config_path} has the data directory {config.directory}, and DIR is {directory.absolute()}; write "
                f"`directory: {directory.absolute()}` into the file, or give the other DIR"
            ]
        )
    removed: tuple[str, ...] = ()
    if dry_run:
        with warnings_shown(), working(f"Looking at {directory.name}"):
            moves = plan_of(config, before, restart)
    else:
        with warnings_shown(), working(f"Moving {directory.name}") as progress:
            done = repartition(config, before, restart, str(config_path), progress)
        moves, removed = done.moves, done.removed
    if as_json:
        shown = [asdict(move) | {"destination": str(move.destination)} for move in moves]
        echo_json({"directory": str(config.directory), "dry_run": dry_run, "moves": shown, "removed": list(removed)})
        return
    if not moves:
        click.echo(f"Nothing to move: everything in {config.directory} lies where {config_path} routes it.")
    else:
        _print(moves, dry_run)
    for name in removed:
        click.echo(f"Store {name} is empty and not in {config_path}: removed with its directory.")


def _print(moves: Sequence[Move], dry_run: bool) -> None:
    rows = [("destination", "from", "to", "messages", "bytes", "subscriptions")]
    for move in moves:
        shown = str(move.destination), move.source, move.target
        rows.append((*shown, f"{move.messages:,}", human_bytes(move.bytes), f"{move.subscriptions:,}"))
    echo_table(rows, left=(0, 1, 2))
    count, size = sum(move.messages for move in moves), sum(move.bytes for move in moves)
    verb = "would move" if dry_run else "moved"
    what = f"{count_of(len(moves), 'destination')}, {count_of(count, 'message')}, {human_bytes(size)}"
    click.echo(f"{what} {verb}.")
