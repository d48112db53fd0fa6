"""Why each file is kept: against the broker's own notes, against golden text, and rule by rule."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from anabranch.adapters.kahadb import Explanation, StoreExplanation, explain, render_text
from anabranch.adapters.kahadb.ackmap import AckMapError, read_ack_map
from anabranch.adapters.kahadb.commands import AckMessageFileMap
from anabranch.adapters.kahadb.entries import Outcomes, read_entries
from anabranch.adapters.kahadb.files import Damage, file_bytes, find_stores
from anabranch.adapters.kahadb.journal import Journal
from anabranch.adapters.kahadb.replay import Replay
from anabranch.policies.errors import TraceError
from anabranch.policies.text import human_bytes

from . import writer as w
from .test_trace import multi_store

DATA = Path(__file__).parent / "data"


def only(directory: Path) -> StoreExplanation:
    (store,) = explain(directory).stores
    return store


def refused(damage: Damage) -> None:
    pytest.fail(str(damage))


def kinds_of(directory: Path) -> dict[int, list[str]]:
    return {file.number: [reason.kind for reason in file.reasons] for file in only(directory).files}


@pytest.fixture(scope="module")
def explained(toymaker: Path) -> Explanation:
    return explain(toymaker)


@pytest.mark.parametrize("name", ["mixed", "toymaker"])
def test_the_text_is_the_golden_one(name: str, mixed: Path, explained: Explanation) -> None:
    text = render_text(explain(mixed) if name == "mixed" else explained)
    golden = DATA / f"explain-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_the_size_of_the_files_is_known_from_two_that_are_alike(mixed: Path, toymaker: Path, kinds: Path) -> None:
    assert [file_bytes(directory) for directory in (mixed, toymaker, kinds)] == [64 << 10, 512 << 10, None]


@pytest.mark.parametrize("width", [80, 100])
def test_the_text_keeps_to_the_terminal(explained: Explanation, width: int) -> None:
    assert max(map(len, render_text(explained, width).splitlines())) <= width


def test_references_are_those_of_the_broker_at_each_of_its_checkpoints(toymaker: Path) -> None:
    """The broker writes down which files' acks need which files; we derive the same from the acks."""
    journal = Journal(find_stores(toymaker).stores[0])
    replay = Replay(Outcomes.read(journal, refused))
    checkpoints = 0
    for entry in read_entries(journal, refused):
        replay.apply(entry)
        if isinstance(entry.command, AckMessageFileMap):
            derived: dict[int, set[int]] = defaultdict(set)
            for source in (replay.ack_files, replay.transaction_files):
                for number, needed in source.items():
                    derived[number].update(needed)
            broker = read_ack_map(entry.command.map)
            # What the broker has forgotten by then, it has collected.
            assert all(needed <= derived[number] for number, needed in broker.items())
            assert all(number in broker or _collected(toymaker, number) for number in derived)
            for number, said in broker.items():
                assert all(_collected(toymaker, n) for n in derived[number] - said)
            checkpoints += 1
    assert checkpoints == 42


def _collected(directory: Path, number: int) -> bool:
    return (directory / "archive" / f"db-{number}.log").exists()


def test_every_file_that_the_broker_still_had_is_kept(explained: Explanation) -> None:
    (store,) = explained.stores
    assert (len(store.files), store.archived_files) == (44, 7)
    assert all(file.kept for file in store.files)
    assert store.summary.startswith(
        "28 of 44 journal files are kept only by acks; "
        "queue://dlq with 16 pending messages of 18.8 KB pins 44 files, 23.1 MB (22.5 MB could go"
    )


def test_json_is_plain(mixed: Path) -> None:
    explanation = explain(mixed)
    found = json.loads(json.dumps(explanation.to_json()))
    (store,) = found["stores"]
    assert found["directory"] == str(mixed)
    assert [file["number"] for file in store["files"]] == [1, 2, *range(9, 23)]
    assert store["files"][2]["chain"] == [9, 1]
    assert [file["kept"] for file in store["files"]] == [file.kept for file in explanation.stores[0].files]
    assert store["summary"] == explanation.stores[0].summary
    assert store["pending"][0]["destination"] == "queue://OLD"


def test_the_chain_of_acks_leads_to_the_pending_message(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("slow", "m:1"), w.add("fast", "m:2")))
    w.write_file(tmp_path / "db-2.log", w.batch(w.remove("fast", "m:2"), w.add("fast", "m:3")))
    w.write_file(tmp_path / "db-3.log", w.batch(w.remove("fast", "m:3"), w.add("fast", "m:4")))
    w.write_file(tmp_path / "db-4.log", w.batch(w.add("fast", "m:5")), w.batch(w.remove("fast", "m:5")))
    w.write_file(tmp_path / "db-5.log", w.batch(w.remove("fast", "m:4")))
    store = only(tmp_path)
    chains = {file.number: (file.chain, file.root) for file in store.files}
    slow = ("queue://slow",)
    assert chains == {1: ((), ()), 2: ((2, 1), slow), 3: ((3, 2, 1), slow), 4: ((), ()), 5: ((), ())}
    assert [file.kept for file in store.files] == [True, True, True, False, True]
    (pending,) = store.pending
    sizes = {file.number: file.bytes for file in store.files}
    assert (pending.destination, pending.messages, pending.kept_files) == ("queue://slow", 1, 4)
    assert pending.freed_bytes == sizes[1] + sizes[2] + sizes[3]
    assert "nothing keeps 1 file" in store.summary
    assert "db-3 > db-2 > db-1, kept by queue://slow" in render_text(explain(tmp_path))


def test_unfinished_transactions_keep_all_between_their_records(tmp_path: Path) -> None:
    xid = w.xa(86, b"g", b"b")
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:0"), w.remove("a", "m:0")))
    w.write_file(tmp_path / "db-2.log", w.batch(w.add("a", "m:1", xid)))
    w.write_file(tmp_path / "db-3.log", w.batch(w.add("a", "m:2"), w.remove("a", "m:2")))
    w.write_file(tmp_path / "db-4.log", w.batch(w.add("a", "m:3", xid), w.prepare(xid)))
    w.write_file(tmp_path / "db-5.log", w.batch(w.loaded()))
    assert kinds_of(tmp_path) == {
        1: [],
        2: ["transaction"],
        3: ["transaction"],
        4: ["transaction", "acks"],
        5: ["write-file"],
    }
    (transaction,) = only(tmp_path).transactions
    assert (transaction.id, transaction.state, transaction.operations) == ("xa:86:67:62", "prepared", 2)
    assert transaction.files == (2, 4)


def test_the_outcome_of_a_transaction_needs_the_files_of_its_operations(tmp_path: Path) -> None:
    tx = w.local("c", 1)
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1", tx)))
    w.write_file(tmp_path / "db-2.log", w.batch(w.commit(tx)))
    w.write_file(tmp_path / "db-3.log", w.batch(w.loaded()))
    assert kinds_of(tmp_path) == {1: ["pending-messages"], 2: ["acks"], 3: ["write-file"]}
    assert [reason.text for reason in only(tmp_path).files[1].reasons] == [
        "holds acks or transaction outcomes for db-1.log"
    ]


def test_a_subscription_keeps_its_record_until_it_moves_along(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.subscribe("t", "c:x")))
    w.write_file(tmp_path / "db-2.log", w.batch(w.subscribe("t", "c:y"), w.loaded()))
    w.write_file(tmp_path / "db-3.log", w.batch(w.loaded()))
    assert kinds_of(tmp_path) == {1: [], 2: ["subscription"], 3: ["write-file"]}
    w.write_file(tmp_path / "db-3.log", w.batch(w.add("t", "m:1", kind=w.TOPIC)))
    assert kinds_of(tmp_path)[1] == ["subscription"]
    positions = {s.key: (s.pending_messages, s.oldest_file) for s in only(tmp_path).subscriptions}
    assert positions == {"c:x": (1, 3), "c:y": (1, 3)}


def test_a_rewritten_message_keeps_its_new_file(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1")))
    w.write_file(tmp_path / "db-2.log", w.batch(w.update(w.add("a", "m:1"))))
    w.write_file(tmp_path / "db-3.log", w.batch(w.loaded()))
    assert kinds_of(tmp_path) == {1: [], 2: ["pending-messages"], 3: ["write-file"]}


def test_files_after_the_one_being_written_are_kept(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-4.log", w.batch(w.loaded()))
    w.write_file(tmp_path / "db-5.log", w.batch(w.rewritten(3), w.remove("a", "m:1")))
    assert kinds_of(tmp_path) == {4: ["write-file"], 5: ["write-file"]}
    assert "comes after db-4.log" in render_text(explain(tmp_path))


def test_an_mkahadb_is_explained_store_by_store(tmp_path: Path) -> None:
    multi_store(tmp_path)
    stores = explain(tmp_path).stores
    assert [store.name for store in stores] == ["#210", "queue#3a#2f#2fa", "txStore"]
    text = render_text(explain(tmp_path))
    assert "== #210" in text
    assert text.count("why it is kept") == 3


def test_an_mkahadb_whose_stores_have_directories_of_their_own(tmp_path: Path) -> None:
    multi_store(tmp_path)
    (tmp_path / "orders").mkdir()
    (tmp_path / "queue#3a#2f#2fa").rename(tmp_path / "orders" / "queue#3a#2f#2fa")
    assert [store.name for store in explain(tmp_path).stores] == ["#210", "queue#3a#2f#2fa", "txStore"]


def test_an_archive_alone_has_nothing_to_explain(tmp_path: Path) -> None:
    w.write_file(tmp_path / "archive" / "db-1.log", w.batch(w.add("a", "m:1")))
    with pytest.raises(TraceError, match="archived files only"):
        explain(tmp_path)


def test_damage_is_part_of_the_explanation(tmp_path: Path) -> None:
    bad = bytearray(w.batch(w.add("a", "m:1")))
    bad[40] ^= 1
    w.write_file(tmp_path / "db-1.log", w.batch(w.loaded()), bytes(bad), w.batch(w.add("a", "m:2")))
    text = render_text(explain(tmp_path))
    assert "Damage:" in text
    assert "the checksum of a batch" in text


@pytest.mark.parametrize("cut", [0, 4, 5, 40, 60, -1])
def test_what_is_no_ack_map_is_refused(cut: int, toymaker: Path) -> None:
    journal = Journal(find_stores(toymaker).stores[0])
    maps = (e.command.map for e in read_entries(journal, refused) if isinstance(e.command, AckMessageFileMap))
    whole = next(data for data in maps if len(data) > 150)
    assert read_ack_map(whole)
    with pytest.raises(AckMapError):
        read_ack_map(whole[:cut])


def test_an_unreadable_ack_map_is_done_without(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1"), w.add("a", "m:2")))
    w.write_file(tmp_path / "db-2.log", w.batch(w.remove("a", "m:2"), w.command(9, w.field(1, b"?"))))
    w.write_file(tmp_path / "db-3.log", w.batch(w.loaded()))
    assert kinds_of(tmp_path)[2] == ["ack-map", "acks"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (9_216, "9.2 KB"), (23_068_672, "23.1 MB"), (5e15, "5,000.0 TB")],
)
def test_sizes_read_well(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_names_are_no_commands_to_a_terminal(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a\x1b[2J", "m:\x1b1"), w.subscribe("t\x07", "k\x1b")))
    text = render_text(explain(tmp_path))
    assert r"queue://a\x1b[2J" in text
    assert not {"\x1b", "\x07"} & set(text)
