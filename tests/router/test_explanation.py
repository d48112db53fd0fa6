"""Why each segment of a data directory is kept, as `explain` tells it of a router's own stores."""

from __future__ import annotations

import io
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import anabranch
from anabranch import Config, JournalOptions, StoreConfig, Sync, Xid
from anabranch.adapters.journal.explanation import MESSAGES, TRANSACTION, WRITTEN, SegmentExplanation, StoreExplanation
from anabranch.policies.config import MemoryOptions, SqlOptions
from anabranch.policies.errors import ConfigError, PlacementError, StoreLockedError
from anabranch.router.api.consumer import Consumer
from anabranch.router.router import inspection_of
from anabranch.router.upkeep.explanation import explain
from anabranch.router.upkeep.explanation_text import render_text, summary

SEGMENT = 64 * 1024
BODY = b"x" * 1000


def config(directory: Path, **options: object) -> Config:
    """What is mostly dead stays where it is, unless the options say otherwise."""
    plain = {"segment_size": SEGMENT, "sync": Sync.NEVER, "compact_live_percent": 0}
    journal = JournalOptions.model_validate(plain | options)
    return Config(directory=directory, stores=[StoreConfig(name="all", match=[">"], journal=journal)])


def only(directory: Path) -> StoreExplanation:
    """The explanation of the one store in a directory, which is left as it was."""
    before = state_of(directory)
    found = explain(directory)
    assert state_of(directory) == before
    assert (found.unreadable, found.notes) == ((), ())
    (store,) = found.stores
    assert render_text(found, 100)
    return store


def state_of(directory: Path) -> dict[Path, tuple[int, int, bytes]]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes()) for path in files}


def consume(router: anabranch.Router, source: Consumer, count: int) -> None:
    messages = [source.receive(timeout=1.0) for _ in range(count)]
    router.ack(message for message in messages if message is not None)


def busy(router: anabranch.Router, count: int = 200) -> None:
    """Fills three segments with messages that are consumed at once."""
    queue = router.queue("busy")
    queue.send_many([BODY] * count)
    consume(router, queue, count)


def test_each_segment_has_its_reason(tmp_path: Path) -> None:
    started = time.time_ns() // 1_000_000
    with anabranch.open(config(tmp_path)) as router:
        router.queue("slow").send(BODY)
        busy(router)
        router.queue("busy").send(b"the last one")
    store = only(tmp_path)
    first, *_, last = store.segments
    (reason,) = first.reasons
    assert (reason.kind, reason.destination, reason.messages) == (MESSAGES, "queue://slow", 1)
    assert started <= (reason.oldest_sent_at_ms or 0) <= time.time_ns() // 1_000_000
    assert [reason.kind for reason in last.reasons] == [MESSAGES, WRITTEN]
    assert sum(segment.live_bytes for segment in store.segments) == sum(p.bytes for p in store.pinning)
    slow = next(p for p in store.pinning if p.destination == "queue://slow")
    assert (slow.messages, slow.segments, slow.kept_bytes, slow.freed_bytes) == (1, 1, SEGMENT, SEGMENT)


def test_a_segment_in_which_nothing_is_needed_waits_for_its_snapshot(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("slow").send(BODY)
        for number in range(1000):  # a snapshot tells their names and their ids: that takes more than is freed
            router.queue(f"{number}").send(b"", message_id=f"{number}")
            consume(router, router.queue(f"{number}"), 1)
    store = only(tmp_path)
    assert len(store.unneeded) > 0
    assert all(segment.live_bytes == 0 for segment in store.unneeded)
    size = sum(segment.bytes for segment in store.unneeded)
    assert store.snapshot_bytes * 4 > size
    assert "is needed: they go once they are 4 times what the snapshot takes" in summary(store)


def test_a_poison_destination_pins_many_segments(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        for _ in range(5):
            router.queue("poison").send(b"nobody takes it")
            busy(router, 100)
    store = only(tmp_path)
    top = store.pinning[0]
    assert (top.destination, top.messages) == ("queue://poison", 5)
    assert top.segments >= 4 and top.freed_bytes >= (top.segments - 1) * SEGMENT
    assert top.bytes < 1000
    text = render_text(explain(tmp_path), 100)
    assert "queue://poison with 5 messages of" in text
    assert "could go if it were emptied" in " ".join(text.split())


@pytest.mark.parametrize("indexed", [True, False])
def test_what_was_compacted_is_explained(tmp_path: Path, indexed: bool) -> None:
    with anabranch.open(config(tmp_path, compact_live_percent=50, compact_min_segments=1000)) as router:
        for _ in range(5):
            router.queue("poison").send(BODY)
            busy(router, 100)
        router.compact()
    if not indexed:
        (tmp_path / "stores" / "all" / "index.mdb").unlink()
    store = only(tmp_path)
    (copies,) = [segment for segment in store.segments if segment.generation]
    assert copies.path.endswith(f"{copies.number:012d}.copies")
    assert [(reason.destination, reason.messages) for reason in copies.reasons] == [("queue://poison", 5)]
    (top,) = store.pinning
    assert (top.messages, top.segments, top.kept_bytes) == (5, 1, copies.bytes)
    text = " ".join(render_text(explain(tmp_path), 100).split())
    assert " and 1 file of copies, " in text
    assert f"copies {copies.number} " in text


def test_durable_subscriptions_that_are_offline(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        topic = router.topic("prices")
        fast = topic.subscribe("fast", client_id="c")
        topic.subscribe("gone", client_id="c")
        topic.send_many([BODY] * 200)
        consume(router, fast, 200)
        topic.send(b"for both")
    store = only(tmp_path)
    gone, awake = store.subscriptions
    assert (gone.subscription, gone.messages, gone.destination) == (("c", "gone"), 201, "topic://prices")
    assert (awake.subscription, awake.messages, awake.freed_bytes) == (("c", "fast"), 1, 0)
    assert gone.freed_bytes == sum(segment.bytes for segment in store.segments[:-1])
    (reason,) = store.segments[0].reasons
    assert [(share.name, share.messages) for share in reason.subscriptions] == [("gone", reason.messages)]
    (last, _) = store.segments[-1].reasons
    assert {share.name: share.messages for share in last.subscriptions} == {"fast": 1, "gone": last.messages}


def test_a_prepared_transaction_keeps_its_record_and_what_it_acks(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("jobs").send(BODY)
        message = router.queue("jobs").receive(timeout=1.0)
        assert message is not None
        transaction = router.transaction(Xid(1, "order", "1"))
        transaction.ack(message)
        transaction.send("results", BODY)
        transaction.prepare()
        busy(router)
    store = only(tmp_path)
    (waiting,) = store.transactions
    assert (waiting.sends, waiting.acks, waiting.segment) == (1, 1, 1)
    kinds = {reason.kind: reason for reason in store.segments[0].reasons}
    assert kinds[TRANSACTION].transaction == waiting.id
    assert (kinds[MESSAGES].messages, kinds[MESSAGES].claimed) == (1, 1)
    assert store.pinning[0].freed_bytes == 0  # the transaction would keep it still
    with anabranch.open(config(tmp_path)) as router:
        assert [one.transaction for one in router.in_doubt()] == [waiting.id]
    assert "1 acked by a prepared transaction" in " ".join(render_text(explain(tmp_path), 200).split())
    assert waiting.id in render_text(explain(tmp_path), 100)
    narrow = render_text(explain(tmp_path), 80)
    assert f"...{waiting.id[-16:]} " in narrow
    assert max(map(len, narrow.splitlines())) <= 80


def test_of_many_destinations_the_text_names_those_with_the_most(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        for number in range(60):
            router.queue(f"q{number:02}").send(b"x" * number)
    assert len(only(tmp_path).pinning) == 60
    text = " ".join(render_text(explain(tmp_path), 100).split())
    assert "10 more destinations, in --json." in text
    assert "55 messages of 55 more destinations; it is being written" in text


def test_what_has_expired_is_told(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("q").send(BODY, expires_in=3600)
    found = explain(tmp_path, now_ms=time.time_ns() // 1_000_000 + 7_200_000)
    assert found.stores[0].segments[0].reasons[0].expired == 1
    assert "oldest 2 h, 1 expired" in render_text(found)


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_without_an_index_the_journal_tells_the_same(tmp_path: Path, what: str) -> None:
    with anabranch.open(config(tmp_path, priorities=True)) as router:
        router.queue("slow").send(BODY, priority=7)
        busy(router)
    expected = only(tmp_path)
    index = tmp_path / "stores" / "all" / "index.mdb"
    if what == "missing":
        index.unlink()
    else:
        index.write_bytes(b"\xff" * index.stat().st_size)
    store = only(tmp_path)
    assert (store.segments, store.pinning, store.index_rebuilt) == (expected.segments, expected.pinning, True)
    assert not expected.index_rebuilt
    assert "makes it anew" in render_text(explain(tmp_path))


def test_after_a_kill(tmp_path: Path) -> None:
    """As the files are while a router is at work: copied, so that nobody holds them."""
    copy = tmp_path / "copy"
    with anabranch.open(config(tmp_path / "data")) as router:
        router.queue("slow").send_many([BODY] * 100)
        # Without what the store may just be preparing for its next segment, which would be one more.
        shutil.copytree(tmp_path / "data", copy, ignore=shutil.ignore_patterns("*.tmp"))
    (copy / "stores" / "all" / "journal" / "7.tmp").write_bytes(b"unfinished")
    store = only(copy)
    assert store.pinning[0].messages == 100
    assert store.leftovers.count == 1


def test_large_bodies_are_told_of(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("films").send(io.BytesIO(bytes(3_000_000)))
    store = only(tmp_path)
    large = tmp_path / "stores" / "all" / "large"
    assert (store.large.count, store.leftovers.count) == (1, 0)
    assert store.large.bytes >= 3_000_000
    assert "large bodies: 1 file of 3.0 MB" in " ".join(render_text(explain(tmp_path)).split())
    (large / f"{'0' * 32}.part").write_bytes(b"half")
    assert only(tmp_path).leftovers.count == 1


def test_a_damaged_message_is_told_and_the_rest_explained(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("slow").send(BODY)
        router.queue("other").send(BODY)
        busy(router)
    path = tmp_path / "stores" / "all" / "journal" / f"{1:012d}.seg"
    data = bytearray(path.read_bytes())
    data[data.index(BODY) + 10] ^= 1
    path.write_bytes(data)
    store = only(tmp_path)
    (damage,) = store.damages
    assert str(path) in damage and "queue://slow" in damage
    reasons = {reason.destination: reason for reason in store.segments[0].reasons}
    assert reasons["queue://slow"].oldest_sent_at_ms is None
    assert reasons["queue://other"].oldest_sent_at_ms is not None


def test_a_damaged_header_is_told_with_what_lies_there(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("slow").send(BODY)
        busy(router)
    path = tmp_path / "stores" / "all" / "journal" / f"{1:012d}.seg"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    found = explain(tmp_path)
    (broken,) = found.unreadable
    assert found.stores == ()
    assert broken.name == "all" and str(path) in broken.error
    assert "1 of queue://slow" in broken.error
    assert "cannot be explained" in render_text(found)


def test_other_kinds_are_told_of_in_one_line(tmp_path: Path) -> None:
    stores = [
        StoreConfig(name="fleeting", match=["fleeting"], memory=MemoryOptions()),
        StoreConfig(name="tables", match=["tables"], sql=SqlOptions()),
        StoreConfig(name="own", match=[">"], per_destination=True, journal=JournalOptions()),
    ]
    with anabranch.open(Config(directory=tmp_path, stores=stores)) as router:
        for name in ("fleeting", "tables", "a", "b"):
            router.queue(name).send(b"")
    found = explain(tmp_path)
    assert [store.name for store in found.stores] == ["own:queue://a", "own:queue://b"]
    lines = render_text(found).splitlines()
    assert any(line.startswith("fleeting (memory): in memory") and "queue://fleeting" in line for line in lines)
    assert any(line.startswith("tables (sql): in a database") and "queue://tables" in line for line in lines)


def test_one_store_and_a_directory_without_its_record(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("slow").send(BODY)
    (whole,) = explain(tmp_path).stores
    (alone,) = explain(tmp_path / "stores" / "all").stores
    assert alone == whole
    (tmp_path / "placement.records").unlink()
    found = explain(tmp_path)
    assert found.stores == (whole,)
    assert "placement.records is missing" in found.notes[0]


def test_a_missing_directory_and_an_unmade_one(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)):
        pass
    assert render_text(explain(tmp_path)) == f"{tmp_path} holds no stores yet.\n"
    with anabranch.open(config(tmp_path)) as router:
        router.queue("slow").send(BODY)
    shutil.rmtree(tmp_path / "stores" / "all" / "journal")
    assert "segments are gone" in explain(tmp_path).unreadable[0].error
    shutil.rmtree(tmp_path / "stores" / "all")
    assert [broken.name for broken in explain(tmp_path).unreadable] == ["all"]


def test_while_a_router_has_it_open(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("slow").send(BODY)
        for directory in (tmp_path, tmp_path / "stores" / "all"):
            with pytest.raises(StoreLockedError, match="is open, by this process"):
                explain(directory)


@pytest.mark.parametrize("asked", ["by itself", "by another process"])
def test_a_router_that_is_open_tells_the_same(tmp_path: Path, asked: str) -> None:
    stores = [
        StoreConfig("each", ["queue://each.>"], per_destination=True, journal=JournalOptions()),
        StoreConfig("memory", ["queue://m"], memory={}),
    ]
    of_all = config(
        tmp_path, compact_live_percent=50, compact_min_segments=1000, archive_directory=tmp_path.parent / "a"
    )
    given = Config(directory=tmp_path, stores=[*of_all.stores, *stores])
    with anabranch.open(given) as router:
        topic = router.topic("prices")
        fast = topic.subscribe("fast", client_id="c")
        topic.subscribe("gone", client_id="c")
        for _ in range(3):
            router.queue("poison").send(BODY)
            busy(router, 100)
        router.compact()
        topic.send_many([BODY] * 150)
        consume(router, fast, 100)
        for name in ("poison", "removed", "each.a", "m", "jobs"):
            router.queue(name).send_many([BODY] * 30)
        router.queue("expires").send(b"", expires_in=3600)  # no sweep comes between
        router.queue("large").send(bytes(3 << 20))
        message = router.queue("jobs").receive()
        assert message is not None
        transaction = router.transaction(Xid(1, "order", "1"))
        transaction.ack(message)
        transaction.send("results", BODY)
        transaction.prepare()
        router.delete("removed")
        inspections = {"by itself": inspection_of(router)}
        with anabranch.open(given, shared=True) as client:
            inspections["by another process"] = inspection_of(client)
            live = inspections[asked].explain()
    closed = explain(tmp_path, given)
    assert render_text(live, 100)
    for store, later in zip(live.stores, closed.stores, strict=True):
        assert store.damages == ()
        assert [_kept(one) for one in store.segments if one.kept] == [_kept(one) for one in later.segments if one.kept]
        for name in ("name", "directory", "pinning", "subscriptions", "transactions"):
            assert getattr(store, name) == getattr(later, name)
    assert live.stores[0].archive is not None
    assert any(segment.generation for segment in live.stores[0].segments)
    assert [(one.name, one.destinations) for one in live.others] == [("memory", ("queue://m",))]
    assert (live.unreadable, live.copy, live.decisions) == ((), None, closed.decisions)


def _kept(segment: SegmentExplanation) -> SegmentExplanation:
    """The segment without what the end of the store has put into it."""
    return replace(segment, used_bytes=0)


def test_a_router_in_use_tells_what_is_so_at_one_moment(tmp_path: Path) -> None:
    """Each message is sent before another is acked: one at least is always there, and none is damaged."""
    with anabranch.open(config(tmp_path, sync=Sync.NEVER, compact_live_percent=50)) as router:
        queue, over = router.queue("busy"), threading.Event()
        queue.send(BODY)

        def work() -> None:
            while not over.is_set():
                queue.send(BODY)
                consume(router, queue, 1)

        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(work) for _ in range(2)]
            try:
                for _ in range(30):
                    (store,) = inspection_of(router).explain().stores
                    assert (store.damages, store.pinning[0].messages in (1, 2, 3)) == ((), True)
                    assert sum(segment.live_bytes for segment in store.segments) == store.pinning[0].bytes
            finally:
                over.set()
        assert [one.result() for one in done] == [None, None]


@pytest.mark.parametrize("part", ["stores/all/journal", "stores", "decisions"])
def test_a_part_of_a_directory_names_the_whole(tmp_path: Path, part: str) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("slow").send(BODY)
        transaction = router.transaction(Xid(1, "order", "1"))
        transaction.send("results", BODY)
        transaction.prepare()
    with pytest.raises(PlacementError, match="give"):
        explain(tmp_path / part)


def test_a_usage_log_is_told_from_a_store(tmp_path: Path) -> None:
    recording = config(tmp_path / "data").model_copy(update={"usage": anabranch.UsageOptions()})
    with anabranch.open(recording) as router:
        router.queue("slow").send(BODY)
    usage = tmp_path / "data" / "usage"
    for directory, what in ((usage, "a usage log"), (usage / "journal", f"a part of the usage log {usage}")):
        with pytest.raises(PlacementError) as raised:
            explain(directory)
        assert str(raised.value) == (
            f"{directory} is {what}, and no store: `anabranch recommend --usage {usage} --out DIR` reads it, and "
            f"`anabranch trace --usage {usage} --out FILE` makes a trace of it"
        )
    found = explain(tmp_path / "data")
    assert found.usage is not None
    assert (found.usage.count, found.usage.bytes) == (1, next(usage.glob("journal/*.seg")).stat().st_size)
    assert "usage log: 1 segment, " in render_text(found)
    usage.rename(tmp_path / "recorded")
    assert explain(tmp_path / "data").usage is None
    elsewhere = recording.model_copy(update={"usage": anabranch.UsageOptions(directory=tmp_path / "recorded")})
    assert explain(tmp_path / "data", elsewhere).usage == found.usage


def test_the_configuration_of_another_directory(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with anabranch.open(config(tmp_path / name)) as router:
            router.queue("slow").send(BODY)
    (tmp_path / "link").symlink_to("one")
    assert explain(tmp_path / "link", config(tmp_path / "one")).stores
    with pytest.raises(ConfigError, match=r"the configuration has the data directory .*/two, and not .*/one, which is"):
        explain(tmp_path / "one", config(tmp_path / "two"))
    assert explain(tmp_path / "link" / "stores" / "all", config(tmp_path / "one")).stores
    with pytest.raises(ConfigError, match=r"has no store in .*/one/stores/all; it has those in .*/two/stores/all"):
        explain(tmp_path / "one" / "stores" / "all", config(tmp_path / "two"))


def test_a_store_of_one_destination_is_the_configuration_s(tmp_path: Path) -> None:
    store = StoreConfig("own", [">"], per_destination=True, directory=tmp_path / "own", index_directory=tmp_path / "i")
    configured = Config(directory=tmp_path / "data", stores=[store])
    with anabranch.open(configured) as router:
        router.queue("a").send(BODY)
    (directory,) = (tmp_path / "own").iterdir()
    (alone,) = explain(directory, configured).stores
    assert alone.segments == explain(tmp_path / "data", configured).stores[0].segments
    with pytest.raises(ConfigError, match="has no store in"):
        explain(directory, config(tmp_path / "data"))


def test_an_archive_and_an_index_elsewhere(tmp_path: Path) -> None:
    options = JournalOptions(segment_size=SEGMENT, sync=Sync.NEVER, archive_directory=tmp_path / "archive")
    store = StoreConfig(name="all", match=[">"], index_directory=tmp_path / "index", journal=options)
    configured = Config(directory=tmp_path / "data", stores=[store])
    with anabranch.open(configured) as router:
        busy(router, 2000)
        router.reclaim()
    (found,) = explain(tmp_path / "data", configured).stores
    assert found.archive is not None and found.archive.count > 0
    assert not found.index_rebuilt
    (without,) = explain(tmp_path / "data").stores
    assert (without.archive, without.index_rebuilt) == (None, True)
    assert without.segments == found.segments
