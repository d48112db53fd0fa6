"""A PostgreSQL server of the tests' own: Debian's binaries, a temporary directory, a free loopback port.

    with PostgresServer() as server:
        url = server.new_database()          # postgresql+psycopg://anabranch:...@127.0.0.1:.../test_1
        server.stop("immediate"); server.start()

Nothing of it survives whoever started it, not even after a SIGKILL: a watcher process then stops the server and
removes its directory. fsync is on, as on a server that one would trust.
"""

from __future__ import annotations

import itertools
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from ..places import in_memory

NAMED: Final = "ANABRANCH_TEST_POSTGRES"
"""The variable of the environment with the directory of another server's programs."""
ROLE: Final = "anabranch"
PATIENCE: Final = 120.0
"""Seconds that the server gets to start or stop."""
STOPS: Final = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
SETTINGS: Final = {
    "fsync": "on",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    "timezone": "UTC",
}
PORTS: Final = range(20_000, 32_000)
"""Below those that the system hands out: one who connects to such a port while the server is down can meet himself."""

_WATCHER: Final = """
import os, shutil, signal, sys, time
directory, pid = sys.argv[1], 0
for line in sys.stdin:
    pid = int(line)
if pid:
    try:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGQUIT)
        for _ in range(3000):
            if not os.path.exists(directory + "/data/postmaster.pid"):
                break
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
shutil.rmtree(directory, ignore_errors=True)
"""


def binaries() -> Path | None:
    """The directory with `postgres` and `initdb`: that which NAMED says, else of the newest version here; None without
    one."""
    if named := os.environ.get(NAMED):
        if not Path(named, "postgres").is_file():
            raise FileNotFoundError(f"{NAMED}={named}: no `postgres` is there; name the directory of the programs")
        return Path(named)
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if found:
        return max(found, key=lambda path: float(path.parent.name))
    on_path = shutil.which("postgres")
    return Path(on_path).resolve().parent if on_path and shutil.which("initdb") else None


class PostgresServer:
    """One server. `start` and what stops it may be called in turn, by one thread at a time."""

    def __init__(
        self, base: Path | None = None, primary: PostgresServer | None = None, settings: Mapping[str, str] = SETTINGS
    ) -> None:
        """`base`: where its directory is made (default: the system's temporary directory); users of other names have
        to be able to get there. `primary`: the server whose standby it is, by streaming replication."""
        found = binaries()
        if found is None:
            raise FileNotFoundError("no PostgreSQL server is installed (on Debian: apt-get install postgresql)")
        self._bin, self._settings = found, settings
        self.password: str = primary.password if primary is not None else secrets.token_hex(16)
        self.directory = Path(tempfile.mkdtemp(prefix="anabranch-pg-", dir=base))
        self._data = self.directory / "data"
        self._log = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._shared: str | None = None
        self.port = 0
        self.environment: Mapping[str, str] = {}
        """What it is started with, beside ours."""
        # The server refuses to run as root.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            account = _unprivileged()
            os.chown(self.directory, account.pw_uid, account.pw_gid)
            self._user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self._watcher = subprocess.Popen(
            [sys.executable, "-c", _WATCHER, str(self.directory)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            if primary is None:
                self._make()
            else:
                self._copy(primary)
            self.start()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        password = self.directory / "password"
        password.write_text(self.password)
        if self._user:
            os.chown(password, self._user["user"], self._user["group"])
        options = ["--no-sync", "--encoding=UTF8", "--locale=C", f"--username={ROLE}", f"--pwfile={password}"]
        # SCRAM takes as long as all else that a connection does, and tests make thousands of them.
        command = [str(self._bin / "initdb"), "-D", str(self._data), "--auth=md5", *options]
        made = subprocess.run(command, capture_output=True, text=True, cwd=self.directory, **self._user)
        if made.returncode:
            raise RuntimeError(f"initdb failed:\n{made.stdout}{made.stderr}")
        password.unlink()

    def _copy(self, primary: PostgresServer) -> None:
        at = ["-h", "127.0.0.1", "-p", str(primary.port), "-U", ROLE]
        command = [str(self._bin / "pg_basebackup"), "-D", str(self._data), "-R", "--no-sync", "--checkpoint=fast", *at]
        environment = {**os.environ, "PGPASSWORD": self.password}
        made = subprocess.run(
            command, capture_output=True, text=True, cwd=self.directory, env=environment, check=False, **self._user
        )
        if made.returncode:
            raise RuntimeError(f"pg_basebackup failed:\n{made.stdout}{made.stderr}")

    def promote(self) -> None:
        """Make the primary of a standby; returns once it takes writes."""
        with self.connect() as connection:
            assert connection.execute("SELECT pg_promote(true, %s)", (round(PATIENCE),)).fetchone() == (True,)

    # Running and stopping

    @property
    def pid(self) -> int | None:
        """Of the postmaster, while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start it, on the same port as before, and wait until it takes connections."""
        assert self.pid is None, "the server runs already"
        tries = 3 if not self.port else 1
        for last in range(tries - 1, -1, -1):
            port = self.port or free_port()
            if self._started(port):
                self.port = port
                return
            if not last:
                raise RuntimeError(f"the server does not start:\n{self.log()[-4000:]}")

    def _started(self, port: int) -> bool:
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        place = ["-h", "127.0.0.1", "-p", str(port), "-k", str(self.directory)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, *place, *settings],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory, start_new_session=True,
                env={**os.environ, **self.environment}, **self._user,
            )  # fmt: skip
        assert self._watcher.stdin is not None
        self._watcher.stdin.write(b"%d\n" % self._process.pid)
        self._watcher.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._says_ready():
                return True
            time.sleep(0.01)
        return False

    def _says_ready(self) -> bool:
        """What pg_ctl looks at: the last line of the postmaster's file."""
        assert self._process is not None
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(self._process.pid) and lines[7].strip() == "ready"

    def stop(self, mode: str = "fast") -> None:
        """`smart` waits for its clients to go, `fast` sends them away, `immediate` is a crash."""
        if (pid := self.pid) is not None:
            os.kill(pid, STOPS[mode])
            self._gone()

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        if (pid := self.pid) is None:
            return
        os.kill(pid, signal.SIGSTOP)  # it would see its children die, and let no other be born
        family = [pid, *_children(pid)]
        for member in family:
            _signal(member, signal.SIGKILL)
        self._gone()
        deadline = time.monotonic() + PATIENCE
        while any(_is_alive(member) for member in family):
            assert time.monotonic() < deadline, "a killed server process does not die"
            time.sleep(0.005)

    def freeze(self) -> None:
        """All of its processes stand still, as if the machine had gone out of the network."""
        assert self.pid is not None
        for member in (self.pid, *_children(self.pid)):
            _signal(member, signal.SIGSTOP)

    def thaw(self) -> None:
        """They go on."""
        assert self.pid is not None
        for member in (self.pid, *_children(self.pid)):
            _signal(member, signal.SIGCONT)

    def _gone(self) -> None:
        assert self._process is not None
        self._process.wait(PATIENCE)

    def log(self) -> str:
        """What the server has said."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def close(self) -> None:
        """Stop it and remove all of it. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self.stop("immediate")
        if self._watcher.poll() is None and self._watcher.stdin is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Databases

    def url(self, database: str = "postgres", password: bool = True) -> str:
        """SQLAlchemy's URL of a database there."""
        secret = f":{self.password}" if password else ""
        return f"postgresql+psycopg://{ROLE}{secret}@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> Any:
        """A connection of psycopg's, in autocommit."""
        import psycopg

        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=ROLE, password=self.password, dbname=database, autocommit=True
        )

    def new_schema(self) -> str:
        """The URL of a schema of its own, empty, in a database that is shared with others; cheaper than a database."""
        if self._shared is None:
            self._shared = self.new_database().rsplit("/", 1)[1]
        name = f"test_{next(self._numbers)}"
        with self.connect(self._shared) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{self.url(self._shared)}?options=-csearch_path%3D{name}"

    def drop_schema(self, url: str) -> None:
        """Remove one with all that is in it. Waits for the transactions that use it."""
        assert self._shared is not None
        name = url.rsplit("%3D", 1)[1]
        assert name.startswith("test_"), name
        with self.connect(self._shared) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")

    def new_database(self) -> str:
        """An empty database of its own; its URL."""
        name = f"test_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Remove one, whoever is connected to it."""
        name = url.rsplit("/", 1)[1]
        assert name.startswith("test_"), name
        with self.connect() as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _unprivileged() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL does not run as root, and there is no other user to run it as")


def free_port() -> int:
    for port in random.sample(PORTS, 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


# For pytest: tests/conftest.py has them for all tests ----------------------------------------------------------------

LEFT_OUT: Final = "NO POSTGRESQL SERVER BINARY (apt-get install postgresql): what it would prove stays unproved"


def asks_for_one(item: pytest.Item) -> bool:
    """Whether a test needs a server."""
    return "postgres" in getattr(item, "fixturenames", ()) or "postgresql" in item.nodeid


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The session's server, in memory where that has room, since nobody cuts the power. Who stops it starts it
    again."""
    with PostgresServer(in_memory()) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """An empty schema of the test's own, on a server that runs: its URL, password included."""
    if postgres.pid is None:
        postgres.start()
    url = postgres.new_schema()
    yield url
    if postgres.pid is not None:
        postgres.drop_schema(url)
