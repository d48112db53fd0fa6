"""Bytes whose checksum is right and that are no record: nothing but CorruptionError, whatever stands there.

No disk makes such bytes; a wrong program may, or somebody who means harm.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google_crc32c import extend as crc32c

from anabranch.adapters.journal import JournalStore
from anabranch.adapters.messages import Outgoing
from anabranch.adapters.store_types import Subscription
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.files import read_header
from anabranch.adapters.wal.reader import BatchReader, Record, records_of
from anabranch.adapters.wal.segment import Segment
from anabranch.policies.config import JournalOptions
from anabranch.policies.destination import Destination
from anabranch.policies.errors import AnabranchError, CorruptionError

from ..contract.disk import take
from ..shares import Share

OPTIONS: dict[str, Any] = {
    "segment_size": 64 * 1024, "checkpoint_interval": 3600.0, "compact_live_percent": 95, "compact_min_segments": 1
}  # fmt: skip
Q, T, GONE = Destination.queue("q"), Destination.topic("t"), Destination.queue("gone")


class Made(NamedTuple):
    path: Path
    records: dict[int, list[tuple[str, Record]]]
    """By kind: in which file, and the record."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A journal without an index, with a record of nearly each kind."""
    path = tmp_path_factory.mktemp("malformed") / "s"
    JournalStore.create("s", path, JournalOptions(**OPTIONS))
    store = JournalStore("s", path, JournalOptions(**OPTIONS))
    store.open()
    one, two = Subscription(T, "one"), Subscription(T, "two")
    store.subscribe(one)
    store.subscribe(two)
    for number in range(150):
        store.send(
            Q, b"." * 700, {"nested": [1, {"a": 2}]}, f"id{number}", None, 4, 0 if number % 3 else 4_102_444_800_000
        )
        store.send(T, b"." * 50)
        message = take(store, Q)
        message.ack() if number % 4 else message.release()
        if number % 2:
            take(store, T, subscription=one.key).ack()
        if number in (70, 120):
            store.compact()
    message = take(store, Q)
    store.claim(message)
    store.prepare(bytes(range(32)), [store.store_id], [(Q, Outgoing(b"prepared"))], [message], True).wait()
    store.unsubscribe(T, two.key)
    store.send(GONE, b"x")
    store.delete(GONE)
    store.close()
    (path / "index.mdb").unlink()
    records: dict[int, list[tuple[str, Record]]] = defaultdict(list)
    for file in sorted((path / "journal").iterdir()):
        if file.suffix in (".seg", ".copies"):
            header = read_header(file)
            for batch in BatchReader(Segment(header, file), w.HEADER_BYTES, header.base_lsn - 1):
                for record in records_of(batch):
                    records[record.kind].append((file.name, record))
    return Made(path, records)


def spoil(made: Made, path: Path, chance: random.Random) -> str:
    """Put other bytes in the place of a record; what they are."""
    shutil.copytree(made.path, path)
    kind = chance.choice(sorted(made.records))
    name, record = chance.choice(made.records[kind])
    payload, how = bytearray(record.payload), chance.randrange(4)
    at = chance.randrange(len(payload)) if payload else 0
    if how == 0 and payload:
        payload[at] = chance.randrange(256)
    elif how == 1 and payload:
        other = chance.choice([b"\xff" * 8, bytes(8), chance.randbytes(8)])[: len(payload) - at]
        payload[at : at + len(other)] = other
    elif how == 2:
        payload[:] = chance.randbytes(len(payload))
    else:
        kind = chance.choice([*sorted(made.records), 16, 17, 18, 19, w.LOST, 99])
    rest = w.RECORD_REST.pack(len(payload), record.lsn, kind, 0, 0) + payload
    data = w.CRC.pack(crc32c(record.segment.seed ^ record.offset, rest)) + rest
    file = path / "journal" / name
    content = bytearray(file.read_bytes())
    content[record.offset : record.offset + len(data)] = data
    file.write_bytes(content)
    return f"a record of kind {record.kind} as one of kind {kind}, {bytes(payload[:40])!r}"


def test_nothing_but_corruption(made: Made, tmp_path: Path, share: Share) -> None:
    counts = [0, 0]
    for number in share.of(range(20_000), 500):
        path = tmp_path / "s"
        what = spoil(made, path, random.Random(number))
        store = JournalStore("s", path, JournalOptions(**OPTIONS))
        try:
            store.open()
            counts[0] += 1
            for destination in store.destinations():
                try:
                    for message in store.browse(destination):
                        message.headers  # noqa: B018  it was decoded
                except CorruptionError:
                    pass
            list(store.check())
        except AnabranchError as error:
            assert isinstance(error, CorruptionError), f"{number}: {what}: {error!r}"
            counts[1] += 1
        except Exception as error:
            raise AssertionError(f"{number}: {what}: {error!r}") from error
        finally:
            store.close()
            shutil.rmtree(path)
    share.counts.append(f"{sum(counts)} malformed records: {counts[1]} refused, {counts[0]} of no consequence")
