"""Traces in and out, and everything that can be wrong with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.policies.errors import TraceError
from anabranch.policies.partitioning import UsageEvent, from_events, read_trace, write_trace
from anabranch.policies.partitioning.operations import build
from anabranch.policies.partitioning.trace import conform


def events() -> list[UsageEvent]:
    return [
        UsageEvent(0, 10.0, "send", "queue://a", "1", 100, "t1", 1, None, 60),
        UsageEvent(1, 10.5, "send", "topic://b", "1", 200, "t1", 2, None, None),
        UsageEvent(2, 11.0, "ack", "queue://a", "1", 40, None),
        UsageEvent(3, 12.0, "ack", "topic://b", "1", 41, None, 1, "s1"),
        UsageEvent(4, 13.0, "ack", "topic://b", "1", 42, None, 1, "s2"),
    ]


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.feather", "t.csv"])
def test_every_format_keeps_the_trace(tmp_path: Path, name: str) -> None:
    table = from_events(events())
    write_trace(table, tmp_path / name)
    assert read_trace(tmp_path / name).to_pylist() == table.to_pylist()


def test_a_directory_of_parquet(tmp_path: Path) -> None:
    table = from_events(events())
    write_trace(table.slice(0, 3), tmp_path / "a.parquet")
    write_trace(table.slice(3), tmp_path / "b.parquet")
    assert read_trace(tmp_path).to_pylist() == table.to_pylist()


def test_lives_are_joined() -> None:
    operations = build(from_events(events()), model="kahadb")
    assert operations.destinations == ("queue://a", "topic://b")
    assert operations.end.tolist() == [11.0, 13.0, 11.0, 12.0, 13.0]
    assert operations.send.tolist() == [-1, -1, 0, 1, 1]
    assert operations.size.tolist() == [100, 200, 40, 41, 42]
    assert [(t.members, t.count) for t in operations.transactions] == [((0, 1), 1)]
    assert not operations.findings


def test_rows_out_of_order_are_put_in_order() -> None:
    table = from_events(events())
    shuffled = table.take([4, 2, 0, 3, 1])
    assert build(shuffled).end.tolist() == build(table).end.tolist()


def test_a_bare_name_is_a_queue() -> None:
    table = from_events([events()[0]._replace(destination="a"), events()[2]])
    assert build(table).destinations == ("queue://a",)


@pytest.mark.parametrize(
    ("change", "code", "count"),
    [
        (lambda e: [x for x in e if x.op == "send"], "no-acks", 1),
        (lambda e: [x for x in e if x.op == "send"], "pending-sends", 2),
        (lambda e: [x for x in e if x.op == "ack"], "no-sends", 1),
        (lambda e: [x for x in e if x.op == "ack"], "unknown-acks", 3),
        (lambda e: e[:4], "pending-sends", 1),
        (lambda e: [e[1], e[2]], "unknown-acks", 1),
        (lambda e: [e[2]._replace(seq=0, ts=9.0), e[0]._replace(seq=1)], "early-acks", 1),
        (lambda e: [*e, e[0]._replace(seq=5, ts=14.0)], "repeated-sends", 1),
        (lambda e: [*e, e[2]._replace(seq=5, ts=14.0)], "surplus-acks", 1),
        (lambda e: [*e, e[0]._replace(seq=5, ts=3.0, message_id="2")], "clock-backwards", 1),
        (lambda e: e, "no-body-size", 1),
        (lambda e: [e[0], e[1]._replace(size=0)], "no-size", 1),
    ],
)
def test_what_a_trace_cannot_tell_is_counted(change, code: str, count: int) -> None:  # type: ignore[no-untyped-def]
    found = {finding.code: finding.count for finding in build(from_events(change(events()))).findings}
    assert found[code] == count


def test_operations_without_a_size_get_the_default() -> None:
    operations = build(from_events([e._replace(size=0) for e in events()]), model="kahadb")
    assert operations.size.tolist() == [124, 64, 100, 100, 100]
    assert {f.code: f.count for f in operations.findings}["no-size"] == 5


def _bad(tmp_path: Path, table: pa.Table, **options: str) -> str:
    write_trace(table, tmp_path / "t.parquet")
    with pytest.raises(TraceError) as caught:
        build(read_trace(tmp_path / "t.parquet"), **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_unusable_traces_say_what_and_what_next(tmp_path: Path) -> None:
    good = from_events(events())
    assert "holds no operation" in _bad(tmp_path, good.slice(0, 0))
    assert "lacks the columns op, message_id" in _bad(tmp_path, good.drop_columns(["op", "message_id"]))
    duplicate = from_events([e._replace(seq=min(e.seq, 3)) for e in events()])
    assert "repeats a value 1 time, first 3" in _bad(tmp_path, duplicate)
    strange = from_events([events()[0]._replace(op="peek")])
    assert "['peek']" in _bad(tmp_path, strange)
    assert "row 1: column size is -1" in _bad(tmp_path, from_events([events()[0]._replace(size=-1)]))
    assert "unknown scheme" in _bad(tmp_path, from_events([events()[0]._replace(destination="ftp://x")]))
    still = from_events([e._replace(ts=1.0) for e in events()])
    assert "--clock seq" in _bad(tmp_path, still)
    assert "column ts is empty in 5 rows" in _bad(tmp_path, good.drop_columns(["ts"]))
    assert build(conform(good.drop_columns(["ts"])), clock="seq").duration == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seq,ts,op,destination,message_id,size\n0,1,send,a,1,9\n1,noon,ack,a,1,9\n",
         "line 3, column ts is 'noon'; expected seconds since the epoch, such as"),
        ("seq,ts,op,destination,message_id,size\n0,1,send,a,1,big\n", "line 2, column size is 'big'; expected a whole"),
        ("seq;ts;op;destination;message_id\n0;1;send;a;1\n", "separated by semicolons; separate its columns by commas"),
        ("Seq,ts,Op,destination,message_id\n0,1,send,a,1\n", "lacks the columns seq, op; it has Seq, ts, Op, "
         "destination, message_id; names are written in small letters"),
        ("seq,ts,op,destination,message_id\n0,1,send,a,1\n1,2,ack,ftp://a,1\n", "row 2: unknown scheme 'ftp'"),
        ("seq,ts,op,destination,message_id\n0,1,send,a,1\n1,2,eat,a,1\n", "row 2: column op holds ['eat']"),
        ("seq,ts,op,destination,message_id\n0,1,send,a,1\n1,2,,a,1\n", "column op is empty in 1 row, first in row 2"),
        ("seq,ts,op,destination,message_id\n0,1,send,a,1\n1,2,ack,a,1\n", "no send has a size: give the column size"),
    ],
)  # fmt: skip
def test_a_csv_file_by_hand(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        build(read_trace(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no trace at"):
        read_trace(tmp_path / "none.parquet")
    (tmp_path / "t.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("seq,op\n0,send\n1\n")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "t.csv")
    (tmp_path / "t.txt").write_text("")
    with pytest.raises(TraceError, match="suffix"):
        read_trace(tmp_path / "t.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"holds no \.parquet"):
        read_trace(tmp_path / "empty")


def test_a_core_installation_imports_the_package_and_names_the_extra() -> None:
    code = """
import sys
blocked = ("numpy", "numba", "pyarrow", "pandas", "pyspark")
for name in blocked:
    sys.modules[name] = None
import anabranch.policies
from anabranch.policies.partitioning.events import UsageEvent
from anabranch.policies.errors import MissingExtraError
try:
    from anabranch.policies.partitioning import recommend
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'anabranch[recommend]'" in done.stdout
