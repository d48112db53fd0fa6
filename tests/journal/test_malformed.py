"""Bytes whose checksum is right and that are no record: nothing but CorruptionError, whatever stands there.

No disk makes such bytes; a wrong program may, or somebody who means harm.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from google_crc32c import extend as crc32c

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.record.encoding import HEAD
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.journal import encoding as e
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.files.segment_files import read_header
from anabranch.adapters.wal.reader import BatchReader, Record, records_of
from anabranch.adapters.wal.records import encode_records
from anabranch.adapters.wal.segment import Segment
from anabranch.adapters.wal.ticket import Tail
from anabranch.policies.config import JournalOptions
from anabranch.policies.errors import AnabranchError, CorruptionError
from anabranch.policies.names.destination import Destination, Kind

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


ID, TIME = bytes(range(32)), 1 << 63
QUEUE, MAP, TOPIC = (
    (e.DECLARE, e.DECLARE_START.pack(number, kind.value) + b"n")
    for number, kind in enumerate((Kind.QUEUE, Kind.MAP, Kind.TOPIC), 1)
)


def message(
    number: int, seq: int, name: bytes = b"", id_bytes: int | None = None, expires: int = 0
) -> tuple[int, bytes]:
    """A SEND of an empty body, whose id takes `id_bytes`, as it says."""
    head = HEAD.pack(4, 0, len(name) if id_bytes is None else id_bytes, 0, 1, expires)
    return e.SEND, e.SEND_START.pack(number, seq) + head + name


def prepared(sends: list[Any], acks: list[Any]) -> tuple[int, bytes]:
    return e.PREPARE, ID + msgspec.msgpack.encode(([bytes(16)], [(Kind.QUEUE.value, "n")], sends, acks, []))


def subscription(topic: int, number: int) -> tuple[int, bytes]:
    return e.SUBSCRIBE, e.SUBSCRIBE_START.pack(topic, number, 0, 0, 0, 1, 0) + b"s"


def journal_of(path: Path, *records: tuple[int, bytes]) -> JournalStore:
    """A store whose journal holds these records, and which has no index."""
    JournalStore.create("s", path, JournalOptions(**OPTIONS))
    (file,) = (path / "journal").glob("*.seg")
    header = read_header(file)
    tail = Tail(Segment(header, file), w.HEADER_BYTES, 0, 0)
    batches = b""
    for kind, payload in records:  # a batch for each: it is applied before the next is read
        batch, tail = encode_records(tail, [(kind, payload, None)], 0)
        batches += batch
    with file.open("r+b") as segment:
        segment.seek(w.HEADER_BYTES)
        segment.write(batches)
    return JournalStore("s", path, JournalOptions(**OPTIONS))


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([MAP, message(2, 1)], "the key of a map's value takes 0 bytes"),
        ([MAP, message(2, 1, b"k" * 600)], "the key of a map's value takes 600 bytes"),
        ([QUEUE, message(1, 1, id_bytes=9)], "its id and its headers are longer than it is"),
        ([QUEUE, message(1, 1, expires=TIME)], f"it expires at {TIME}"),
        ([QUEUE, message(1, 1), message(1, 1)], "there is another message 1 of queue://n"),
        ([QUEUE, message(1, 1), message(1, 2), message(1, 1)], "there is another message 1 of queue://n"),
        ([QUEUE, message(1, 1), (e.POSTPONED, e.POSTPONED_PAYLOAD.pack(1, 0, 1, TIME))], f"it waits until {TIME}"),
        ([(e.DECLARE, e.DECLARE_START.pack(1 << 31, 1) + b"n")], "is no number of a destination"),
        ([(e.DECLARE, e.DECLARE_START.pack(0, 1) + b"n")], "is no number of a destination"),
        ([QUEUE, (e.DECLARE, e.DECLARE_START.pack(1, 0) + b"m")], "has the number 1, which is that of queue://n"),
        ([QUEUE, (e.DECLARE, e.DECLARE_START.pack(9, 0) + b"n")], "queue://n has two numbers, 9 too"),
        ([QUEUE, (e.REMOVE, e.NUMBER.pack(1)), QUEUE], "queue://n has the number of one that was removed"),
        ([TOPIC, subscription(3, 4), (e.UNSUBSCRIBE, e.UNSUBSCRIBE_PAYLOAD.pack(3, 4)), subscription(3, 4)],
         "has the number of one that ended"),
        ([(w.LOST, b""), message(1 << 31, 1)], "is a message of destination 2147483648, which no record declares"),
        ([QUEUE, subscription(1, 4)], "queue://n is no topic"),
        ([TOPIC, subscription(3, 1 << 31)], "is no number of a destination, nor of a subscription"),
        ([(e.COMMIT, b"")], "a transaction's id takes 0 bytes, not 32"),
        ([(e.ROLLBACK, ID * 20)], "a transaction's id takes 640 bytes, not 32"),
        ([(e.PREPARE, b"short")], "a transaction's id takes 5 bytes, not 32"),
        ([(e.FORGET, ID + b"x")], "transactions' ids take 33 bytes, not 32 each"),
        ([prepared([], [(3, 1, 0)])], "the prepared transaction 0001.* does not read: list index out of range"),
        ([prepared([(0, message(1, 1)[1][12:], -1)], [])], "it holds 26 bytes of a message of -1"),
    ],
)  # fmt: skip
def test_what_no_store_has_written(tmp_path: Path, records: list[tuple[int, bytes]], says: str) -> None:
    store = journal_of(tmp_path / "s", *records)
    with pytest.raises(CorruptionError, match=says):
        store.open()


def test_a_message_behind_the_removal_of_its_destination(tmp_path: Path) -> None:
    """Where a record is lost that may have told of it: `check` says so."""
    removed = (e.REMOVE, e.NUMBER.pack(1))
    store = journal_of(tmp_path / "s", QUEUE, message(1, 1), (w.LOST, b""), removed, message(1, 2))
    store.open()
    assert list(store.check()) == ["C2 message 2 is of destination 1, which is not there"]
    store.close()


def test_one_message_twice_in_a_batch(tmp_path: Path) -> None:
    store = journal_of(tmp_path / "s", QUEUE)
    (file,) = (tmp_path / "s/journal").glob("*.seg")
    segment = Segment(read_header(file), file)
    (first,) = BatchReader(segment, w.HEADER_BYTES, 0)
    sends = [(*message(1, seq), None) for seq in (1, 2, 1)]
    data, _ = encode_records(Tail(segment, first.end, first.last_lsn, 0), sends, 0)
    with file.open("r+b") as written:
        written.seek(first.end)
        written.write(data)
    with pytest.raises(CorruptionError, match="there is another message 1 of queue://n"):
        store.open()


def test_headers_within_headers_without_end(tmp_path: Path) -> None:
    headers = b"\x81\xa1h" + b"\x91" * 100_000 + b"\xc0"
    record = HEAD.pack(4, 0, 0, len(headers), 1, 0) + headers
    store = journal_of(tmp_path / "s", QUEUE, (e.SEND, e.SEND_START.pack(1, 1) + record), message(1, 2))
    store.open()
    with pytest.raises(CorruptionError, match="message 1 of queue://n does not parse"):
        store.receive(Destination.queue("n"))
    assert take(store, Destination.queue("n")).seq == 2
    store.close()
