"""Writes data.tar.xz and data.json: `python -m tests.journal.golden.make`. Once for each format version."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import anabranch

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


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        with anabranch.open(config(data)) as router:
            write(router, "closed")
            router.queue("each.A b/ü").send(b"of its own")
            router.queue("each." + "long" * 40).send(b"of its own, too")
        if os.fork() == 0:
            write(anabranch.open(config(data)), "killed")
            os.kill(os.getpid(), 9)
        os.wait()
        with tarfile.open(HERE / "data.tar.xz", "w:xz") as archive:
            archive.add(data, "data", filter=anonymous)
        copy = Path(scratch) / "copy"
        shutil.copytree(data, copy)
        with anabranch.open(config(copy)) as router:
            (HERE / "data.json").write_text(json.dumps(content(router), indent=1) + "\n")


if __name__ == "__main__":
    main()
