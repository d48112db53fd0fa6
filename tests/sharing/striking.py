"""Owners that die at a place of the test's choice: before they have done what a client asks, once it is written and not
answered, and once it is answered; or at a step of a commit.

    def test_it(striking: Striking): ...
        with striking.client() as router:
            striking.aim("before", Op.SEND)
            router.queue("q").send(b"x")          # the first owner dies of it; the second one does it
            striking.died()

They are forked by a server that has the product loaded, so that one begins in some milliseconds.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.service.transactions import Step
from anabranch.adapters.system.conditions import Thread
from anabranch.policies.config import Config
from anabranch.policies.errors import StoreLockedError
from anabranch.router.router import Router
from anabranch.router.sharing import clients, starting
from anabranch.router.sharing.owner import presence
from anabranch.router.sharing.owner.control import ControlSocket
from anabranch.router.sharing.owner.server import Server
from anabranch.router.sharing.owner.session import Session
from anabranch.router.sharing.protocol import Request, pack_error, unpack, unpack_error

from ..children import CONTEXT
from ..contract.disk import eventually
from ..crash.steps import Steps
from .peers import Op, tag_of

MOMENTS = ("before", "written", "answered")
STEPS = ("killed", "killed-after")
"""Before a step of a transaction, and after it."""
PATIENCE = 60.0


@dataclass(frozen=True)
class Strike:
    """An owner dies at the `at`-th request of this op, or of this call's name; or at the `at`-th of STEPS."""

    moment: str
    op: int
    name: str = ""
    at: int = 1
    cuts: bool = False
    """It lives on, and the client's connection ends."""

    def matches(self, request: Request) -> bool:
        """Return whether it is a request of that kind."""
        return tag_of(type(request)) == self.op and (not self.name or getattr(request, "name", "") == self.name)


def _aim(strike: Strike) -> None:
    """Let this process, an owner, die so."""
    if strike.moment in STEPS:
        steps = Steps(strike.moment, strike.at)
        steps.wrap_all()
        steps.wrap(Step, "wait")
        return
    marked: set[tuple[int, int]] = set()
    count = 0

    def end(session: Session) -> None:
        if not strike.cuts:
            os.kill(os.getpid(), signal.SIGKILL)
        marked.clear()
        session.sock.shutdown(socket.SHUT_RDWR)

    read, send = Session.read, Session.send

    def struck_read(session: Session) -> list[tuple[int, Request]]:
        nonlocal count
        requests = read(session)
        for place, (number, request) in enumerate(requests):
            if strike.matches(request):
                count += 1
                if count == strike.at:
                    if strike.moment == "before":
                        end(session)
                        return requests[:place]
                    marked.add((id(session), number))
                    if strike.moment == "waiting":  # the next request is not done any more, nor the next round
                        del requests[place + 1 :]
        return requests

    def struck_send(session: Session, frames: bytes, answered: int = 0) -> None:
        hit = any((id(session), number) in marked for number, *_ in unpack(bytearray(frames)))
        if hit and strike.moment == "written":
            end(session)
        send(session, frames, answered)
        if hit and strike.moment == "answered":
            end(session)

    Session.read = struck_read  # type: ignore[method-assign,assignment]
    Session.send = struck_send  # type: ignore[method-assign,assignment]
    if strike.moment == "waiting":
        round_ = Server._round

        def struck_round(server: Server, requests: list[Any]) -> None:
            round_(server, requests)
            if marked:
                end(next(iter(server._sessions.values())))

        Server._round = struck_round  # type: ignore[method-assign,assignment]


def _serve(config: Config, linger: float | None, grace: float, told: Connection) -> None:
    os.setsid()
    vars(presence)["GRACE_SECONDS"] = grace
    try:
        with _opened(config) as router:
            server = router.serve(linger)
            told.send(None)
            Thread(_take_aim, "aim", (told,)).start()
            server.wait()
    except Exception as error:
        told.send(pack_error(error))


def _opened(config: Config) -> Router:
    """Open the router, as the process of an owner does, once the owner before, which was just killed, has let go of its
    lock."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            router = Router(config)
            router._let_in = partial(ControlSocket, listens=False)  # type: ignore[method-assign]
            return router.open()
        except StoreLockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _take_aim(told: Connection) -> None:
    with suppress(EOFError, OSError):
        while True:
            _aim(told.recv())
            told.send(None)


def stopped(pid: int) -> int:
    """Stop a process, and wait until all of its threads are stopped: some may go on for a while. Returns its pid."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    eventually(lambda: all(") T " in (one / "stat").read_text() for one in threads.iterdir()), lambda: "it runs")
    return pid


class Striking:
    """Starts owners of one directory for the clients of this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source: Any = directory
        self.linger: float | None = None
        self.grace = clients.GRACE_SECONDS
        self.owners: list[BaseProcess] = []
        self._told: list[Connection] = []
        self._aimed: BaseProcess | None = None

    def configure(self, *stores: anabranch.StoreConfig) -> None:
        """Let the directory have these stores."""
        self.source = anabranch.Config(self.directory, stores)

    def aim(self, moment: str, op: Op, name: str = "", at: int = 1, cuts: bool = False) -> None:
        """Let the owner that is there die so, or cut a connection."""
        self._aimed = self.owners[-1]
        self._told[-1].send(Strike(moment, int(op), name, at, cuts))
        self._told[-1].recv()

    def aim_at_step(self, moment: str, at: int) -> None:
        """Let the owner that is there die at a step of transactions, of those from now on."""
        self._told[-1].send(Strike(moment, 0, at=at))
        self._told[-1].recv()

    def stop(self) -> int:
        """Stop the owner that is there, with all of its threads; returns its pid."""
        return stopped(self.owners[-1].pid or 0)

    def died(self) -> None:
        """Wait until the owner that was aimed at has died."""
        assert self._aimed is not None
        self._aimed.join(PATIENCE)
        assert not self._aimed.is_alive()

    def spawn(self, config: Config) -> None:
        """Start an owner, as starting._tell_start."""
        mine, its = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(config, self.linger, self.grace, its))
        process.start()
        its.close()
        self.owners.append(process)
        self._told.append(mine)
        said = None
        with suppress(EOFError):
            said = mine.recv() if mine.poll(PATIENCE) else None
        if said is not None:
            raise unpack_error(said)

    @contextmanager
    def client(self) -> Iterator[anabranch.Router]:
        """Open a client in this process."""
        with anabranch.open(self.source, shared=True) as router:
            yield router

    def kill(self) -> None:
        """Kill the owner that is there, and wait for its end."""
        self.owners[-1].kill()
        self.owners[-1].join(PATIENCE)

    def cpu(self) -> float:
        """Return the seconds of CPU that the owner has used."""
        fields = Path(f"/proc/{self.owners[-1].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Return the bytes of memory that the owner has at most had resident."""
        status = Path(f"/proc/{self.owners[-1].pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    def end(self) -> None:
        """Kill all of them."""
        for process in self.owners:
            process.kill()
        for process in self.owners:
            process.join(PATIENCE)
            process.close()
        for told in self._told:
            told.close()


@contextmanager
def owners_of(directory: Path) -> Iterator[Striking]:
    """Start owners of a directory that is yet to be made, for the clients of this process."""
    given = Striking(directory)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(starting, "_tell_start", given.spawn)
        try:
            yield given
        finally:
            given.end()


def owners(tmp_path: Path) -> Iterator[Striking]:
    """Yield the owners of a directory that is yet to be made: for a fixture."""
    with owners_of(tmp_path / "data") as given:
        yield given
