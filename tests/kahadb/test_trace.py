"""The usage trace: which operations take effect, in which order, with which bytes and which clock."""

from __future__ import annotations

import csv
import io
import lzma
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.adapters.kahadb import explain, usage_trace
from anabranch.adapters.kahadb.pending import pending_of
from anabranch.adapters.kahadb.replay import SeenIds
from anabranch.policies.advisor import from_events
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.trace.events import UsageEvent

from . import writer as w
from .conftest import TOYMAKER

T0 = 1_700_000_000_000


def trace_of(directory: Path, *batches: bytes) -> list[UsageEvent]:
    w.write_file(directory / "db-1.log", *batches)
    return list(usage_trace(directory))


def brief(events: list[UsageEvent]) -> list[tuple[str, str, str | None]]:
    return [(e.op, f"{e.destination} {e.message_id}", e.tx) for e in events]


def size_of(*payloads: bytes) -> int:
    return len(w.batch(*payloads))


def test_the_toymakers_trace_is_the_script_that_the_broker_was_given(toymaker: Path) -> None:
    script = lzma.decompress((TOYMAKER / "toymaker-ops.csv.xz").read_bytes()).decode()
    operations = list(csv.DictReader(io.StringIO(script)))
    trace = usage_trace(toymaker)
    names: dict[tuple[str, str], str] = {}
    transactions: dict[str, str] = {}
    for seq, (event, wanted) in enumerate(zip(trace, operations, strict=True)):
        assert (event.seq, event.op, event.destination) == (seq, wanted["op"], f"queue://{wanted['destination']}")
        name = names.setdefault((event.destination, event.message_id), wanted["id"])
        assert name == wanted["id"]
        if event.op == "send":
            assert event.body_size == int(wanted["size"]) < event.size
        assert (event.tx is None) == (not wanted["tx"])
        if event.tx is not None:
            assert transactions.setdefault(event.tx, wanted["tx"]) == wanted["tx"]
    findings = trace.findings
    assert (findings.sends, findings.acks, findings.pending) == (23_416, 23_355, 61)
    assert findings.transactions == {"committed": 5_400}
    assert findings.acks_unknown == 0
    assert not findings.warnings()
    assert findings.bytes_other < 0.006 * findings.bytes_total


def test_findings_of_the_mixed_journal(mixed: Path) -> None:
    findings = usage_trace(mixed).findings
    assert (findings.sends, findings.acks, findings.acks_unknown, findings.pending) == (162, 286, 132, 8)
    assert (findings.updates, findings.acks_by_type) == (161, {"individual": 286})
    assert findings.missing_files == ("mixed-kahadb db-3.log to db-8.log",)
    assert len(findings.warnings()) == 3  # the files that are gone, the acks, the redeliveries


def test_files_before_the_first_are_told(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-7.log", w.batch(w.add("a", "m:1")))
    w.write_file(tmp_path / "db-9.log", w.batch(w.remove("a", "m:1")))
    found = usage_trace(tmp_path).findings
    assert found.missing_files == (f"{tmp_path.name} db-1.log to db-6.log, db-8.log",)
    (tmp_path / "archive").mkdir()
    w.write_file(tmp_path / "archive" / "db-8.log", w.batch(w.add("a", "m:2")))
    assert not usage_trace(tmp_path).findings.missing_files  # where an archive begins is where it was begun


def test_findings_of_all_kinds(kinds: Path) -> None:
    trace = usage_trace(kinds)
    events = list(trace)
    findings = trace.findings
    assert findings.transactions == {"committed": 2, "rolled back": 2, "prepared": 1}
    assert findings.prepared == ("xa:86:01020302:09c802",)
    assert findings.acks_by_type == {"standard": 5, "unmatched": 2}
    composite = [e.destination for e in events if e.message_id == "ID:vm-44563-1795295268737-4:1:1:3:1"]
    assert composite == ["queue://COMP.A", "queue://COMP.B"]
    local = [e for e in events if e.tx == "ID:vm-44563-1795295268737-4:1:1"]
    assert [(e.op, e.size) for e in local] == [("send", 397), ("send", 397), ("ack", 390 + 72)]
    assert {e.subscription for e in events if e.destination == "topic://PRICES.X" and e.op == "ack"} == {"cid1:sub1"}


def test_iterating_again_gives_the_same(mixed: Path) -> None:
    trace = usage_trace(mixed)
    assert list(trace) == list(trace)


def test_progress_reaches_the_end(mixed: Path) -> None:
    calls: list[tuple[int, int]] = []
    list(usage_trace(mixed, progress=lambda done, total: calls.append((done, total))))
    assert max(done for done, _ in calls) == calls[-1][1]


def test_transactions_count_once_committed_and_keep_their_place(tmp_path: Path) -> None:
    tx = {n: w.local("c", n) for n in range(1, 5)}
    committed = w.commit(tx[1])
    events = trace_of(
        tmp_path,
        w.batch(w.loaded()),
        w.batch(w.add("a", "m:1", tx[1])),
        w.batch(w.add("a", "m:2")),
        w.batch(w.add("a", "m:3", tx[2])),
        w.batch(w.add("b", "m:4", tx[1])),
        w.batch(committed),
        w.batch(w.rollback(tx[2])),
        w.batch(w.commit(tx[3])),  # it held nothing persistent
        w.batch(w.remove("a", "m:2", tx[4])),
    )
    assert brief(events) == [
        ("send", "queue://a m:1", "c:1"),
        ("send", "queue://a m:2", None),
        ("send", "queue://b m:4", "c:1"),
    ]
    assert events[2].size == size_of(w.add("b", "m:4", tx[1])) + size_of(committed)
    findings = usage_trace(tmp_path).findings
    assert findings.transactions == {"committed": 1, "rolled back": 1, "open": 1}
    assert "still open" in findings.warnings()[0]


def test_a_restart_discards_what_was_not_prepared(tmp_path: Path) -> None:
    xid, other = w.xa(86, b"g", b"b"), w.xa(86, b"h", b"b")
    events = trace_of(
        tmp_path,
        w.batch(w.add("a", "m:1", w.local("c", 1)), w.add("a", "m:2", xid), w.add("a", "m:3", other)),
        w.batch(w.prepare(xid)),
        w.batch(w.loaded()),
        w.batch(w.commit(xid), w.commit(w.local("c", 1)), w.commit(other)),
    )
    assert brief(events) == [("send", "queue://a m:2", "xa:86:67:62")]
    assert usage_trace(tmp_path).findings.transactions == {"committed": 1, "discarded by a restart": 2}


def test_an_xa_id_may_be_used_again(tmp_path: Path) -> None:
    xid = w.xa(86, b"g", b"b")
    events = trace_of(
        tmp_path,
        w.batch(w.add("a", "m:1", xid), w.prepare(xid), w.rollback(xid)),
        w.batch(w.add("a", "m:2", xid), w.prepare(xid), w.commit(xid)),
        w.batch(w.add("a", "m:3", xid), w.prepare(xid)),
    )
    assert [e.message_id for e in events] == ["m:2"]
    assert usage_trace(tmp_path).findings.transactions == {"committed": 1, "rolled back": 1, "prepared": 1}


def test_a_topic_message_needs_an_ack_of_each_subscription_there_is(tmp_path: Path) -> None:
    topic = w.TOPIC
    events = trace_of(
        tmp_path,
        w.batch(w.add("t", "m:0", kind=topic)),  # nobody subscribes
        w.batch(w.subscribe("t", "c:x")),
        w.batch(w.add("t", "m:1", kind=topic)),
        w.batch(w.subscribe("t", "c:y")),
        w.batch(w.add("t", "m:2", kind=topic)),
        w.batch(w.remove("t", "m:2", kind=topic, subscription="c:x")),
        w.batch(w.subscribe("t", "c:y", end=True)),
        w.batch(w.remove("t", "m:1", kind=topic, subscription="c:y")),  # never wanted it
    )
    assert [(e.op, e.message_id, e.acks_needed, e.subscription, e.size > 0) for e in events] == [
        ("send", "m:0", 1, None, True),
        ("ack", "m:0", 1, None, False),
        ("send", "m:1", 1, None, True),
        ("send", "m:2", 2, None, True),
        ("ack", "m:2", 1, "c:x", True),
        ("ack", "m:2", 1, "c:y", False),
    ]
    findings = usage_trace(tmp_path).findings
    assert (findings.pending, findings.acks_repeated) == (1, 1)


def test_a_retroactive_subscription_does_not_end_a_message_early(tmp_path: Path) -> None:
    events = trace_of(
        tmp_path,
        w.batch(w.subscribe("t", "c:x")),
        w.batch(w.add("t", "m:1", kind=w.TOPIC)),
        w.batch(w.subscribe("t", "c:y", retroactive=True)),
        w.batch(w.remove("t", "m:1", kind=w.TOPIC, subscription="c:x")),
        w.batch(w.remove("t", "m:1", kind=w.TOPIC, subscription="c:y")),
    )
    assert [(e.op, e.acks_needed, e.subscription) for e in events] == [("send", 1, None), ("ack", 1, "c:y")]


def test_removing_a_destination_ends_its_messages(tmp_path: Path) -> None:
    events = trace_of(
        tmp_path,
        w.batch(w.add("a", "m:1"), w.add("b", "m:2")),
        w.batch(w.subscribe("t", "c:x"), w.subscribe("t", "c:y"), w.add("t", "m:3", kind=w.TOPIC)),
        w.batch(w.remove_destination("a"), w.remove_destination("t", w.TOPIC)),
    )
    ended = [(e.message_id, e.subscription, e.size) for e in events if e.op == "ack"]
    assert ended == [("m:1", None, 0), ("m:3", "c:x", 0), ("m:3", "c:y", 0)]
    assert usage_trace(tmp_path).findings.pending == 1


def test_the_next_event_of_the_destination_carries_an_update(tmp_path: Path) -> None:
    again = w.update(w.add("a", "m:1"))
    events = trace_of(
        tmp_path, w.batch(w.add("a", "m:1")), w.batch(again), w.batch(w.add("b", "m:2")), w.batch(w.remove("a", "m:1"))
    )
    assert [(e.op, e.size) for e in events] == [
        ("send", size_of(w.add("a", "m:1"))),
        ("send", size_of(w.add("b", "m:2"))),
        ("ack", size_of(w.remove("a", "m:1")) + size_of(again)),
    ]
    (warning,) = usage_trace(tmp_path).findings.warnings()
    assert warning.startswith("1 rewrite of messages that were redelivered")


def test_an_update_of_a_message_whose_send_is_gone_is_its_send(tmp_path: Path) -> None:
    events = trace_of(tmp_path, w.batch(w.update(w.add("a", "m:1", openwire=w.message(b"abc")))))
    assert [(e.op, e.message_id, e.body_size) for e in events] == [("send", "m:1", 3)]


def test_repeats_are_counted_and_left_out(tmp_path: Path) -> None:
    events = trace_of(
        tmp_path,
        w.batch(w.add("a", "m:1"), w.add("a", "m:1"), w.remove("a", "m:1"), w.remove("a", "m:1")),
        w.batch(w.remove("a", "m:9")),
    )
    assert brief(events) == [
        ("send", "queue://a m:1", None),
        ("ack", "queue://a m:1", None),
        ("ack", "queue://a m:9", None),
    ]
    findings = usage_trace(tmp_path).findings
    assert (findings.sends_repeated, findings.acks_repeated, findings.acks_unknown) == (1, 1, 1)
    assert sum(e.size for e in events) + findings.bytes_other == findings.bytes_total


def test_a_message_that_comes_back_under_its_id_is_another_one(tmp_path: Path) -> None:
    first = w.batch(w.add("a", "m:1"), w.remove("a", "m:1"))
    events = trace_of(tmp_path, first, w.batch(w.add("a", "m:1"), w.remove("a", "m:1")))
    again = f"m:1@1:{len(first) + 28}"
    assert [e.message_id for e in events] == ["m:1", "m:1", again, again]


def test_a_message_sent_again_is_not_the_one_whose_send_is_gone(tmp_path: Path) -> None:
    batches = [w.remove("a", "m:1"), w.add("a", "m:1"), w.subscribe("t", "c:x"), w.subscribe("t", "c:y")]
    batches += [w.remove("t", "m:2", kind=w.TOPIC, subscription=key) for key in ("c:x", "c:y")]
    again = w.batch(w.add("t", "m:2", kind=w.TOPIC))
    trace = [(e.op, e.message_id) for e in trace_of(tmp_path, w.batch(*batches), again)]
    assert trace[0] == ("ack", "m:1")
    assert trace[1][0] == "send"
    assert trace[1][1].startswith("m:1@1:")
    assert trace[2:4] == [("ack", "m:2")] * 2  # of two subscriptions
    assert trace[4][1].startswith("m:2@1:")
    table = from_events(usage_trace(tmp_path))
    assert [one.pending for one in build(table, model="kahadb", clock="seq").totals] == [1, 1]


def test_operations_of_names_that_are_none_here_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = [w.add(name, "m:1") for name in ("x" * 1100, "", "a\0b")]
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1"), *odd, w.remove("x" * 1100, "m:1")))
    trace = usage_trace(tmp_path)
    assert from_events(trace).column("destination").to_pylist() == ["queue://a"]
    assert trace.findings.nameless == 4
    told = "4 operations of destinations whose names are none here: not in the trace"
    assert told in trace.findings.warnings()
    assert sum(e.size for e in trace) + trace.findings.bytes_other == trace.findings.bytes_total


def test_copied_acks_count_once_their_source_is_gone(tmp_path: Path) -> None:
    tx = w.local("c", 1)
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1"), w.add("a", "m:2"), w.add("a", "m:3")))
    w.write_file(tmp_path / "db-2.log", w.batch(w.remove("a", "m:1"), w.remove("a", "m:2", tx), w.commit(tx)))
    w.write_file(tmp_path / "db-3.log", w.batch(w.add("a", "m:4")))
    copies = w.batch(w.rewritten(2), w.remove("a", "m:1"), w.remove("a", "m:2", tx), w.commit(tx))
    w.write_file(tmp_path / "db-4.log", copies)
    together = usage_trace(tmp_path)
    events = [(e.op, e.message_id) for e in together]
    assert events[3:] == [("ack", "m:1"), ("ack", "m:2"), ("send", "m:4")]
    (tmp_path / "db-2.log").unlink()
    alone = usage_trace(tmp_path)
    assert [(e.op, e.message_id) for e in alone] == events
    assert together.findings.pending == alone.findings.pending == 2
    assert together.findings.acks_repeated == alone.findings.acks_unknown == 0


def test_a_copied_ack_does_not_end_what_was_sent_again_after_it(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.loaded()), w.batch(w.add("a", "m:1"), w.add("a", "m:2")))
    # db-2.log held the ack of m:1. It has been compacted into db-4.log, by a broker whose checksums were off.
    w.write_file(tmp_path / "db-3.log", w.batch(w.add("a", "m:1"), w.add("a", "m:3")))
    w.write_file(tmp_path / "db-4.log", w.batch(w.rewritten(2), w.remove("a", "m:1"), checksum=False))
    w.write_file(tmp_path / "db-5.log", w.batch(w.add("a", "m:4")))
    assert [(e.op, e.message_id) for e in usage_trace(tmp_path)] == [
        ("send", "m:1"),
        ("send", "m:2"),
        ("ack", "m:1"),
        ("send", "m:1@3:28"),
        ("send", "m:3"),
        ("send", "m:4"),
    ]
    with pending_of(tmp_path) as pending:
        assert not pending.damages
        found = [message.command.message_id for one in pending.destinations for message in one.messages()]
    assert found == ["m:2", "m:1", "m:3", "m:4"]


def test_a_copied_ack_may_lie_behind_its_commit(tmp_path: Path) -> None:
    tx = w.local("c", 1)
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1"), w.add("a", "m:2")))
    w.write_file(tmp_path / "db-3.log", w.batch(w.remove("a", "m:2", tx), w.commit(tx)))
    w.write_file(tmp_path / "db-4.log", w.batch(w.rewritten(2), w.remove("a", "m:1", tx)))
    trace = usage_trace(tmp_path)
    assert [e.tx for e in trace if e.op == "ack"] == ["c:1", "c:1"]
    assert trace.findings.pending == 0


def test_copies_of_rolled_back_acks_are_not_open_transactions(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1")))
    w.write_file(tmp_path / "db-4.log", w.batch(w.rewritten(2), w.remove("a", "m:1", w.local("c", 1))))
    findings = usage_trace(tmp_path).findings
    assert (findings.pending, findings.transactions) == (1, {"discarded by a restart": 1})


def test_acks_take_their_clock_from_the_sends_around_them(tmp_path: Path) -> None:
    def sent(number: int, at_ms: int) -> bytes:
        return w.add("a", f"m:{number}", openwire=w.message(broker_in=T0 + at_ms))

    events = trace_of(
        tmp_path,
        w.batch(w.remove("a", "m:0")),
        w.batch(sent(1, 1000), sent(2, 2000)),
        w.batch(w.remove("a", "m:1"), w.remove("a", "m:2"), w.remove("a", "m:0")),
        w.batch(sent(3, 6000), w.remove("a", "m:3")),
    )
    assert [e.ts - T0 / 1000 for e in events] == [1, 1, 2, 3, 4, 5, 6, 6]
    assert usage_trace(tmp_path).findings.clocks_interpolated == 5


def test_header_bytes_are_shared_and_nothing_is_lost(tmp_path: Path) -> None:
    payloads = [w.add("a", f"m:{n}") for n in range(5)]
    events = trace_of(tmp_path, w.batch(*payloads))
    assert sum(e.size for e in events) == size_of(*payloads)
    assert [e.size - len(w.record(p)) for e, p in zip(events, payloads, strict=True)] == [6, 6, 6, 5, 5]


def test_archives_are_found_beside_and_inside(tmp_path: Path) -> None:
    old, new = w.batch(w.add("a", "m:1")), w.batch(w.remove("a", "m:1"))
    for archive, live in (("x/archive", "x"), ("y/data-archive", "y"), ("z/archive", "z/kahadb")):
        w.write_file(tmp_path / archive / "db-1.log", old)
        w.write_file(tmp_path / live / "db-2.log", new)
    for name in "xyz":
        trace = usage_trace(tmp_path / name)
        assert [e.op for e in trace] == ["send", "ack"]
        assert trace.findings.files == 2
    shutil.rmtree(tmp_path / "z" / "kahadb")
    assert [e.op for e in usage_trace(tmp_path / "z")] == ["send"]


def test_a_live_file_wins_over_an_archived_one_and_that_is_said(tmp_path: Path) -> None:
    w.write_file(tmp_path / "archive" / "db-1.log", w.batch(w.add("a", "m:old")))
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1")))
    trace = usage_trace(tmp_path)
    assert [e.message_id for e in trace] == ["m:1"]
    assert trace.findings.shadowed == (tmp_path / "archive" / "db-1.log",)
    assert "the live directory has that file too" in trace.findings.warnings()[0]


def multi_store(directory: Path) -> None:
    shared, lost, own = (w.xa(61616, b"ID:host-1", number) for number in (b"7", b"8", b"9"))

    def sent(name: str, number: int, tx: bytes = b"") -> bytes:
        return w.add(name, f"m:{number}", tx, openwire=w.message(broker_in=T0 + number * 1000))

    w.write_file(
        directory / "queue#3a#2f#2fa" / "db-1.log",
        w.batch(sent("a", 1)),
        w.batch(sent("a", 3, shared), w.prepare(shared), w.commit(shared)),
        w.batch(sent("a", 5, lost), w.prepare(lost)),
        w.batch(sent("a", 7, own), w.commit(own)),
    )
    w.write_file(
        directory / "#210" / "db-1.log",
        w.batch(sent("b", 2)),
        w.batch(sent("b", 4, shared), w.prepare(shared)),
        w.batch(sent("b", 6, lost), w.prepare(lost)),
    )
    w.write_file(directory / "txStore" / "db-1.log", w.batch(w.loaded(), w.prepare(shared)))


def test_the_stores_of_an_mkahadb_are_one_trace(tmp_path: Path) -> None:
    multi_store(tmp_path)
    trace = usage_trace(tmp_path)
    events = list(trace)
    assert [e.seq for e in events] == [0, 1, 2, 3, 4]
    # The second store never got its Commit: the transaction store's Prepare is the decision.
    assert brief(events) == [
        ("send", "queue://a m:1", None),
        ("send", "queue://b m:2", None),
        ("send", "queue://a m:3", "ID:host-1:7"),
        ("send", "queue://b m:4", "ID:host-1:7"),
        ("send", "queue://a m:7", "ID:host-1:9"),
    ]
    assert trace.findings.stores == 2
    assert trace.findings.prepared == ("ID:host-1:8",)


@given(st.lists(st.integers(0, 30), max_size=40))
def test_seen_ids_are_a_set(numbers: list[int]) -> None:
    ours, plain = SeenIds(), set[int]()
    for number in numbers:
        assert ours.add(f"p:{number}") == (number not in plain)
        plain.add(number)
    assert [n for n in range(32) if f"p:{n}" in ours] == sorted(plain)
    assert ours.add("no number")
    assert not ours.add("no number")
    assert "q:1" not in ours


STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "ack", "commit", "rollback", "restart"]), st.integers(0, 9), st.integers(0, 2)),
    max_size=50,
)


class Model:
    """A broker with one queue and two connections: what it writes, and what is pending. Slot 0 is no transaction."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.pending: set[int] = set()
        self.sent: set[int] = set()
        self.open: dict[int, list[tuple[str, int]]] = {}
        self.numbers = [0, 0, 0]

    def step(self, op: str, number: int, slot: int) -> None:
        if op == "restart":
            self.payloads.append(w.loaded())
            self.open.clear()
            self.numbers = [n + 1 for n in self.numbers]
        elif op in ("commit", "rollback"):
            self.finish(op, slot)
        elif self.can(op, number):
            self.sent.add(number)
            write = w.add if op == "send" else w.remove
            self.payloads.append(write("a", f"m:{number}", self.tx(slot)))
            if slot:
                self.open.setdefault(slot, []).append((op, number))
            else:
                self.apply(op, number)

    def can(self, op: str, number: int) -> bool:
        if op == "send":
            return number not in self.sent
        return number in self.pending and not any(("ack", number) in done for done in self.open.values())

    def finish(self, op: str, slot: int) -> None:
        if slot:
            self.payloads.append((w.commit if op == "commit" else w.rollback)(self.tx(slot)))
            for done in self.open.pop(slot, []):
                if op == "commit":
                    self.apply(*done)
            self.numbers[slot] += 1

    def apply(self, op: str, number: int) -> None:
        if op == "send":
            self.pending.add(number)
        else:
            self.pending.discard(number)

    def tx(self, slot: int) -> bytes:
        return w.local(f"c{slot}", self.numbers[slot]) if slot else b""


@given(STEPS)
@settings(max_examples=60)
def test_what_is_pending_is_what_a_plain_model_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    model = Model()
    for step in steps:
        model.step(*step)
    directory = tmp_path_factory.mktemp("model")
    half = len(model.payloads) // 2
    w.write_file(directory / "db-1.log", *(w.batch(payload) for payload in model.payloads[:half]))
    w.write_file(directory / "db-2.log", *(w.batch(payload) for payload in model.payloads[half:]))
    trace = usage_trace(directory)
    live: set[str] = set()
    for event in trace:
        (live.add if event.op == "send" else live.discard)(event.message_id)
    assert live == {f"m:{number}" for number in model.pending}
    assert trace.findings.pending == len(live)
    assert sum(p.messages for p in explain(directory).stores[0].pending) == len(live)
