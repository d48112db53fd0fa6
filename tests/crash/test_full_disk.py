"""A disk that is really full: a file system of 8 MiB in memory (invariant 7, and what of rule J10 holds already)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

import anabranch
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.config.when_full import WhenFull

from ..contract.disk import eventually
from ..contract.features import bodies_of
from ..router.disk import crashed
from ..taking import take
from .ledger import body_of, contents, identity_of, violations

SIZE = "8m"
BODY = 20_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted tmpfs; see conftest.py."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def config(directory: Path) -> anabranch.Config:
    options = anabranch.JournalOptions(segment_size=512 * 1024, checkpoint_operations=50, pool_files=1)
    return anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=options)])


def fill(queue: anabranch.Queue, start: int = 0) -> int:
    """Send until nothing more fits; the number of the first message that did not."""
    number = start
    while True:
        try:
            queue.send(body_of(f"s.{number}", BODY))
        except anabranch.StoreFullError as error:
            assert "free some space" in str(error)
            return number
        number += 1


def test_a_full_disk_is_emptied_and_used_again(disk: Path) -> None:
    spare, another = disk / "spare", disk / "another"
    for file in (spare, another):
        file.write_bytes(bytes(1024 * 1024))
    with anabranch.open(config(disk / "data")) as router:
        queue = router.queue("q")
        sent = fill(queue)
        assert sent > 150
        with pytest.raises(anabranch.StoreFullError):
            queue.send(body_of("never.0", BODY))
        assert queue.depth() == sent
        spare.unlink()  # until stores keep a reserve of their own, somebody has to find them some room
        for number in range(sent - 5):
            message = take(queue)
            assert identity_of(message.body) == f"s.{number}"
            message.ack()
        router.reclaim()  # what the background has not freed yet
        room = shutil.disk_usage(disk).free
        assert room > 3 * 1024 * 1024
        again = fill(queue, sent)
        assert (again - sent) * BODY > room - 1024 * 1024  # a segment that is begun, and what the index takes meanwhile
        expected = [f"s.{number}" for number in range(sent - 5, again)]
        assert contents(router) == {"q": expected}
        assert violations(router) == []
    another.unlink()  # nor is there a reserve for opening: what close() could not checkpoint needs a fresh segment (J5)
    with anabranch.open(config(disk / "data")) as router:
        assert contents(router) == {"q": expected}
        assert violations(router) == []


def test_a_store_opens_again_on_a_full_disk_once_there_is_some_room(disk: Path) -> None:
    spare = disk / "spare"
    spare.write_bytes(bytes(256 * 1024))
    with anabranch.open(config(disk / "data")) as router:
        sent = fill(router.queue("q"))
    try:
        with anabranch.open(config(disk / "data")) as router:
            assert router.queue("q").depth() == sent
    except anabranch.AnabranchError as error:
        assert "space" in str(error)
    spare.unlink()
    with anabranch.open(config(disk / "data")) as router:
        assert contents(router) == {"q": [f"s.{number}" for number in range(sent)]}
        assert violations(router) == []


def test_a_segment_that_a_crash_left_short_is_not_counted_on_for_room(disk: Path) -> None:
    """Its commit has its room since the prepare, in the pool if need be (rules J10, T1); and nobody who sends is told
    later than before the first byte."""
    journal = anabranch.JournalOptions(segment_size=1024 * 1024, pool_files=1)
    stores = [anabranch.StoreConfig(name, [f"{name}.>"], journal=journal) for name in "ab"]
    with anabranch.open(anabranch.Config(disk / "first", stores)) as router:
        router.queue("a.q").send(b"x")
        crashed(router, disk / "data")
    shutil.rmtree(disk / "first")
    with anabranch.open(anabranch.Config(disk / "data", stores)) as router:
        queue = router.queue("a.q")
        first = take(queue)
        first.ack()
        queue.send(b"stays")
        router.reclaim()
        router.queue("b.q").send(b"b")
        segments = disk / "data" / "stores" / "a" / "journal"
        while not (segments / "000000000003.seg").exists():
            queue.send(bytes(8000))
        transaction = router.transaction(anabranch.Xid(1, "x"))
        transaction.send("a.q", bytes(200_000))
        transaction.send("b.q", b"B")
        transaction.prepare()
        fill_up(disk / "filler")
        with pytest.raises(anabranch.StoreFullError):
            for _ in range(1000):
                queue.send(bytes(8000))
        router.commit(anabranch.Xid(1, "x"))
        assert router.in_doubt() == []
        assert router.stats().stores["a"].failed is None
        assert [message.body for message in router.queue("b.q").browse()] == [b"b", b"B"]
        assert [message.body for message in queue.browse()][-1] == bytes(200_000)


@pytest.mark.parametrize("kind", ["sql", "memory"])
def test_a_disk_full_of_another_kind_of_store_is_emptied_and_used_again(disk: Path, kind: str) -> None:
    """The database with its WAL, or the swap files. SQLite needs as much room as its WAL holds, 4 MiB at most, before
    anything comes free in it."""
    spare = disk / "spare"
    spare.write_bytes(bytes(4608 * 1024))
    options = {"sql": anabranch.SqlOptions(), "memory": anabranch.MemoryOptions(max_bytes=1 << 20)}[kind]
    setup = anabranch.Config(disk / "data", [anabranch.StoreConfig("all", [">"], **{kind: options})])  # type: ignore[arg-type]
    with anabranch.open(setup) as router:
        queue = router.queue("q")
        sent = fill(queue)
        assert sent > 20
        with pytest.raises(anabranch.StoreFullError):
            queue.send(body_of("never.0", BODY))
        assert contents(router) == {"q": [f"s.{number}" for number in range(sent)]}
        assert violations(router) == []
        spare.unlink()
        for number in range(sent - 5):
            message = take(queue)
            assert identity_of(message.body) == f"s.{number}"
            message.ack()
        router.reclaim()
        again = fill(queue, sent)
        assert again > sent + 20
        expected = [f"s.{number}" for number in range(sent - 5, again)]
        assert contents(router) == {"q": expected}
        assert violations(router) == []
    with anabranch.open(setup) as router:
        assert contents(router) == ({"q": expected} if kind == "sql" else {})
        assert violations(router) == []


@pytest.mark.parametrize("kind", ["journal", "sql", "memory"])
def test_a_disk_full_of_large_bodies_is_emptied_and_used_again(disk: Path, kind: str) -> None:
    """What did not fit leaves nothing; bodies go with their messages, and others take their room."""
    spare = disk / "spare"
    spare.write_bytes(bytes(4608 * 1024))  # SQLite needs as much room as its WAL holds
    options = {
        "journal": anabranch.JournalOptions(segment_size=256 * 1024, pool_files=0, large_message_size=1024),
        "sql": anabranch.SqlOptions(large_message_size=1024),
        "memory": anabranch.MemoryOptions(large_message_size=1024),
    }[kind]
    setup = anabranch.Config(disk / "data", [anabranch.StoreConfig("all", [">"], **{kind: options})])  # type: ignore[arg-type]
    with anabranch.open(setup) as router:
        queue = router.queue("q")
        sent = fill_with_files(queue, 0)
        assert sent > 5
        expected = [f"s.{number}" for number in range(sent)]
        assert contents(router) == {"q": expected}
        assert violations(router) == []  # nor is there a body of no message
        spare.unlink()
        for identity in expected[:-2]:
            message = take(queue)
            assert identity_of(message.read()) == identity
            message.ack()
        del message
        free = shutil.disk_usage(disk).free
        eventually(lambda: kept_large(router) == 2, lambda: kept_large(router))
        router.reclaim()
        assert kind == "sql" or shutil.disk_usage(disk).free > free
        again = fill_with_files(queue, sent)
        assert again > sent + 5
        expected = [f"s.{number}" for number in range(sent - 2, again)]
        assert contents(router) == {"q": expected}
        assert violations(router) == []
    with anabranch.open(setup) as router:
        assert contents(router) == ({} if kind == "memory" else {"q": expected})
        assert violations(router) == []


def fill_with_files(queue: anabranch.Queue, start: int) -> int:
    """As `fill`, with bodies that are kept apart."""
    number = start
    while True:
        try:
            queue.send(BytesIO(body_of(f"s.{number}", 100_000)))
        except anabranch.StoreFullError:
            return number
        number += 1


def kept_large(router: anabranch.Router) -> int:
    (store,) = router._registry.open_stores()
    bodies_of(store).tidy()
    return sum(1 for _ in bodies_of(store).storage.kept())


@pytest.mark.parametrize("kind", ["journal", "sql"])
def test_a_ring_on_a_full_disk_drops_nothing_for_what_is_refused(disk: Path, kind: str) -> None:
    spare = disk / "spare"
    spare.write_bytes(bytes(4608 * 1024))
    limits = (LimitOptions(match=("ring",), max_messages=5, when_full=WhenFull.DROP_OLD),)
    options = {
        "journal": anabranch.JournalOptions(segment_size=256 * 1024, pool_files=0, limits=limits),
        "sql": anabranch.SqlOptions(limits=limits),
    }[kind]
    setup = anabranch.Config(disk / "data", [anabranch.StoreConfig("all", [">"], **{kind: options})])  # type: ignore[arg-type]
    with anabranch.open(setup) as router:
        ring, queue = router.queue("ring"), router.queue("q")
        ids = [f"r.{number}" for number in range(7)]
        for identity in ids:
            ring.send(body_of(identity, BODY))
        sent = fill(queue)
        fill_up(disk / "filler")
        number = len(ids)
        while True:
            before = [identity_of(message.body) for message in ring.browse()]
            assert before == [f"r.{n}" for n in range(number - 5, number)]
            try:
                ring.send(body_of(f"r.{number}", BODY))
            except anabranch.StoreFullError:
                break
            number += 1
            assert number < 1000, "a ring that always finds room needs none"
        expected = {"ring": before, "q": [f"s.{n}" for n in range(sent)]}
        assert contents(router) == expected
        spare.unlink()
        (disk / "filler").unlink()
        ring.send(body_of(f"r.{number}", BODY))
        expected["ring"] = [*before[1:], f"r.{number}"]
    with anabranch.open(setup) as router:
        assert contents(router) == expected
        assert violations(router) == []


@pytest.mark.parametrize("size", [100, 9_000])
def test_a_transaction_whose_database_is_full_takes_effect_nowhere(disk: Path, tmp_path: Path, size: int) -> None:
    journal = anabranch.JournalOptions(segment_size=256 * 1024, pool_files=0)
    stores = [
        anabranch.StoreConfig("a", ["queue://a.>"], journal=journal, directory=tmp_path / "a"),
        anabranch.StoreConfig("b", ["queue://b.>"], sql=anabranch.SqlOptions(), directory=disk / "b"),
    ]
    setup = anabranch.Config(tmp_path / "data", stores)
    with anabranch.open(setup) as router:
        router.queue("a.in").send_many([body_of(f"i.{number}") for number in range(3000)])
        router.queue("b.out").send(body_of("first.0"))
        (disk / "spare").write_bytes(bytes(6_000_000))
        sent = over_two(router, 0, size)
        assert sent > 5
        assert over_two(router, sent, 300_000) == sent
        router.queue("a.out").send(body_of("alone.0"))
        (disk / "spare").unlink()
        settled(router)
        found = contents(router)
        expected = [f"t.{number}" for number in range(sent)]
        assert found["a.out"] == [*expected, "alone.0"]
        assert found["b.out"] == ["first.0", *expected]
    works_again(setup, sent, size)


def over_two(router: anabranch.Router, start: int, size: int) -> int:
    """Transactions that ack one message of store `a` and send one to `a` and one to `b`, until one is refused for want
    of space; its number."""
    number = start
    while True:
        message = take(router.queue("a.in"))
        tx = router.transaction()
        tx.ack(message)
        for queue in ("a.out", "b.out"):
            tx.send(queue, body_of(f"t.{number}", size))
        try:
            tx.commit()
        except anabranch.StoreFullError:
            assert tx.state == "rolled back"
            again = take(router.queue("a.in"))
            assert again.seq == message.seq  # free, at its old place
            again.release()
            return number
        number += 1


def settled(router: anabranch.Router) -> None:
    """Wait until nothing is in doubt."""
    eventually(lambda: not router.in_doubt(), router.in_doubt)


def apart(main: Path, a: Path, b: Path) -> anabranch.Config:
    """Two stores and the router's own files, each in a directory of its own."""
    options = anabranch.JournalOptions(segment_size=256 * 1024, pool_files=0)
    stores = [
        anabranch.StoreConfig("a", ["queue://a.>"], journal=options, directory=a),
        anabranch.StoreConfig("b", ["queue://b.>"], journal=options, directory=b),
    ]
    return anabranch.Config(main, stores)


def works_again(setup: anabranch.Config, sent: int, size: int) -> None:
    """There is room: all that was promised is in both stores, and there can be more, here and reopened."""
    for _ in range(2):
        with anabranch.open(setup) as router:
            settled(router)
            for queue in ("a.out", "b.out"):
                found = [identity for identity in contents(router)[queue] if identity.startswith("t.")]
                assert found == [f"t.{number}" for number in range(sent)]
            assert violations(router) == []
            for store in ("a", "b"):
                with router.transaction() as tx:
                    tx.send(f"{store}.out", body_of(f"t.{sent}", size))
                    tx.send("b.out" if store == "a" else "a.out", body_of(f"t.{sent}", size))
                sent += 1


@pytest.mark.parametrize("closed", [False, True], ids=["", "closed"])
@pytest.mark.parametrize("size", [100, 9_000])
def test_a_transaction_whose_participant_is_full_takes_effect_nowhere_or_later(
    disk: Path, tmp_path: Path, size: int, closed: bool
) -> None:
    setup = apart(tmp_path / "data", tmp_path / "a", disk / "b")
    spare = disk / "spare"
    with anabranch.open(setup) as router:
        router.queue("a.in").send_many([body_of(f"i.{number}") for number in range(3000)])
        router.queue("b.out").send(body_of("first.0"))
        spare.write_bytes(bytes(7_000_000))
        sent = over_two(router, 0, size)
        assert sent > 5
        assert router.in_doubt() == []  # who could prepare can commit: its room was promised (rule J10)
        assert over_two(router, sent, 300_000) == sent
        assert router.queue("a.out").depth() == sent
        router.queue("a.out").send(body_of("alone.0"))  # store a works on (invariant 7)
        if not closed:
            spare.unlink()
            settled(router)
    if closed:
        spare.unlink()
    with anabranch.open(setup) as router:
        assert router.in_doubt() == []
        expected = [f"t.{number}" for number in range(sent)]
        found = contents(router)
        assert found["a.out"] == [*expected, "alone.0"]
        assert found["b.out"] == ["first.0", *expected]
        assert len(found["a.in"]) == 3000 - sent
    works_again(setup, sent, size)


def test_a_transaction_while_the_decision_log_is_full_takes_effect_nowhere(disk: Path, tmp_path: Path) -> None:
    setup = apart(disk / "data", tmp_path / "a", tmp_path / "b")
    with anabranch.open(setup) as router:
        router.queue("a.in").send_many([body_of(f"i.{number}") for number in range(3000)])
        with router.transaction() as tx:
            for queue in ("a.out", "b.out"):
                tx.send(queue, body_of("t.0", 100))
        fill_up(disk / "filler")
        sent = over_two(router, 1, 100)
        assert router.in_doubt() == []
        assert over_two(router, sent, 100) == sent
        router.queue("b.out").send(body_of("alone.0"))  # in one store, which needs no decision
        (disk / "filler").unlink()
    works_again(setup, sent, 100)


def fill_up(path: Path) -> None:
    """Leave not one page. May be done again."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
