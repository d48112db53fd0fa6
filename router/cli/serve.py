"""`anabranch serve`: owns a data directory, for any number of processes that share it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import click

from ...policies.config import Config
from ...policies.errors import StoreFailedError, StoreLockedError
from ..placement.on_disk.in_force import configuration_of
from ..router import Router
from ..sharing import starting
from ..sharing.owner.server import Server
from .directory import on_directory, opened
from .output import Seconds

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often a thread that only waits looks whether a signal has come: one that comes just as it begins to wait does not
wake it."""


@click.command()
@on_directory()
@click.option(
    "--linger",
    type=Seconds(min=0),
    metavar="SECONDS",
    help="End so long after the last client has gone. Without it: never by itself.",
)
@click.option("--tell", type=int, hidden=True)
@click.option("--after", type=int, hidden=True)
def serve_command(config: Config, linger: float | None, tell: int | None, after: int | None) -> None:
    """Own a data directory, and serve the processes that share it.

    Any number of processes of this user open the directory with anabranch.open(DIR, shared=True); the first of them
    starts this command by itself, with --linger 10, if nobody has. Run it yourself, under systemd say, where the owner
    is to stay, and its log is to be seen. SIGTERM and Ctrl-C end it once what is in hand is done; clients then start
    another.

    \b
    Example:
      anabranch serve data
      anabranch serve -c stores.yaml
    """
    if tell is not None or after is not None:
        os.chdir("/")  # which keeps no file system in use
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    place = None
    if after is not None:
        place = starting.stands_by(config, after)
        if place is None:
            return
        config = configuration_of(config.file or config.directory)  # as it is now
    try:
        with _opened(config, starting.SUCCESSION_SECONDS if place is not None else 0) as router:
            server = router.serve(linger)
            assert isinstance(server, Server)
            server.holds_start = True
            log.info("process %d serves %s", os.getpid(), config.directory)
            if tell is not None:
                starting.tell(tell, None)
            if place is not None:
                os.close(place)
            successor = starting.Successor(config, linger or 0) if tell is not None or place is not None else None
            try:
                while not server.wait(LOOK_SECONDS):
                    pass
            finally:
                if successor is not None and server.failure is None:
                    successor.dismiss()
    except Exception as error:
        if tell is not None:
            starting.tell(tell, error)
        raise
    if server.failure is not None:
        raise StoreFailedError(f"the server has ended: {server.failure}") from server.failure


@contextmanager
def _opened(config: Config, seconds: float) -> Iterator[Router]:
    """Open the directory in the block, once the process that had it has gone, for so long."""
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        while True:
            try:
                router = stack.enter_context(opened(config, create=True, quiet=True, alone=True))
                break
            except StoreLockedError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.002)
        yield router
