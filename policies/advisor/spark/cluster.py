"""A check that the cluster of a Spark master's URL can be there, before Spark waits for it.

Spark's own client tries an absent master for a minute and answers with a page of Java. Here its form is checked, its
ports are tried, and whoever waits is told after some seconds for what.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from ...errors import ConfigError, SparkError

logger: logging.Logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
PATIENCE_S: Final = 8.0
"""After so long without an answer whoever waits is told."""

_LOCAL = re.compile(r"local(\[(\*|[1-9]\d*)(, *[1-9]\d*)?\])?|local-cluster\[.+\]")
_DEFAULT_PORTS: Final = {"spark": 7077, "https": 443, "http": 80}


def is_local(master: str) -> bool:
    """Tell whether all of Spark runs on this machine."""
    return master.startswith("local")


def check_master(master: str) -> None:
    """Raise ConfigError for what is no master's URL, SparkError where none of a master's addresses answers.

    It takes 5 seconds at most, and what the system takes to resolve a name. That somebody listens there does not say
    that it is Spark.
    """
    addresses = _addresses(master)
    if not addresses:
        return
    with ThreadPoolExecutor(len(addresses)) as pool:
        reasons = list(pool.map(_try, addresses))
    if None not in reasons:
        told = "; ".join(f"{host}:{port}: {why}" for (host, port), why in zip(addresses, reasons, strict=True))
        raise SparkError(
            f"no Spark cluster answers at --master {master} ({told}); start it, or correct the URL, or leave --master "
            "out to use this machine"
        )


def _addresses(master: str) -> list[tuple[str, int]]:
    """Return host and port of each of a master's addresses; none where there is nothing to try beforehand."""
    forms = "local[*], spark://host:7077, k8s://https://host:443 or yarn"
    if is_local(master):
        if not _LOCAL.fullmatch(master):
            raise ConfigError([f"--master {master} is not a Spark master; expected {forms}"])
        return []
    if master == "yarn":
        if not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"} & os.environ.keys():
            raise ConfigError(["--master yarn needs the cluster's configuration: set HADOOP_CONF_DIR to its directory"])
        return []
    scheme, _, rest = master.partition("://")
    default = scheme
    if scheme == "k8s":
        default, _, rest = rest.rpartition("://")
        default = default or "https"
    found = []
    for address in rest.split(","):
        host, port = _split(address.rstrip("/"), _DEFAULT_PORTS.get(default, 0))
        if scheme not in ("spark", "k8s") or not host or not 0 < port < 65536:
            raise ConfigError([f"--master {master} is not a Spark master; expected {forms}"])
        found.append((host, port))
    return found


def _split(address: str, default: int) -> tuple[str, int]:
    """Return host and port; port 0 where it is not a number."""
    match = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(\d+))?|([^:/\s]+)(?::(\d+))?", address)
    if match is None:
        return address, 0
    return match[1] or match[3], int(match[2] or match[4] or default)


def _try(address: tuple[str, int]) -> str | None:
    """Say why nobody can be reached there; None where somebody can."""
    try:
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


@contextmanager
def warned_of_waiting(what: str, waits: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Log a warning, once, if the block takes longer than some seconds and `waits` says that it is waiting."""

    def tell() -> None:
        try:
            if waits():
                logger.warning("%s", what)
        except Exception:  # asked of a Spark that is going away
            logger.debug("cannot tell whether it waits", exc_info=True)

    timer = threading.Timer(PATIENCE_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
