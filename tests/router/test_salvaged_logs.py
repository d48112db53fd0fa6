"""`anabranch salvage`, of what is no journal store: the decision log, the usage log, SQLite's databases."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.files.segment_files import read_header
from anabranch.adapters.wal.reader import BatchReader, Record, records_of
from anabranch.adapters.wal.segment import Segment
from anabranch.router.transactions.decision_log import DECISION, EPOCH, FORGOTTEN, XA_PREPARED, Decision, DecisionLog
from anabranch.router.upkeep.salvage import Salvaged, salvage
from anabranch.router.upkeep.salvaged_logs import frames_cut

from .test_salvage import damage, files

DATABASE = "stores/sql is a database: it was copied as it is, and SQLite finds nothing wrong with it"
HELD, DECIDED = anabranch.Xid(1, "held"), anabranch.Xid(1, "decided")


def config(directory: Path) -> anabranch.Config:
    stores = [
        anabranch.StoreConfig("a", ["a.>"]),
        anabranch.StoreConfig("b", ["b.>"]),
        anabranch.StoreConfig("sql", ["sql.>"], sql=anabranch.SqlOptions()),
    ]
    return anabranch.Config(directory, stores, usage={})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """With an external transaction that is held, and one over the same stores that was committed."""
    with anabranch.open(config(tmp_path / "data")) as router:
        for name in "ab":
            router.queue(f"{name}.x").send(b"before")
        router.queue("sql.x").send(b"row")
        for xid in (HELD, DECIDED):
            tx = router.transaction(xid)
            for name in "ab":
                tx.send(f"{name}.x", b"of both")
            tx.prepare()
        router.commit(DECIDED)
    return tmp_path / "data"


def records(journal: Path) -> list[Record]:
    found: list[Record] = []
    for file in sorted(journal.glob("*.seg")):
        header = read_header(file)
        for batch in BatchReader(Segment(header, file), w.HEADER_BYTES, header.base_lsn - 1):
            found += records_of(batch)
    return found


def lose(record: Record) -> None:
    damage(record.segment.path, record.offset + record.length - 1)


def salvaged(data: Path) -> Salvaged:
    before = files(data)
    found = salvage(data, data.with_name("new"))
    assert files(data) == before
    return found


def opened(data: Path) -> anabranch.Router:
    return anabranch.open(config(data.with_name("new")))


def bodies(router: anabranch.Router, name: str) -> list[bytes]:
    return [message.body for message in router.queue(name).browse()]


def test_what_is_whole_needs_no_word(data: Path) -> None:
    assert salvaged(data).notes == (DATABASE,)
    with opened(data) as router:
        assert [str(xid) for xid in router.recover()] == [str(HELD)]
        router.commit(HELD)
        assert len(bodies(router, "a.x")) == len(bodies(router, "b.x")) == 3


def test_a_damaged_header_of_the_decision_log_costs_nothing(data: Path) -> None:
    (segment,) = (data / "decisions/journal").glob("*.seg")
    damage(segment, 40)
    assert salvaged(data).notes[:-1] == ("decisions: 1 damaged header made anew; no decision is lost",)
    with opened(data) as router:
        assert [str(xid) for xid in router.recover()] == [str(HELD)]
        router.rollback(HELD)
        assert len(bodies(router, "a.x")) == len(bodies(router, "b.x")) == 2


def test_a_damaged_id_of_the_decision_log_costs_nothing(data: Path) -> None:
    damage(data / "decisions/store.id", 3)
    assert salvaged(data).notes[:-1] == (
        "decisions/store.id was damaged or missing: it holds now what the segments say",
    )
    with opened(data) as router:
        assert [str(xid) for xid in router.recover()] == [str(HELD)]


@pytest.mark.parametrize("kind", [EPOCH, XA_PREPARED, DECISION, FORGOTTEN])
def test_where_a_record_is_lost_nothing_is_rolled_back_by_guess(data: Path, kind: int) -> None:
    found = [record for record in records(data / "decisions/journal") if record.kind == kind]
    lose(found[0])
    notes = salvaged(data).notes
    assert any("1 record of the decision log cannot be read" in note for note in notes)
    with opened(data) as router:
        (waiting,) = router.in_doubt()
        assert (waiting.xid, waiting.outcome, waiting.stores) == (None, None, ("a", "b"))
        assert "say the outcome with resolve()" in waiting.reason
        assert len(bodies(router, "a.x")) == len(bodies(router, "b.x")) == 2
        if kind != XA_PREPARED:
            assert any(str(HELD) in note and waiting.transaction in note for note in notes)
        router.resolve(waiting.transaction, "commit")
        assert len(bodies(router, "a.x")) == len(bodies(router, "b.x")) == 3
        with router.transaction() as tx:  # and it decides anew
            tx.send("a.x", b"later")
            tx.send("b.x", b"later")


def test_a_decision_that_reads_holds(data: Path) -> None:
    """The stores had not carried it out yet; what is lost is another record."""
    log = DecisionLog(data / "decisions", anabranch.Sync.ALWAYS)
    log.open()
    (held,) = log.externals.values()
    log.decide(Decision(held.transaction, True, held.participants))
    log.close()
    other = next(record for record in records(data / "decisions/journal") if record.kind != DECISION)
    lose(other)
    assert any("1 decision that can be read still hold" in note for note in salvaged(data).notes)
    with opened(data) as router:
        assert (router.in_doubt(), router.recover()) == ([], [])
        assert len(bodies(router, "a.x")) == len(bodies(router, "b.x")) == 3


def test_a_decision_log_of_which_nothing_reads_is_put_aside(data: Path) -> None:
    (segment,) = (data / "decisions/journal").glob("*.seg")
    segment.write_bytes(bytes(segment.stat().st_size))
    damage(data / "decisions/store.id", 3)
    notes = salvaged(data).notes
    assert any("renamed to decisions.damaged" in note for note in notes)
    with opened(data) as router:
        (waiting,) = router.in_doubt()
        assert waiting.stores == ("a", "b")


def test_a_damaged_usage_log_is_put_aside(data: Path) -> None:
    (segment,) = (data / "usage/journal").glob("*.seg")
    damage(segment, 4200)
    notes = salvaged(data).notes
    assert any("usage.damaged" in note for note in notes)
    assert (data.with_name("new") / "usage.damaged/journal").is_dir()
    with opened(data) as router:
        assert len(bodies(router, "a.x")) == 2


def test_a_database_says_whose_it_is_and_what_is_wrong_with_it(data: Path) -> None:
    damage(data / "stores/sql/store.id", 7)
    assert salvaged(data).notes == (
        DATABASE,
        "stores/sql/store.id was damaged or missing: it holds now what the database says",
    )
    with opened(data) as router:
        assert bodies(router, "sql.x") == [b"row"]


def test_a_damaged_database_is_named(data: Path) -> None:
    database = data / "stores/sql/store.db"
    content = database.read_bytes()
    database.write_bytes(content[: len(content) // 2] + b"\\xff" * 8192 + content[len(content) // 2 + 8192 :])
    notes = salvaged(data).notes
    assert any(note.startswith("stores/sql/store.db is damaged, and was copied as it is") for note in notes)


def test_a_log_of_sqlite_that_is_cut_is_told(data: Path) -> None:
    """As a kill leaves it: SQLite takes what is damaged there for torn."""
    path = data / "stores/sql/store.db"
    log = path.with_name("store.db-wal")
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        for number in range(20):
            database.execute(f"CREATE TABLE t{number} (a)")
            database.commit()
        killed = log.read_bytes(), path.read_bytes()
    assert frames_cut(log) == 0  # it is gone
    log.write_bytes(killed[0])
    path.write_bytes(killed[1])
    assert frames_cut(log) == 0
    frame = 24 + int.from_bytes(killed[0][8:12], "big")
    damage(log, 32 + 3 * frame + 2000)
    found = (len(killed[0]) - 32) // frame - 4
    assert frames_cut(log) == found > 10
    assert any(f"store.db-wal: {found} frames behind a damaged one" in note for note in salvaged(data).notes)
