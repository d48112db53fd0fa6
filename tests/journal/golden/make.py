"""Writes data.tar.xz and data.json, or transactions.tar.xz and transactions.json:
`python -m tests.journal.golden.make data|transactions`. Once for each format version."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anabranch
from anabranch.policies.errors import StoreFullError
from anabranch.router.transactions import decision_log

HERE = Path(__file__).parent


def config(directory: Path) -> anabranch.Config:
    """Of the data directory, to write it and to read it."""
    options = anabranch.JournalOptions(segment_size=64 * 1024, duplicate_window=4, pool_files=1)
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("closed", ["queue://closed.>"], journal=options),
            anabranch.StoreConfig("killed", ["queue://killed.>"], journal=options),
            anabranch.StoreConfig("each", ["queue://each.>"], per_destination=True, journal=options),
        ],
    )


def write(router: anabranch.Router, store: str) -> None:
    """Every kind of record, several segments, a snapshot that released some, names and headers of all kinds."""
    orders = router.queue(f"{store}.orders")
    orders.send(b"kept from the start", {"text": "ü", "int": -1, "bytes": b"\0", "none": None, "true": True}, "first")
    bulk = router.queue(f"{store}.bulk")
    for n in range(200):
        bulk.send(f"{n:04d}".encode().ljust(1000, b"."), None, f"bulk-{n}")
    router.ack([message for _ in range(190) if (message := bulk.receive()) is not None])
    gone = router.queue(f"{store}.gone")
    gone.send_many([b"1", b"2", b"3"])
    gone.delete()
    purged = router.queue(f"{store}.purged/ü")
    purged.send_many([b"1", b"2", b"3"])
    purged.purge()
    router.reclaim()
    with router.transaction() as tx:
        message = bulk.receive()
        assert message is not None
        tx.ack(message)
        tx.send(f"queue://{store}.orders,queue://{store}.audit", b"of a transaction", {"n": 1}, "tx")
    orders.send(b"")
    orders.send(b"x" * 70_000)


HELD = (7, "held until told", "branch")
STORES = ("orders", "audit")


def transactions_config(directory: Path) -> anabranch.Config:
    """Of the data directory with transactions over two stores."""
    options = anabranch.JournalOptions(segment_size=64 * 1024, pool_files=0)
    stores = [anabranch.StoreConfig(name, [f"queue://{name}.>"], journal=options) for name in STORES]
    return anabranch.Config(directory, stores)


def write_transactions(router: anabranch.Router) -> None:
    """Every record of a transaction, in the stores and in a decision log of several segments; then the process dies in
    the middle of one, while another one is decided and not carried out, and a third one waits for its manager."""

    def begin(number: int, xid: tuple[int, str, str] | None = None) -> anabranch.Transaction:
        transaction = router.transaction(xid=anabranch.Xid(*xid) if xid else None)
        message = router.queue("orders.new").receive()
        assert message is not None
        transaction.ack(message)
        transaction.send("queue://audit.log", f"ack {number}".encode(), {"n": number}, f"tx-{number}")
        transaction.send("queue://orders.done", b"", {"n": number})
        return transaction

    router.queue("orders.new").send_many([f"order {n}".encode() for n in range(210)])
    router.queue("audit.log").send(b"first")
    for number in range(190):  # long names, so that the decision log begins anew and carries on what is in force
        begin(number, (1, f"{number:064}", "b" * 64)).prepare()
        xid = router.recover()[-1]
        (router.rollback if number % 10 == 9 else router.commit)(xid)
        if number == 20:
            begin(1000, HELD).prepare()
        if number == 40:
            begin(1001, (7, "by hand", "")).prepare()
            (waiting,) = [known for known in router.in_doubt() if known.xid and known.xid.global_id == "by hand"]
            router.resolve(waiting.transaction, "rollback")
        if number == 170:
            router.queue("audit.log").purge()
            router.queue("orders.done").purge()
    begin(1002).commit()
    audit = router._registry.store_for(anabranch.Destination.parse("audit.log"))

    def full(_: bytes) -> None:
        raise StoreFullError("there is no room for an outcome")

    audit.commit_prepared = full  # type: ignore[method-assign,assignment]
    begin(1003).commit()

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    router._coordinator.log.decide = killed  # type: ignore[method-assign,assignment]
    begin(1004).commit()


def waiting(router: anabranch.Router) -> dict[str, Any]:
    """What transactions have left, and what the stores hold."""
    return {
        "recover": [list(xid) for xid in router.recover()],
        "in doubt": [[known.transaction, known.outcome, list(known.stores)] for known in router.in_doubt()],
        "by hand": [[known.transaction, known.outcome] for known in router.heuristics()],
        "content": content(router),
    }


def content(router: anabranch.Router) -> dict[str, list[dict[str, Any]]]:
    """All that can be seen, as JSON holds it."""
    return {
        str(destination): [
            {
                "seq": message.seq,
                "bytes": len(message.body),
                "sha256": hashlib.sha256(message.body).hexdigest(),
                "headers": {k: v.hex() if isinstance(v, bytes) else v for k, v in message.headers.items()},
                "message_id": message.message_id,
                "timestamp_ms": message.timestamp_ms,
            }
            for message in router.queue(str(destination)).browse()
        ]
        for destination in router.destinations()
    }


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without what tells of the machine: owners, and lock files, which name the host."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if member.name.endswith(".lock") else member


def in_child(work: Callable[[], None]) -> None:
    """Do it in a process of its own, which SIGKILL ends."""
    if os.fork() == 0:
        try:
            work()
        except Exception:
            traceback.print_exc()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.wait()


def keep(data: Path, name: str, say: Callable[[Path], Any]) -> None:
    """Pack a data directory, and what `say` says of a copy of it."""
    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
        archive.add(data, "data", filter=anonymous)
    copy = data.with_name("copy")
    shutil.copytree(data, copy)
    (HERE / f"{name}.json").write_text(json.dumps(say(copy), indent=1) + "\n")


def make_data(data: Path) -> None:
    with anabranch.open(config(data)) as router:
        write(router, "closed")
        router.queue("each.A b/ü").send(b"of its own")
        router.queue("each." + "long" * 40).send(b"of its own, too")
    in_child(lambda: write(anabranch.open(config(data)), "killed"))

    def say(copy: Path) -> Any:
        with anabranch.open(config(copy)) as router:
            return content(router)

    keep(data, "data", say)


def make_transactions(data: Path) -> None:
    decision_log.SEGMENT_BYTES = 64 * 1024  # type: ignore[misc]
    in_child(lambda: write_transactions(anabranch.open(transactions_config(data))))

    def say(copy: Path) -> Any:
        with anabranch.open(transactions_config(copy)) as router:
            return waiting(router)

    keep(data, "transactions", say)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        {"data": make_data, "transactions": make_transactions}[sys.argv[1]](Path(scratch) / "data")


if __name__ == "__main__":
    main()
