"""The process of an owner: `anabranch serve` in the foreground, or one that a client has started, with a successor."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from typing import TYPE_CHECKING, Final

from ....adapters.system.files import disk_errors
from ....adapters.system.signals import ended_by_signals, exit_code
from ....policies.config.adapters import load_adapter
from ....policies.errors import AnabranchError, StoreLockedError
from ...placement.on_disk.in_force import bytes_of, configuration_of
from ...router import Router
from ..starting import SUCCESSION_SECONDS, Successor, hold_place, tell
from .control import ControlSocket
from .server import Server

if TYPE_CHECKING:
    from ....policies.config import Config

log: logging.Logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often a thread that only waits looks whether a signal has come: one that comes just as it begins to wait does not
wake it."""


def log_to_stderr() -> None:
    """Write what is logged to stderr, each line with its time."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)


def own(
    config: Config, linger: float | None, patience: float = 0, serving: Callable[[], object] = bool
) -> BaseException | None:
    """Own a directory, and serve its clients, until that ends; returns the defect that has ended it, if one has.

    `serving` is called once clients can come. Another owner is waited for `patience` seconds. Raises as Router.open.
    """
    with _opened(config, patience) as router:
        server = router.serve(linger)
        assert isinstance(server, Server)
        server.holds_start = True
        log.info("process %d serves %s", os.getpid(), config.directory)
        serving()
        while not server.wait(LOOK_SECONDS):
            pass
    return server.failure


@contextmanager
def _opened(config: Config, patience: float) -> Iterator[Router]:
    deadline = time.monotonic() + patience
    while True:
        try:
            router = Router(config)
            router._let_in = partial(ControlSocket, listens=False)  # type: ignore[method-assign]
            router.open()
            break
        except StoreLockedError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.002)
    with router:
        yield router


def main(source: str, linger: str, fd: str) -> int:
    """Own a directory as the client wants who has started this process, and waits for word of it at a descriptor;
    returns the exit code."""
    ended_by_signals()
    os.chdir("/")  # which keeps no file system in use
    log_to_stderr()
    try:
        with FileIO(int(fd), "w") as told:
            return _own_in_turn(source, float(linger), told)
    except KeyboardInterrupt as interrupt:
        return exit_code(interrupt)


def _tell_that_it_serves(told: FileIO, successor: Successor) -> None:
    tell(told, None)
    successor.owner_serves()


def _load_adapters(config: Config) -> None:
    """Load what the stores open with: a successor has what is loaded before it is forked."""
    for store in {store.kind: store for store in config.stores}.values():
        check = getattr(load_adapter(store.kind), "check_options", None)
        if check is not None:
            with suppress(AnabranchError):  # whoever opens the store is told
                check(store.options)


def _own_in_turn(source: str, linger: float, told: FileIO) -> int:
    successor, failure, patience = None, None, 0.0
    try:
        read = bytes_of(source)
        config = configuration_of(source)
        _load_adapters(config)
        gc.collect()
        gc.freeze()  # all of it stays, so that no collection looks at it again while a successor opens
        with disk_errors(f"no owner of {config.directory} can be started"):
            hold_place(config.directory)
        while (successor := Successor.forked(told)) is None:  # this process is that one, and its owner has ended
            patience = SUCCESSION_SECONDS
        if patience and (read is None or bytes_of(source) != read):
            config = configuration_of(source)  # as it is now
        failure = own(config, linger, patience, partial(_tell_that_it_serves, told, successor))
        if failure is None:
            return 0
        log.error("the server has ended: %s", failure)
    except StoreLockedError as error:
        tell(told, error)
        log.info("no owner is needed: %s", error)
    except (AnabranchError, OSError) as error:
        tell(told, error)
        log.error("%s", "; ".join([*str(error).splitlines(), *getattr(error, "__notes__", ())]))
    except Exception as error:
        tell(told, error)
        log.exception("the owner of %s has failed", source)
    finally:
        if successor is not None and failure is None:
            successor.dismiss()
    return 1
