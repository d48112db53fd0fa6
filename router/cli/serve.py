"""`anabranch serve`: owns a data directory, for any number of processes that share it."""

from __future__ import annotations

import click

from ...policies.config import Config
from ...policies.errors import StoreFailedError
from ..sharing.owner.process import log_to_stderr, own
from .directory import on_directory
from .output import Seconds


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
