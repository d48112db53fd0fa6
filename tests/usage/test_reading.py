"""Usage logs as a trace: several, damaged ones, clocks that were set; and what the commands make of them."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

import anabranch
from anabranch.adapters.core.engine.usage import ROW, SENT
from anabranch.policies.advisor import from_events
from anabranch.policies.advisor.trace.table import read_trace
from anabranch.router.cli.app import app
from anabranch.router.usage import log
from anabranch.router.usage.blocks import decode_block, encode_block
from anabranch.router.usage.reading import _LogReader, usage_trace

from ..taking import take
from .conftest import config

Set = Callable[[float], None]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def recorded(directory: Path, *sizes: int, name: str = "j.a") -> Path:
    """A router that was sent messages of these sizes and acked the first."""
    with anabranch.open(config(directory)) as router:
        for size in sizes:
            router.queue(name).send(bytes(size))
        take(router.queue(name)).ack()
    return directory / "usage"


def shown(trace: Any) -> list[tuple[str, int | None]]:
    return [(event.op, event.body_size) for event in trace]


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the wall clock forward or back, by so many seconds."""
    real, moved = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + moved[0])

    def move(seconds: float) -> None:
        moved[0] += int(seconds * 1e9)

    return move


def several_files(directory: Path) -> list[Path]:
    """Those of a log that fills some, each with one message of ours at least; message number n has n bytes."""
    with anabranch.open(config(directory, usage={"max_bytes": 1 << 20})) as router:
        usage = router._usage.log
        assert usage is not None
        for size in range(12):
            noise = b"".join(ROW.pack(0, hash((size, at)) & 0xFFFFFFFFFFFF, 1 << 31, 0, 0, 0, 0, SENT, 0)
                             for at in range(9000))  # fmt: skip
            usage._buffer.rows.append(noise)
            router.queue("j.a").send(bytes(size))
            usage.flush()
    files = sorted((directory / "usage" / "journal").glob("*.seg"))
    assert len(files) >= 3
    return files


def test_the_bytes_of_a_block() -> None:
    row = ROW.pack(1, 2, 3, 4, 5, 6, 7, SENT, 0)
    name = ("s", "ab12", False, "queue://a", [(7, "c:d")])
    payload = bytes.fromhex(
        "970b0c0d0e" "919203" "95a173" "a461623132" "c2" "a971756575653a2f2f61" "919207a3633a64" "919204919207a3633a64"
        "c427" "780163646440014c4c285c066666089f850542b3b24268363608cdcecec0c00834030005b3003b"
    )  # fmt: skip
    made = encode_block(11, 12, 13, 14, [(3, name), (4, [(7, "c:d")])], row + row)
    assert made.partition(b"\xc4")[0] == payload.partition(b"\xc4")[0]  # what zlib makes is its own affair
    block, rows = decode_block(payload)
    assert (block.session, block.wall_us, block.threshold, block.lost) == (11, 12, 13, 14)
    assert (block.destinations, block.sets) == ([(3, name)], [(4, [(7, "c:d")])])
    assert [ROW.pack(*found) for found in rows] == [row, row]
    for broken in (payload[:-1], payload[:-2] + b"xx", b"", encode_block(1, 2, 3, 4, [], b"")[:-1]):
        with pytest.raises(ValueError, match="a block of the usage log does not read"):
            decode_block(broken)


def test_several_routers(tmp_path: Path, wall: Set) -> None:
    one = recorded(tmp_path / "one", 1, 2)
    wall(100)
    two = recorded(tmp_path / "two", 3, 4)
    wall(-50)
    three = recorded(tmp_path / "three", 5, 6)
    wanted = [(op, size) for first in (1, 5, 3) for op, size in (("send", first), ("send", first + 1), ("ack", None))]
    for directories in ([one, two, three], [tmp_path], [three / "journal", two.parent, one]):
        trace = usage_trace(directories)
        found = list(trace)
        assert shown(found) == wanted
        assert trace.warnings == ()
        assert [event.seq for event in found] == list(range(9))
        assert len({event.message_id for event in found}) == 6


def test_a_memory_store_s_destination_is_found_without_a_walk_over_all() -> None:
    class Unwalked(dict[Any, Any]):
        def values(self) -> Any:
            raise AssertionError("walked over all destinations: quadratic in them")

    reader = _LogReader([], lambda _: None)
    reader._destinations = Unwalked()
    for number in (0, 1, 0):  # declared anew, while it is known
        assert list(reader._declare(number, "1.1", True, f"queue://reply.{number}", [])) == []
        reader._numbers[number].pending[7] = {0}
    ended = reader._declare(2, "1.2", True, "queue://reply.0", [])  # its store was opened again
    assert [event.message_id for event in ended] == ["1.1-7"]
    assert sorted(reader._destinations) == [("1.1", "queue://reply.1"), ("1.2", "queue://reply.0")]


def test_a_clock_that_was_set(tmp_path: Path, wall: Set) -> None:
    with anabranch.open(config(tmp_path)) as router:
        assert router._usage.log is not None
        queue = router.queue("j.a")
        for size, seconds in enumerate((0, 5000, -9000)):
            wall(seconds)
            queue.send(bytes(size))
            router._usage.log.flush()
    wall(-1000)
    recorded(tmp_path, 3)
    trace = usage_trace([tmp_path])
    found = list(trace)
    assert shown(found)[:4] == [("send", 0), ("send", 1), ("send", 2), ("send", 3)]
    stamps = [event.ts for event in found]
    assert stamps == sorted(stamps)
    assert stamps[-1] - stamps[0] < 600
    assert trace.warnings == (
        f"the clock of {tmp_path / 'usage'} was set twice, by 9,000.0 s at most; times follow the steady clock from "
        "when each recording was begun",
        f"once a recording in {tmp_path / 'usage'} says that it was begun before the one before it ended; its times "
        "are moved behind that",
    )


def test_a_log_cut_short(tmp_path: Path) -> None:
    *before, last = several_files(tmp_path)
    whole = shown(usage_trace([tmp_path]))
    size = last.stat().st_size
    for left in (size - 1, size // 2, 4096, 100, 0):
        with last.open("r+b") as file:
            file.truncate(left)
        found = shown(usage_trace([tmp_path]))
        assert found == whole[: len(found)]
        assert len(found) >= len(before) - 1
    with before[-1].open("r+b") as file:
        file.truncate(10_000)
    assert len(shown(usage_trace([tmp_path]))) < len(whole)


def test_what_is_damaged_or_missing_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    files = several_files(tmp_path)
    whole = shown(usage_trace([tmp_path]))
    kept = files[1].read_bytes()
    files[1].write_bytes(kept[:9000] + b"damaged" + kept[9007:])
    trace = usage_trace([tmp_path])
    found = shown(trace)
    assert found == [one for one in whole if one in found]
    assert found[0] == whole[0]
    assert found[-1] == whole[-1]
    assert any(f"{files[1]} is damaged or cut short at offset" in line for line in trace.warnings)
    files[1].write_bytes(b"damaged" + kept[7:])
    trace = usage_trace([tmp_path])
    assert shown(trace)[-1] == whole[-1]
    assert any(f"{files[1]} was not read" in line for line in trace.warnings)
    assert any(f"the file before {files[2]} is missing" in line for line in trace.warnings)
    files[1].unlink()
    files[0].unlink()
    trace = usage_trace([tmp_path])
    assert shown(trace)[-1] == whole[-1]
    assert not any("missing" in line for line in trace.warnings)  # as the log removes them itself


@pytest.mark.parametrize("first", [4096, 6000])
@pytest.mark.parametrize("content", [b"\xa5", b"\0"])
@pytest.mark.parametrize("several", [False, True])
def test_damage_of_the_newest_file_is_told(tmp_path: Path, first: int, content: bytes, several: bool) -> None:
    *_, newest = several_files(tmp_path) if several else [*_one_file(tmp_path)]
    whole = shown(usage_trace([tmp_path]))
    kept = newest.read_bytes()
    newest.write_bytes(kept[:first] + content * (len(kept) - first))
    trace = usage_trace([tmp_path])
    found = shown(trace)
    assert found == whole[: len(found)]
    assert len(found) < len(whole)
    told = f"{newest} is damaged at offset "
    assert [told in line for line in trace.warnings if "destination's name" not in line] == [True]
    if not found:
        result = run("recommend", "--usage", tmp_path, "--out", tmp_path.parent / "advice")
        assert result.exit_code == 2
        assert f"{tmp_path}: no operation can be read there: {told}" in result.stderr
    newest.unlink()
    if several:
        trace = usage_trace([tmp_path])
        assert len(shown(trace)) < len(whole)
        assert any(f"{newest}, the newest file, is missing" in line for line in trace.warnings)


def _one_file(directory: Path) -> list[Path]:
    with anabranch.open(config(directory)) as router:
        for size in range(200):
            router.queue("j.a").send(bytes(size))
            assert router._usage.log is not None
            router._usage.log.flush()
    return [*(directory / "usage" / "journal").glob("*.seg")]


def test_damage_is_told_from_what_the_log_says_itself(tmp_path: Path) -> None:
    """Of a router that was killed, when nothing but its batches says what was on disk."""
    with anabranch.open(config(tmp_path / "data")) as router:
        assert router._usage.log is not None
        assert router._usage.log._log is not None
        for size in range(3):
            router.queue("j.a").send(bytes(size))
            router._usage.log.flush()
            router._usage.log._log.sync()
        shutil.copytree(tmp_path / "data" / "usage" / "journal", tmp_path / "killed")
    (newest,) = (tmp_path / "killed").glob("*.seg")
    trace = usage_trace([tmp_path / "killed"])
    assert shown(trace) == [("send", size) for size in range(3)]
    assert trace.warnings == ()
    kept = newest.read_bytes()
    for damaged in (kept[:4200] + b"damaged" + kept[4207:], kept[:4096] + b"damaged" * 2000):
        newest.write_bytes(damaged)
        trace = usage_trace([tmp_path / "killed"])
        assert shown(trace) == []
        assert trace.warnings == (f"{newest} is damaged at offset 4096: what follows there is lost",)


def test_a_log_that_is_written_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    count = 0
    with anabranch.open(config(tmp_path, usage={"max_bytes": 1 << 20})) as router:
        usage, stop = router._usage.log, threading.Event()
        assert usage is not None

        def write() -> None:
            while not stop.is_set():
                router.queue("j.a").send(b"1")
                usage.flush()
                if usage._log is not None:
                    usage._log.sync()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            while count < 300:
                trace = usage_trace([tmp_path])
                found = len(shown(trace))
                assert trace.warnings == ()
                assert found >= count
                count = found
        finally:
            stop.set()
            writer.join()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nowhere", "nowhere: a router records its use once it is switched on with `usage: {}` in stores.yaml"),
        ("file", "file: a router records its use once it is switched on with `usage: {}` in stores.yaml"),
        ("empty", "holds no usage log: a router records its use once it is switched on with `usage: {}`"),
        ("data/stores/journal", "is a journal of another kind, not a usage log"),
        ("data/usage", "nothing is recorded there yet"),
        ("broken", "no file of the usage log can be read"),
    ],
)
def test_what_is_no_log_is_one_clear_error(tmp_path: Path, what: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "broken" / "journal").mkdir(parents=True)
    (tmp_path / "broken" / "journal" / "000000000001.seg").write_bytes(b"x" * 5000)
    with anabranch.open(config(tmp_path / "data")) as router:
        router.stop_usage_log()
        router.queue("j.a").send(b"1")
    before = sorted(tmp_path.rglob("*"))
    for command in (["trace", "--out", tmp_path / "out.parquet"], ["recommend", "--out", tmp_path / "advice"]):
        result = run(*command, "--usage", tmp_path / what)
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_mistyped_options(tmp_path: Path) -> None:
    usage = recorded(tmp_path / "data", 1)
    out = tmp_path / "out.parquet"
    for arguments, says in (
        (["trace", "--out", out], "give at least one --usage"),
        (["trace", "--usage", usage, "--out", tmp_path / "out.xls"], "has no suffix of a trace"),
        (["recommend", "--usage", usage, "--trace", out, "--out", tmp_path / "advice"], "give one of --usage"),
        (["recommend", "--out", tmp_path / "advice"], "0 were given"),
        (["trace", "--usage", usage, "--out", usage / "out.csv"], f"lies in the usage log {usage}, which is only read"),
        (["trace", "--usage", tmp_path, "--out", usage / "journal" / "a" / "out.csv"], "which is only read"),
        (["recommend", "--usage", usage.parent, "--out", usage / "advice"], "which is only read"),
        (["recommend", "--usage", usage.parent, "--out", usage], "which is only read"),
        (["trace", "--usage", tmp_path / "no", "--out", out], "there is no usage log at"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert says in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    assert run("trace", "--usage", usage, "--out", out).exit_code == 0
    refused = run("trace", "--usage", usage, "--out", out)
    assert (refused.exit_code, "exists already" in refused.stderr) == (2, True)
    assert run("trace", "--usage", usage, "--out", out, "--force").exit_code == 0


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".csv"])
def test_a_trace_is_written(tmp_path: Path, suffix: str) -> None:
    recorded(tmp_path / "data", 1, 2)
    out = tmp_path / "new" / f"out{suffix}"
    result = run("trace", "--usage", tmp_path / "data", "--out", out, "--json")
    assert json.loads(result.stdout) == {"written": str(out), "operations": 3, "warnings": []}
    assert read_trace(out).equals(from_events(usage_trace([tmp_path / "data"])).cast(read_trace(out).schema))
    if suffix == ".parquet":
        assert pyarrow.parquet.read_metadata(out).num_rows == 3
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_what_was_recorded_is_recommended_from(tmp_path: Path) -> None:
    never = anabranch.JournalOptions(sync=anabranch.Sync.NEVER)
    stores = [anabranch.StoreConfig("all", [">"], journal=never)]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores, usage={"destinations": ["queue://>"]})) as router:
        slow, quick = router.queue("orders"), router.queue("telemetry")
        router.topic("news").subscribe(client_id="c", name="n")
        for _ in range(40):
            slow.send(bytes(2000))
            router.topic("news").send(b"not asked for")
            for _ in range(20):
                quick.send(bytes(5000))
                take(quick).ack()
    advice = tmp_path / "advice"
    result = run("recommend", "--usage", tmp_path / "data", "--engine", "local", "--segment-size", "64KiB",
                 "--disk-gib", 1, "--out", advice, "--json")  # fmt: skip
    assert result.exit_code == 0
    assert result.stderr.startswith("In force: ") and result.stderr.count("\n") == 1
    found = json.loads(result.stdout)["recommended"]["stores"]
    assert {store["sync"] for store in found} == {"never"}
    assert sorted(store["destinations"] for store in found) == [["queue://orders"], ["queue://telemetry"]]
    shutil.move(tmp_path / "data", tmp_path / "before")
    with anabranch.open(advice / "stores.yaml") as router:
        router.queue("orders").send(b"1")


def test_what_was_lost_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "BUFFER_BYTES", 2 * ROW.size)
    recorded(tmp_path, 1, 2)
    trace = usage_trace([tmp_path])
    assert shown(trace) == [("send", 1), ("send", 2)]
    assert trace.warnings == (f"some 1 operation of {tmp_path / 'usage'} were not recorded: the disk did not keep up",)
