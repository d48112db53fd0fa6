"""A pgbouncer of the tests' own, between a store and its server."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from ..contract.disk import PATIENCE, eventually
from .server import free_port

LEFT_OUT: Final = "NO PGBOUNCER (apt-get install pgbouncer): what it would prove stays unproved"


def binary() -> str | None:
    """Return pgbouncer's path; None without one."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")


def asks_for_one(item: pytest.Item) -> bool:
    """Return whether a test needs one."""
    return "pool_mode" in getattr(item, "fixturenames", ())


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def pooler(home: Path, port: int, mode: str, user: str, password: str) -> Iterator[int]:
    """Yield the port of one that leads to a server's, for one user."""
    mine = free_port()
    home.mkdir()
    (home / "users").write_text(f'"{user}" "{password}"\n')
    (home / "ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {mine}\n"
        f"unix_socket_dir =\nauth_type = plain\nauth_file = {home / 'users'}\npool_mode = {mode}\n"
        f"logfile = {home / 'log'}\nignore_startup_parameters = extra_float_digits\n"
    )
    for path in (home, *home.iterdir(), *list(home.parents)[:3]):
        path.chmod(0o777)  # it does not run as root
    process = subprocess.Popen(
        [str(binary()), "-q", "-u", "nobody", str(home / "ini")], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        eventually(lambda: _listens(mine))
        yield mine
    finally:
        process.terminate()
        process.wait(PATIENCE)
