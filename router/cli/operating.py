"""Commands for who operates a data directory: `serve`, which owns it for the processes that share it, and `verify`."""

from __future__ import annotations

from pathlib import Path

import click

from ...policies.config import Config, load
from ...policies.errors import StoreFailedError
from ...policies.text import count_of
from ..offline.verification import verify
from ..placement.on_disk.in_force import known_configuration
from ..sharing.owner.process import log_to_stderr, own
from .directory import on_directory
from .output import LocalPath, Seconds, config_file, echo_result, echo_warnings, json_option, working


@click.command()
@on_directory()
@click.option(
    "--linger",
    type=Seconds(min=0),
    metavar="SECONDS",
    help="End so long after the last client has gone. Without it: never by itself.",
)
def serve_command(config: Config, linger: float | None) -> None:
    """Own a data directory, and serve the processes that share it.

    Any number of processes of this user open the directory with anabranch.open(DIR, shared=True); the first of them
    starts an owner by itself, which lingers for 10 seconds, if there is none. Run this command, under systemd say,
    where the owner is to stay, and its log is to be seen. SIGTERM and Ctrl-C end it once what is in hand is done;
    clients then start another.

    \b
    Example:
      anabranch serve data
      anabranch serve -c stores.yaml
    """
    log_to_stderr()
    failure = own(config, linger)
    if failure is not None:
        raise StoreFailedError(f"the server has ended: {failure}") from failure


@click.command()
@click.argument("directory", type=LocalPath(), metavar="DIR")
@config_file("Anabranch's configuration of DIR, where that does not say it itself.")
@json_option
@click.pass_context
def verify_command(ctx: click.Context, directory: Path, config_path: Path | None, as_json: bool) -> None:
    """Compare every byte of DIR that has a checksum with it.

    DIR is a data directory, or that of one journal store. It is only read, and no process may have it open. Each damage
    is told with its file, the offset, what is lost by it, and what to do.

    A journal is read where it lies. A copy of its index, and of a store in SQLite, is made in the directory for
    temporary files (TMPDIR). What lies in a database elsewhere is not read, which is said. The exit code is 1 where
    anything is damaged.

    \b
    Example:
      anabranch verify data
      anabranch verify data/stores/orders --json
    """
    given = load(config_path, names_suffice=True) if config_path is not None else None
    config = given or known_configuration(directory.absolute())
    with working(f"Reading {directory.absolute().name}") as progress:
        found = verify(directory, config, lambda what, done, total: progress.stage(what, done / total if total else 0))
    lines = [f"{one.path} at offset {one.offset}: {one.reason}\n  lost: {one.lost}" for one in found.damages]
    names = ", ".join(found.stores) or "none"
    if found.damages:
        lines.append(
            f"{count_of(len(found.damages), 'place')} damaged. Restore {directory} from a backup, all of it from one "
            f"moment; or make a directory of all that can be read: anabranch salvage {directory} --to NEW. Where "
            "nothing is lost the next open mends it."
        )
    else:
        lines.append(f"{directory} is whole. Stores that were verified: {names}.")
    echo_warnings(found.notes)
    echo_result(
        as_json,
        {
            "directory": found.directory,
            "stores": found.stores,
            "damages": [damage._asdict() for damage in found.damages],
            "notes": found.notes,
        },
        *lines,
    )
    if found.damages:
        ctx.exit(1)
