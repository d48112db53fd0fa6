"""Damage anywhere: never a crash, never a loss that nothing names, and all that lies outside the damage is read."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.kahadb import explain, files, journal, render_text, usage_trace
from anabranch.adapters.kahadb.files import Damage, find_stores
from anabranch.adapters.kahadb.journal import Journal, Record
from anabranch.adapters.kahadb.pending import pending_of
from anabranch.policies.errors import TraceError

from ..shares import Share
from . import writer as w


@dataclass
class Original:
    """An undamaged journal: its records, and where the batch of each lies."""

    directory: Path
    records: dict[tuple[int, int], Record]
    batches: dict[tuple[int, int], tuple[int, int]]


def read(directory: Path) -> tuple[dict[tuple[int, int], Record], list[Damage]]:
    damages: list[Damage] = []
    journal = Journal(find_stores(directory).stores[0])
    return {(r.file, r.offset): r for r in journal.records(damages.append)}, damages


def original(directory: Path) -> Original:
    records, damages = read(directory)
    assert not damages
    batches = {}
    for file in find_stores(directory).stores[0].files:
        data, at = file.path.read_bytes(), 0
        while data[at : at + 4] == b"\x00\x00\x00\x1c":
            end = at + 28 + int.from_bytes(data[at + 16 : at + 20], "big")
            batches.update({place: (at, end) for place in records if place[0] == file.number and at <= place[1] < end})
            at = end
    return Original(directory, records, batches)


@pytest.fixture(scope="module")
def journals(kinds: Path, mixed: Path) -> list[Original]:
    return [original(kinds), original(mixed)]


def damage(path: Path, dice: random.Random) -> tuple[int, int]:
    """Harm the file at a random place, mostly where the data is; from where to where."""
    data = bytearray(path.read_bytes())
    used = len(bytes(data).rstrip(b"\x00"))
    at = dice.randrange(used if dice.random() < 0.9 else len(data))
    match dice.choice(["flip", "flip", "truncate", "zero", "noise"]):
        case "flip":
            end = at + 1
            data[at] ^= dice.randrange(1, 256)
        case "truncate":
            end = len(data)
            del data[at:]
        case "zero":
            end = min(len(data), at + dice.choice([8, 30, 512, 4096]))
            data[at:end] = bytes(end - at)
        case _:
            end = min(len(data), at + dice.choice([4, 64, 1024]))
            data[at:end] = dice.randbytes(end - at)
    path.write_bytes(data)
    return at, end


def check(before: Original, directory: Path, harmed: list[tuple[int, int, int]]) -> None:
    """`harmed` are (file, from, to)."""
    after, damages = read(directory)
    for place in after:
        assert place in before.records, f"{place} was never written"
        assert after[place].payload == before.records[place].payload
    for place in before.records.keys() - after.keys():
        start, end = before.batches[place]
        hit = [number == place[0] and start < to and end > at for number, at, to in harmed]
        assert any(hit), f"{place} is lost, though nothing harmed it"
        named = [d for d in damages if Path(d.path).name == f"db-{place[0]}.log" and d.offset <= place[1]]
        covered = [place[1] < d.offset + d.length or _reaches_end(d) for d in named]
        assert any(covered), f"nothing names the loss of {place}"
    assert all(d.reason for d in damages)


def _reaches_end(found: Damage) -> bool:
    return found.offset + found.length >= Path(found.path).stat().st_size or not found.length


def test_random_damage_is_survived_and_named(journals: list[Original], tmp_path: Path, share: Share) -> None:
    rounds = 0
    for round_number in share.of(range(share.count(64, 4000))):
        dice = random.Random(round_number)
        rounds += 1
        before = dice.choice(journals)
        directory = tmp_path / str(round_number)
        shutil.copytree(before.directory, directory)
        files = find_stores(directory).stores[0].files
        chosen = dice.sample(files, min(len(files), dice.choice([1, 1, 3])))
        harmed = [(file.number, *damage(file.path, dice)) for file in chosen]
        check(before, directory, harmed)
        trace = usage_trace(directory)
        assert sum(event.size for event in trace) + trace.findings.bytes_other == trace.findings.bytes_total
        assert render_text(explain(directory))
        shutil.rmtree(directory)
    share.counts.append(f"{rounds} damaged journals")


def test_each_deleted_file_is_named(mixed: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in mixed.glob("db-*.log"))
    for name in names:
        directory = tmp_path / name
        shutil.copytree(mixed, directory)
        (directory / name).unlink()
        findings = usage_trace(directory).findings
        named = [Path(d.path).name for d in findings.damages if d.kind == "missing"]
        assert name in named or any(name in line for line in findings.missing_files), name
        assert explain(directory).stores[0].files


def test_a_file_missing_from_a_whole_history_is_damage(toymaker: Path, tmp_path: Path) -> None:
    shutil.copytree(toymaker, tmp_path / "k")
    (tmp_path / "k" / "archive" / "db-2.log").unlink()
    (tmp_path / "k" / "db-30.log").unlink()
    findings = usage_trace(tmp_path / "k").findings
    assert [(Path(d.path).name, d.kind) for d in findings.damages] == [
        ("db-2.log", "missing"),
        ("db-30.log", "missing"),
    ]
    assert findings.acks_unknown > 0


def test_a_torn_tail_is_not_called_damage(tmp_path: Path) -> None:
    torn = w.batch(w.add("a", "m:2"))[:-7]
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1")), size=4096)
    w.write_file(tmp_path / "db-2.log", w.batch(w.remove("a", "m:1")), torn, mark=False)
    trace = usage_trace(tmp_path)
    assert [event.op for event in trace] == ["send", "ack"]
    assert [(d.kind, d.offset, Path(d.path).name) for d in trace.findings.damages] == [
        ("torn", len(w.batch(w.remove("a", "m:1"))), "db-2.log")
    ]


def test_the_same_in_a_file_that_others_follow_is_damage(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1")), w.batch(w.add("a", "m:2"))[:-7], mark=False)
    w.write_file(tmp_path / "db-2.log", w.batch(w.remove("a", "m:1")))
    assert [d.kind for d in usage_trace(tmp_path).findings.damages] == ["damaged"]


def test_a_compaction_file_does_not_make_the_write_file_an_old_one(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1")), w.batch(w.add("a", "m:2"))[:-7], mark=False)
    w.write_file(tmp_path / "db-2.log", w.batch(w.rewritten(9), w.remove("a", "m:0")))
    assert [d.kind for d in usage_trace(tmp_path).findings.damages] == ["torn"]


def test_a_checksum_error_in_a_finished_last_batch_is_damage(tmp_path: Path) -> None:
    bad = bytearray(w.batch(w.add("a", "m:1")))
    bad[-1] ^= 1
    w.write_file(tmp_path / "db-1.log", w.batch(w.loaded()), bytes(bad))
    assert [d.kind for d in usage_trace(tmp_path).findings.damages] == ["damaged"]


def test_batches_without_checksums_are_read(tmp_path: Path) -> None:
    w.write_file(
        tmp_path / "db-1.log",
        w.batch(w.add("a", "m:1")),
        w.batch(w.loaded(), w.add("a", "m:2"), checksum=False),  # a restart switched them off
        w.batch(w.remove("a", "m:1"), checksum=False),
    )
    trace = usage_trace(tmp_path)
    assert [event.op for event in trace] == ["send", "send", "ack"]
    assert not trace.findings.damages


def test_a_checksum_that_vanishes_in_between_is_damage(tmp_path: Path) -> None:
    lost = w.batch(w.add("a", "m:2"), checksum=False)
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1")), lost, w.batch(w.remove("a", "m:1")))
    trace = usage_trace(tmp_path)
    assert [event.op for event in trace] == ["send", "ack"]
    assert [(d.offset, d.length) for d in trace.findings.damages] == [(len(w.batch(w.add("a", "m:1"))), len(lost))]


def test_an_old_journal_without_end_marks_is_read_and_noted_once(tmp_path: Path) -> None:
    for number in (1, 2):
        w.write_file(tmp_path / f"db-{number}.log", w.batch(w.add("a", f"m:{number}")), size=4096, mark=False)
    trace = usage_trace(tmp_path)
    assert [event.op for event in trace] == ["send", "send"]
    assert [Path(d.path).name for d in trace.findings.damages] == ["db-2.log"]


def test_an_unknown_command_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1"), w.command(42), w.remove("a", "m:1")))
    trace = usage_trace(tmp_path)
    assert [event.op for event in trace] == ["send", "ack"]
    (found,) = trace.findings.damages
    assert "unknown command number 42" in found.reason
    assert found.offset == 28 + len(w.record(w.add("a", "m:1")))


def test_a_message_that_is_no_openwire_is_still_an_event(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1", openwire=b"?"), w.add("a", "m:2")))
    first, second = usage_trace(tmp_path)
    assert (first.body_size, second.body_size) == (None, 0)
    assert first.ts == second.ts == 1_700_000_000.0


@pytest.mark.parametrize("call", [usage_trace, explain])
def test_what_is_no_kahadb_is_refused(call: object, tmp_path: Path) -> None:
    assert callable(call)
    with pytest.raises(TraceError, match="does not exist"):
        call(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"holds no KahaDB journal: no db-<number>\.log"):
        call(tmp_path)
    (tmp_path / "db-1.log").write_text("a log of something else\n" * 100)
    with pytest.raises(TraceError, match="is not a KahaDB journal"):
        call(tmp_path)
    with pytest.raises(TraceError, match="is not a directory"):
        call(tmp_path / "db-1.log")


def test_an_unused_journal_is_an_empty_trace(tmp_path: Path) -> None:
    w.write_file(tmp_path / "db-1.log", size=4096)
    trace = usage_trace(tmp_path)
    assert list(trace) == []
    assert trace.findings.events == 0
    assert not trace.findings.damages
    assert [file.kept for file in explain(tmp_path).stores[0].files] == [True]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Nobody waits for a pipe's writer."""
    w.write_file(tmp_path / "db-1.log", w.batch(w.add("a", "m:1")))
    make(tmp_path / "db-2.log")
    make(tmp_path / "lock")
    with pending_of(tmp_path):
        pass
    trace = usage_trace(tmp_path)
    assert len(list(trace)) == 1
    assert [(d.kind, Path(d.path).name) for d in trace.findings.damages] == [("unreadable", "db-2.log")]


def test_permission_denied_is_one_clear_error(kinds: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    shutil.copytree(kinds, closed)
    closed.chmod(0)
    for path in tmp_path.parents:  # pytest's own directories, which root keeps to itself
        if path.name.startswith("pytest-"):
            path.chmod(0o755)
    program = (
        "import os, sys\n"
        "from anabranch.adapters.kahadb import explain\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: explain(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", program, str(closed)], capture_output=True, text=True, check=True)
    finally:
        closed.chmod(0o755)
    assert done.stdout.startswith("TraceError")
    assert "Permission denied" in done.stdout


def test_reading_writes_nothing(mixed: Path, tmp_path: Path) -> None:
    directory = tmp_path / "k"
    shutil.copytree(mixed, directory)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}
    list(usage_trace(directory))
    explain(directory)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()} == before


def test_a_file_that_vanishes_between_the_readings_is_named(mixed: Path, tmp_path: Path) -> None:
    directory = tmp_path / "k"
    shutil.copytree(mixed, directory)
    trace = usage_trace(directory)
    (directory / "db-12.log").unlink()  # a running broker's clean-up
    assert list(trace)
    vanished = [d for d in trace.findings.damages if "vanished" in d.reason]
    assert [Path(d.path).name for d in vanished] == ["db-12.log"]


def test_each_file_is_opened_once_a_reading(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for its head, whatever number of readings."""
    opened: Counter[str] = Counter()
    real = files.open_file

    def counted(path: Path) -> Any:
        opened[path.name] += path.suffix == ".log"
        return real(path)

    monkeypatch.setattr(journal, "open_file", counted)
    list(usage_trace(mixed))
    assert {count for name, count in opened.items() if name.endswith(".log")} == {3}  # outcomes, events, its head
