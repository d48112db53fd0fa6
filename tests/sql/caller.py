"""Somebody who sells and sends in one transaction, as a process of its own that dies at a point of its choice.

It tells each name that it has committed, a line each, and `at POINT` when it is there. Then it waits to be killed.
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TextIO

import sqlalchemy
from pydantic import SecretStr
from sqlalchemy import event

import anabranch
from anabranch.adapters.core.features import outbox

from ..children import CONTEXT

POINTS: Final = ("written", "committing", "committed", "drained", "at work")
"""Its rows are there and nothing is committed; its COMMIT has been sent, perhaps; it is committed and nothing is
drained; all is done; whenever it is killed."""


def config(directory: Path, url: str) -> anabranch.Config:
    given: dict[str, Any] = {"pool_min": 0} if url.startswith("postgresql") else {}
    sql = anabranch.SqlOptions(url=SecretStr(url), **given)
    return anabranch.Config(directory, [anabranch.StoreConfig("s", [">"], sql=sql)])


def connected(url: str) -> sqlalchemy.Engine:
    """SQLite's busy clients wait; what is committed is durable."""
    engine = sqlalchemy.create_engine(url, connect_args={"timeout": 60} if url.startswith("sqlite") else {})
    if url.startswith("sqlite"):
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=FULL"))
    return engine


def work(directory: Path, url: str, point: str) -> None:
    if point == "committed":
        outbox.Outbox._drain_written = lambda *_: set()  # type: ignore[method-assign]
    engine = connected(url)
    sales = sqlalchemy.Table("sales", sqlalchemy.MetaData(), sqlalchemy.Column("name", sqlalchemy.String(20)))
    sales.metadata.create_all(engine)
    router = anabranch.open(config(directory, url))
    orders, done = router.queue("orders"), router.queue("done")
    dying = threading.Event()

    def die() -> None:
        print("at", point, flush=True)
        dying.wait()

    def one(name: str) -> None:
        message = orders.receive()
        with engine.connect() as connection:
            connection.execute(sales.insert(), {"name": name})
            done.send(name.encode(), connection=connection)
            if message is not None:
                message.ack(connection=connection)
            if point == "written":
                die()
            if point == "committing":
                print("at", point, flush=True)  # first: the timer may be quick
                threading.Timer(0.001, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            connection.commit()
            print(name, flush=True)

    if point == "at work":
        orders.send_many([b"%d" % number for number in range(2000)])
        print("at", point, flush=True)
        for number in range(2000):
            one(str(number))
    else:
        orders.send(b"1")
        one("hat")
        if point == "drained":
            done.depth()
    die()


def _work(directory: Path, url: str, point: str, tells: Connection) -> None:
    os.dup2(tells.fileno(), 1)
    work(directory, url, point)


def begun(directory: Path, url: str, point: str) -> tuple[BaseProcess, TextIO]:
    """One that is at that point, and what it tells from now on."""
    hears, tells = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_work, args=(directory, url, point, tells))
    process.start()
    tells.close()
    told = os.fdopen(os.dup(hears.fileno()))
    hears.close()
    while (line := told.readline()) and not line.startswith("at "):
        pass
    assert line, "it has ended"
    return process, told
