"""`anabranch verify`: a flipped bit in any byte that has a checksum is found, and said to be where it is."""

from __future__ import annotations

import io
import json
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import anabranch
from anabranch import Config, JournalOptions, SqlOptions, StoreConfig, StoreLockedError, UsageOptions, Xid
from anabranch.adapters.journal.index import checksums
from anabranch.adapters.wal.files.record_file import COPY_BYTES, FIRST, SLOT, SLOT_BYTES
from anabranch.adapters.wal.format import BATCH_HEADER
from anabranch.adapters.wal.recovery.mending import Mender
from anabranch.router.cli.app import app
from anabranch.router.offline.verification import verify

FLIPS = 4
"""In each stretch of bytes that have a checksum."""


def config(directory: Path) -> Config:
    journal = JournalOptions(large_message_size="1KiB", segment_size="64KiB")
    return Config(
        directory,
        [
            StoreConfig("a", ["a.>"], journal=journal),
            StoreConfig("b", ["b.>"], sql=SqlOptions(large_message_size="1KiB")),
            StoreConfig("per", ["p.>"], per_destination=True),
            StoreConfig("memory", ["m.>"], memory={}),
        ],
        usage=UsageOptions(),
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory with a store of every kind, and a file of every kind in it but that of a repartition."""
    with anabranch.open(config(tmp_path / "data")) as router:
        queue, mine = router.queue("a.x"), router.queue("a.y")
        for number in range(400):
            mine.send(b"." * 900)
            if not number % 20:
                queue.send(b"." * 500, message_id=f"id{number}")
        while (message := mine.receive(timeout=0)) is not None:
            message.ack()
        router.compact()
        router.queue("p.1").send(b"." * 100)
        router.topic("a.t").subscribe("s")
        router.topic("a.t").send(b"to one")
        router.map("a.m").put("key", b"value")
        for name in ("a.x", "b.x"):
            router.queue(name).send(io.BytesIO(b"-" * 3000), message_id="large")
        with router.transaction() as tx:
            tx.send("a.x", b"of both")
            tx.send("p.1", b"of both")
        held = router.transaction(xid=Xid(1, "held", "here"))
        held.send("a.x", b"prepared")
        held.send("b.x", b"prepared")
        held.prepare()
    return tmp_path / "data"


def stretches(path: Path, end: int) -> Iterator[tuple[int, int]]:
    """Yield from where to where each byte of a file has a checksum, as docs/format.md has it. `end` is that of the
    records in a segment."""
    content = path.read_bytes()
    if path.suffix in (".seg", ".copies"):
        yield from [(0, 120), (4096, end)]
    elif path.name == "watermark":
        yield from ((at, at + 56) for at in (0, 4096) if any(content[at : at + 56]))
    elif path.name == "index.sums":
        yield 0, checksums.HEADER.size + checksums.CRC.size + 4 * len(checksums.decode(content)[2])
    elif path.name == "index.mdb":
        _, page_bytes, sums = checksums.decode(path.with_suffix(".sums").read_bytes())
        pages = [number for number, crc in enumerate(array("I", sums)) if crc]
        yield from ((page * page_bytes, (page + 1) * page_bytes) for page in (pages[0], pages[1], pages[-1]))
    elif path.suffix == ".body":
        yield from [(0, 52), (64, len(content))]
    elif path.name == "placement.records":
        starts = [number * SLOT_BYTES + copy for number in range(2) for copy in (0, COPY_BYTES)]
        yield from ((at, at + SLOT.size + 4) for at in starts)
        yield FIRST, max(SLOT.unpack_from(content, at)[4] for at in starts)
    elif path.name == "store.id":
        yield 0, 32
    elif path.name == "store.db":
        at = content.index(b"-" * 2000)
        yield at, at + 2000  # of a large body; other pages have no checksum


WITHOUT = {"in-force.yaml", "configuration.yaml", "usage.version"}
"""Files that have none."""


def ends(data: Path) -> dict[Path, int]:
    """Return where the records of each segment end, as who salvages the log would walk them. The mark at the end of a
    log without an index vouches for what is before it, and nothing vouches for the mark: it may have been torn."""
    found = {}
    for journal in data.rglob("journal"):
        log_id = bytes.fromhex((journal.parent / "store.id").read_text())
        mender = Mender(journal, log_id)
        mender.look()  # without an index it misses what was released
        for number, scanned in mender._scanned.items():
            has_index = (journal.parent / "index.mdb").exists()
            found[journal / f"{number:012d}.seg"] = scanned.end - (0 if has_index else BATCH_HEADER.size)
    return found


def test_a_flipped_bit_is_found_wherever_a_byte_has_a_checksum(data: Path) -> None:
    whole = verify(data, config(data))
    assert whole.damages == [] and whole.notes == []
    assert whole.stores == ["a", "b", "per:queue://p.1"]
    records, kinds, places = ends(data), set(), 0
    for path in sorted(path for path in data.rglob("*") if path.is_file()):
        if path.suffix in (".lock", ".free", ".spare") or path.name in WITHOUT:
            continue
        before = path.read_bytes()
        found = list(stretches(path, records.get(path, 4096 + 500)))
        assert found, f"nothing is known of {path}"
        kinds.add(path.suffix or path.name)
        for start, end in found:
            for offset in {start + (end - start - 1) * step // (FLIPS - 1) for step in range(FLIPS)}:
                damaged = bytearray(before)
                damaged[offset] ^= 1 if path.name == "store.id" else 1 << offset % 7  # digits in either case
                path.write_bytes(damaged)
                # One store alone: a directory of all takes longer.
                where = path.parent.parent if path.parent.name in ("journal", "large") else path.parent
                is_store = (where / "index.mdb").exists()
                shown = verify(where if is_store else data, config(data) if not is_store else None)
                named = {path} if path.parent.name != "b" else {path.parent}
                assert {Path(damage.path) for damage in shown.damages} & named, (path, offset, shown)
                places += 1
        path.write_bytes(before)
    assert kinds == {".seg", ".copies", "watermark", ".sums", ".mdb", ".body", ".records", ".id", ".db"}
    assert places > 90
    assert verify(data, config(data)).damages == []


def test_it_says_what_is_lost_and_changes_nothing(data: Path) -> None:
    (segment,) = [path for path in (data / "stores/a/journal").glob("*.copies") if b"id20" in path.read_bytes()]
    content = bytearray(segment.read_bytes())
    at = content.index(b"id20") + 100
    content[at] ^= 1
    segment.write_bytes(content)
    (body,) = (data / "stores/a/large").iterdir()
    body.write_bytes(body.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    result = CliRunner().invoke(app, ["verify", str(data), "--json"])
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["damages"]
    assert first["path"] == str(segment) and 0 <= at - first["offset"] < 700
    assert first["lost"].endswith("of queue://a.x, id id20")
    assert second["path"] == str(body) and second["lost"].startswith("the body of message")
    text = CliRunner().invoke(app, ["verify", str(data)])
    assert f"salvage {data} --to NEW" in text.stdout
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before


def test_it_does_not_promise_that_a_store_opens_from_which_nothing_is_lost(data: Path, tmp_path: Path) -> None:
    segment = sorted((data / "stores/a/journal").glob("*.seg"))[-1]
    content = bytearray(segment.read_bytes())
    content[16] ^= 1
    segment.write_bytes(content)
    result = CliRunner().invoke(app, ["verify", str(data)])
    assert result.exit_code == 1 and f"{segment} at offset 0: the file's header is damaged" in result.stdout
    assert "lost: nothing: it can be made anew" in result.stdout and "was made" not in result.stdout
    assert "may not open, even where nothing is lost" in result.stdout
    with anabranch.open(config(data)) as router, pytest.raises(anabranch.CorruptionError):
        router.queue("a.x").depth()
    mended = tmp_path / "mended"
    assert CliRunner().invoke(app, ["salvage", str(data), "--to", str(mended)]).exit_code == 0
    with anabranch.open(config(mended)) as router:
        assert router.queue("a.x").depth() > 0


def test_what_sqlite_finds_in_its_file_is_told(tmp_path: Path) -> None:
    there = Config(tmp_path / "data", [StoreConfig("a", [">"], sql=SqlOptions())])
    with anabranch.open(there) as router:
        for number in range(60):
            router.queue("q").send(b"-" * 100, message_id=f"name-{number}")
    path = tmp_path / "data/stores/a/store.db"
    before = path.read_bytes()
    (page_bytes,) = struct.unpack_from(">H", before, 16)
    leaf = next(at for at in range(page_bytes, len(before), page_bytes) if before[at] in (10, 13) and before[at + 4])
    path.write_bytes(before[: leaf + 7] + bytes([before[leaf + 7] ^ 4]) + before[leaf + 8 :])  # how much of it is free
    (damage,) = verify(there.directory, there).damages
    assert (damage.path, damage.reason[:12]) == (str(path.parent), "SQLite says:") and "ragment" in damage.reason


def test_a_configuration_in_force_that_does_not_read_is_told(data: Path) -> None:
    path = data / "in-force.yaml"
    path.write_text(path.read_text().replace("match", "mat:h", 1))
    (note,) = verify(data, config(data)).notes
    assert note.startswith(f"{path}:") and "it may be damaged: give the file" in note


def test_a_directory_that_was_killed_is_whole_and_an_open_one_is_refused(data: Path, tmp_path: Path) -> None:
    with anabranch.open(config(data)) as router:
        router.queue("a.x").send(b"more")
        with pytest.raises(StoreLockedError):
            verify(data)
        copy = tmp_path / "copy"
        copy.mkdir()
        for path in sorted(data.rglob("*")):  # as a kill would leave it
            there = copy / path.relative_to(data)
            there.mkdir() if path.is_dir() else there.write_bytes(path.read_bytes())
    assert verify(copy, config(copy)).damages == []
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "nowhere")]).exit_code == 2
