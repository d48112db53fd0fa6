"""Traces in and out, and everything that can be wrong with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.policies.advisor import UsageEvent, from_events, read_trace, write_trace
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.trace.table import conform
from anabranch.policies.errors import TraceError


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
    assert "column op is 'peek'" in _bad(tmp_path, strange)
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
        ("seq,ts,op,destination,message_id\n0,1,send,a,1\n1,2,eat,a,1\n", "row 2: column op is 'eat'"),
        ("seq,ts,op,destination,message_id\n0,1,send,a,1\n1,2,,a,1\n", "column op is empty in 1 row, first in row 2"),
        ("seq,ts,op,destination,message_id\n0,1,send,a,1\n1,2,ack,a,1\n", "no send has a size: give the column size"),
        ("seq,seq,ts,op,destination,message_id\n0,0,1,send,a,1\n", "has the column seq more than once; leave one"),
        *(
            (f"seq,ts,op,destination,message_id,size\n0,1,send,a,1,9\n1,{ts},ack,a,1,9\n",
             f"t.csv: row 2: column ts is {shown}; expected seconds since the epoch, such as 1767571200.5 (divide "
             "milliseconds by 1000); or choose the clock seq (--clock seq)")
            for ts, shown in (("inf", "inf"), ("-inf", "-inf"), ("nan", "nan"), ("NaN", "nan"), ("1e308", "1e+308"),
                              ("1767571200000", "1767571200000.0"))
        ),
        *(
            (f"seq,ts,op,destination,message_id,{name}\n0,1,send,a,1,1\n1,2,send,a,2,{value}\n",
             f"t.csv: row 2: column {name} is {value}; {expected}")
            for name, value, expected in (
                ("size", "-5", "it is 0 or more, or empty where it is not known"),
                ("body_size", "-5", "it is 0 or more, or empty where it is not known"),
                ("acks_needed", "-5", "it is 0 or more, or empty where it is not known"),
                ("body_size", "9000000000000000000", "it is in bytes, and 1099511627776 (1 TiB) at most"),
                ("size", "9000000000000000000", "it is in bytes, and 1099511627776 (1 TiB) at most"),
            )
        ),
        ("seq,ts,op,destination,message_id,body_size\n0,1,send,a,1,9e18\n", "line 2, column body_size is '9e18'; exp"),
        ("seq,ts,op,destination,message_id,size\n0,10,send,a,1,9\n1,9,send,a,2,9\n2,8,ack,a,1,9\n",
         "column ts goes backwards, first from 10.0 at seq 0 to 9.0 at seq 1, and never comes after its first time; "
         "number the operations (seq) in the order in which they happened, or choose the clock seq"),
        ("seq,ts,op,destination,message_id,size\n0,10,send,a,1,9\n1,10,ack,a,1,9\n", "column ts is 10.0 in every row; "
         "choose the clock seq"),
        ("seq,ts,op,destination,message_id,size\n0,10,send,a,1,9\n", "there is one operation alone; give a trace that"),
        ("seq,ts,op,destination,message_id,size\n-5,1,send,a,1,9\n9223372036854775807,2,ack,a,1,9\n",
         "column seq goes from -5 to 9223372036854775807; number the operations 0, 1, 2, ..."),
    ],
)  # fmt: skip
def test_a_csv_file_by_hand(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        build(read_trace(path), source=str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_clock_is_no_matter_where_order_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("seq,ts,op,destination,message_id,size\n0,1,send,a,1,9\n1,inf,ack,a,1,nan\n2,nan,ack,nan,1,\n")
    with pytest.raises(TraceError, match="column destination is empty in 1 row, first in row 3"):
        read_trace(path)  # as ever, in every column but ts
    path.write_text(path.read_text().replace("ack,nan", "ack,b"))
    assert build(read_trace(path), clock="seq").duration == pytest.approx(0.002)


def test_how_far_a_clock_goes_back_is_told() -> None:
    times = [10.0, 5.0, 6.5, 7.0, 11.0]
    (finding,) = (
        finding
        for finding in build(from_events(e._replace(ts=ts) for e, ts in zip(events(), times, strict=True))).findings
        if finding.code == "clock-backwards"
    )
    assert finding.count == 3  # all that lie before the 10.0, not the one step down alone
    assert finding.message == (
        "times that lie before an earlier operation's, by 5 s at most; the latest so far is used"
    )


def test_a_row_of_a_directory_is_told_with_its_file(tmp_path: Path) -> None:
    table = from_events([*events()[:4], events()[4]._replace(ts=float("inf"))])
    write_trace(table.slice(0, 3), tmp_path / "a.parquet")
    (tmp_path / "more").mkdir()
    write_trace(table.slice(3), tmp_path / "more" / "b.parquet")
    with pytest.raises(TraceError, match=r"row 2 of more/b\.parquet: column ts is inf"):
        build(read_trace(tmp_path), source=str(tmp_path))
    floats = pa.table({**table.slice(3).to_pydict(), "size": [1.0, float("nan")]})
    write_trace(floats, tmp_path / "more" / "b.parquet")
    with pytest.raises(TraceError, match=r"row 2: column size is nan; expected a whole number"):
        read_trace(tmp_path / "more" / "b.parquet")


@pytest.mark.parametrize("text", ["hdfs://namenode:8020/t.parquet", "s3a:/bucket/t.parquet", "file://other/t.csv"])
def test_a_trace_on_another_file_system_is_refused_as_such(text: str) -> None:
    with pytest.raises(TraceError, match=f"the trace {text}: files are read and written on this machine alone"):
        read_trace(text)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    table = from_events(events())
    path = tmp_path / "a trace.csv"
    write_trace(table, path)
    assert read_trace(path.as_uri()).to_pylist() == table.to_pylist()


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
from anabranch.policies.advisor.trace.events import UsageEvent
from anabranch.policies.errors import MissingExtraError
try:
    from anabranch.policies.advisor import recommend
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'anabranch[recommend]'" in done.stdout
