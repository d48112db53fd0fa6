"""`anabranch export` and `import`: all that a directory holds as JSON Lines, and the same export again from those."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import anabranch
from anabranch import Config, ConfigError, JournalOptions, SqlOptions, StoreConfig, StoreFullError, Xid
from anabranch.adapters.core.migration import copying
from anabranch.router.cli.app import app
from anabranch.router.offline.exporting import export
from anabranch.router.offline.importing_lines import _Importing, import_lines
from anabranch.router.offline.verification import verify

from ..taking import take

XID = Xid(1, "order-17", "db")
LATER = 4_000_000_000.0
BODY = bytes(range(256)) * 10_000


def stores(directory: Path, **options: Any) -> Config:
    """Two journals, with other destinations than `merged`."""
    journal = JournalOptions(large_message_size="1KiB", priorities=True, **options)
    return Config(directory, [StoreConfig("a", ["a.>"], journal=journal), StoreConfig("rest", [">"], journal=journal)])


def merged(directory: Path) -> Config:
    """All in one database."""
    return Config(directory, [StoreConfig("all", [">"], sql=SqlOptions(large_message_size="1KiB", priorities=True))])


def fill(directory: Path) -> None:
    with anabranch.open(stores(directory)) as router:
        queue = router.queue("a.x")
        values: Any = {"n": None, "b": b"\0\xff", "f": math.nan, "i": 1, "d": 1.0, "$x": {"$bytes": [b"1", -math.inf]}}
        queue.send("für alle".encode(), values, "id-1", priority=7, group="g")
        queue.send(b"\xff\0", message_id="id-2", expires_in=1e9)
        queue.send(b"later", deliver_at=LATER)
        queue.send(io.BytesIO(BODY), message_id="large")
        queue.send(b"", message_id="gone")
        first = queue.receive(timeout=0)
        assert first is not None and first.message_id == "id-1"
        first.release()
        gone = next(one for one in queue.browse() if one.message_id == "gone")
        while (one := queue.receive(timeout=0)) is not None and one.seq != gone.seq:
            pass
        assert one is not None
        one.ack()
        topic = router.topic("b.t")
        audit = topic.subscribe("audit", client_id="me", selector="x = 1", no_local=True)
        topic.send(b"to one")
        topic.subscribe("second")
        topic.send(b"to both", {"h": "v"})
        message = take(audit)
        message.ack()
        back = take(audit)
        back.release()
        values_of = router.map("m")
        values_of.put("key", b"old")
        values_of.put("key", b"new")
        values_of.put("other", BODY[:5000])
        router.queue("b.empty").declare()
        acked = router.queue("b.y")
        acked.send(b"claimed")
        acked.send(b"free")
        held = router.transaction(xid=XID)
        claimed = take(acked)
        held.ack(claimed)
        held.send("a.x", b"prepared", {"p": 1}, "id-p", priority=2)
        held.send("b.new", io.BytesIO(BODY))
        held.send("b.new", b"later", deliver_at=LATER)
        held.prepare()


def exported(config: Config) -> bytes:
    lines = io.BytesIO()
    assert export(config, lines.write).left_out == []
    return lines.getvalue()


def brought(config: Config, lines: bytes, **options: Any) -> Any:
    return import_lines(config, io.BytesIO(lines), "x.jsonl", **options)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    fill(tmp_path / "data")
    return tmp_path / "data"


def test_what_was_imported_exports_the_same_whatever_the_configuration(data: Path, tmp_path: Path) -> None:
    lines = exported(stores(data))
    assert exported(stores(data)) == lines
    there = merged(tmp_path / "one")
    done = brought(there, lines)
    assert (done.messages, done.transactions, done.left_out) == (9, 1, [])
    assert exported(there) == lines
    back = stores(tmp_path / "back")
    brought(back, exported(there))
    assert exported(back) == lines
    assert verify(tmp_path / "back", back).damages == []
    with anabranch.open(back) as router:
        queue, topic = router.queue("a.x"), router.topic("b.t")
        assert queue.counts().delayed == 1
        first = queue.receive(timeout=0)
        assert first is not None and first.body == "für alle".encode()
        assert (first.message_id, first.priority, first.group, first.deliveries) == ("id-1", 7, "g", 2)
        assert math.isnan(first.headers["f"]) and first.headers["$x"] == {"$bytes": [b"1", -math.inf]}
        queue.send(b"again", message_id="gone")
        assert not any(one.message_id == "gone" for one in queue.browse())
        large = next(one for one in queue.browse() if one.message_id == "large")
        with large.open() as body:
            assert body.read() == BODY
        assert {one.subscription.name: one.depth() for one in topic.subscriptions()} == {"audit": 1, "second": 1}
        value = router.map("m").get("key")
        assert value is not None and value == b"new"
        free = router.queue("b.y")
        assert [one.body for one in free.browse()] == [b"claimed", b"free"]
        taken = free.receive(timeout=0)
        assert taken is not None and taken.body == b"free"
        assert free.receive(timeout=0) is None
        assert router.recover() == [XID]
        router.commit(XID)
        assert router.queue("b.new").counts().delayed == 1
        sent = take(router.queue("b.new"))
        with sent.open() as body:
            assert body.read() == BODY
        assert queue.find("id-p") is not None


def test_what_is_known_is_not_brought_twice(data: Path, tmp_path: Path) -> None:
    lines, there = exported(stores(data)), stores(tmp_path / "there")
    brought(there, lines)
    before = exported(there)
    again = brought(there, lines)
    assert again.known == 4 and again.transactions == 0
    assert "it is prepared here already" in again.left_out[0]
    ids = [json.loads(line).get("id") for line in exported(there).splitlines()]
    assert {one: ids.count(one) for one in ("id-1", "id-2", "large", "gone", "id-p")} == {
        "id-1": 1, "id-2": 1, "large": 1, "gone": 1, "id-p": 1
    }  # fmt: skip
    assert len(exported(there).splitlines()) == len(before.splitlines()) + 7 - 3  # those without an id, less values


def test_a_value_takes_the_place_of_the_one_there(data: Path, tmp_path: Path) -> None:
    lines, there = exported(stores(data)), stores(tmp_path / "there")
    with anabranch.open(there) as router:
        router.map("m").put("key", b"newer")
        router.map("m").put("mine", b"1")
    brought(there, lines)
    with anabranch.open(there) as router:
        assert {key: len(value) for key, value in router.map("m").items()} == {"key": 3, "mine": 1, "other": 5000}


def test_a_broken_line_is_named_and_the_import_goes_on_with_it(data: Path, tmp_path: Path) -> None:
    lines = exported(stores(data)).splitlines(keepends=True)
    wanted, expected = exported(stores(data)), 0
    for number in range(1, len(lines)):
        if number % 3 and b'"large"' not in lines[number]:
            continue
        expected += 1
        there = stores(tmp_path / f"there{number}")
        broken = b"".join([*lines[:number], lines[number][:-3] + b"\n", *lines[number + 1 :]])
        with pytest.raises(ConfigError, match=rf"x.jsonl:{number + 1}: ") as refused:
            brought(there, broken)
        first = int(str(refused.value).rpartition(" ")[2]) if "--from-line" in str(refused.value) else 1
        assert first <= number + 1
        if first > 1:
            held = [line for line in exported(there).splitlines(keepends=True) if line.startswith(b'{"is":"message"')]
            assert len(held) == sum(line.startswith(b'{"is":"message"') for line in lines[: first - 1])
        done = brought(there, wanted, from_line=first)
        after = exported(there)
        if not done.left_out:
            assert after == wanted, (number, first)
        else:  # what it acks came before the line
            assert "it acks 1 messages, of which this import has brought 0" in done.left_out[0]
            assert after == wanted[: wanted.index(b'{"is":"prepared"')].replace(b',"claims":[{"by":0}]', b"")
    assert expected > 6


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"is":"message","sent_at_ms":1,"body":"x"}', "no destination is before it"),
        (b'{"is":"destination","name":"queue://"}', "a destination needs a name"),
        (b'{"is":"destination","name":"queue://elsewhere"}', "no pattern matches queue://elsewhere"),
        (b'{"is":"destination","name":"queue://m.x"}', "keeps nothing over a restart"),
        (b'{"is":"destination","name":"queue://s.x"}', "route it to another, and move it there by `repartition`"),
        (b'{"is":"what"}', "Invalid value 'what'"),
        (b"[]", "Expected `object`"),
        (b'{"is":"chunk","data":"AA=="}', "no large message is before it"),
        (b'{"is":"anabranch-export","version":1}', "not its first"),
    ],
)
def test_what_cannot_be_imported_is_refused(line: bytes, why: str, tmp_path: Path) -> None:
    sql: dict[str, Any] = {"url": "postgresql+psycopg://nobody@localhost/none", "shared": True}
    shared = StoreConfig("s", ["queue://s.>"], sql=sql)
    config = Config(tmp_path / "x", [StoreConfig("a", ["a.>"]), StoreConfig("m", ["m.>"], memory={}), shared])
    start = b'{"is":"anabranch-export","version":1}\n'
    with pytest.raises(ConfigError, match=r"x\.jsonl:2: ") as refused:
        brought(config, start + line + b"\n", dry_run=True)
    assert why in str(refused.value) and "nothing was imported" in str(refused.value)
    assert not (tmp_path / "x").exists()


def test_a_store_that_is_full_says_with_which_line_to_go_on(data: Path, tmp_path: Path) -> None:
    lines = exported(stores(data))
    small = stores(tmp_path / "there", max_bytes="1MiB")
    with pytest.raises(StoreFullError) as refused:
        brought(small, lines)
    (note,) = refused.value.__notes__
    first = int(note.rpartition(" ")[2])
    assert b'"large":2560000' in lines.splitlines()[first - 1]


@pytest.mark.parametrize(("room", "page"), [(3, 8), (20, 512), (70, 512)])
def test_what_a_full_store_refuses_is_gone_on_with(
    tmp_path: Path, room: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages without ids: none is left out, and none comes twice."""
    monkeypatch.setattr(copying, "PAGE", page)
    source, there = (Config(tmp_path / name, [StoreConfig("all", [">"])]) for name in ("source", "there"))
    with anabranch.open(source) as router:
        for name in "ab":
            router.queue(name).send_many([b"%d" % number for number in range(30)])
        for count, name in ((5, "first"), (25, "second")):
            router.topic("t").subscribe(name)
            for number in range(count):
                router.topic("t").send(b"%d to %s" % (number, name.encode()))
    lines = exported(source)
    small = Config(there.directory, [StoreConfig("all", [">"], journal=JournalOptions(max_messages=room))])
    with pytest.raises(StoreFullError) as refused:
        brought(small, lines)
    (note,) = refused.value.__notes__
    brought(there, lines, from_line=int(note.rpartition(" ")[2]) if "--from-line" in note else 1)
    assert exported(there) == lines


def test_a_dry_run_counts_from_its_line_on(data: Path, tmp_path: Path) -> None:
    lines = exported(stores(data))
    counted = [line.startswith(b'{"is":"message"') and b'"to":' not in line for line in lines.splitlines()]
    for first in (1, 4, len(counted) + 1):
        found = brought(stores(tmp_path / "there"), lines, dry_run=True, from_line=first)
        assert found.messages == sum(counted[first - 1 :]), first


@pytest.mark.parametrize("strikes", ["an error", "a signal"])
def test_what_ends_an_import_says_with_which_line_to_go_on(
    tmp_path: Path, strikes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages without ids: none is left out, and none comes twice."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(copying, "PAGE", 8)
    source, there = (Config(tmp_path / name, [StoreConfig("all", [">"])]) for name in ("source", "there"))
    with anabranch.open(source) as router:
        router.queue("a").send_many([b"%d" % number for number in range(30)])
        router.queue("b").send_many([b"%d" % number for number in range(30)])
    lines = exported(source)
    Path("x.jsonl").write_bytes(lines)
    anabranch.open(there).close()
    written, written_page = threading.Event(), copying.Bringing.page

    def page(bringing: copying.Bringing, items: Sequence[copying.Item]) -> None:
        if isinstance(items[0], copying.Stored) and items[0].record.endswith(b"8"):
            if strikes == "an error":
                raise OSError(errno.EIO, "Input/output error")
            signal.raise_signal(signal.SIGINT)  # which strikes the main thread
            written.wait(0.05)
        written_page(bringing, items)

    with monkeypatch.context() as patched:
        patched.setattr(copying.Bringing, "page", page)
        result = CliRunner().invoke(app, ["import", "there", "x.jsonl"])
    assert result.exit_code == (1 if strikes == "an error" else 130), result.output
    said = result.stderr.splitlines()
    assert said[-2].endswith("Input/output error" if strikes == "an error" else "Interrupted.")
    first = re.fullmatch(r"all before line (\d+) is imported; go on with --from-line \1", said[-1])
    assert first is not None
    result = CliRunner().invoke(app, ["import", "there", "x.jsonl", "--from-line", first[1]])
    assert result.exit_code == 0, result.output
    assert exported(there) == lines


def test_ctrl_c_while_a_refused_import_is_made_durable_says_where_to_go_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = _Importing.stop

    def stopped(importing: _Importing) -> None:
        stop(importing)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Importing, "stop", stopped)
    lines = exported(stores(data))
    with pytest.raises(KeyboardInterrupt) as caught:
        brought(stores(tmp_path / "there"), lines + b"{}\n")
    line = lines.count(b"\n") + 1
    (note,) = caught.value.__notes__
    assert note == f"all before line {line} is imported; go on with --from-line {line}"


def test_the_commands(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, given: bytes | None = None) -> Result:
        return CliRunner().invoke(app, arguments, input=given)

    written = run("export", "data", "--out", "x.jsonl", "--json")
    assert written.exit_code == 0, written.output
    assert json.loads(written.stdout)["messages"] == 9
    shown = run("export", "data")
    assert shown.stdout_bytes == Path("x.jsonl").read_bytes(), shown.output
    assert run("export", "data", "--out", "x.jsonl").exit_code == 2
    assert run("export", "nowhere").exit_code == 2
    Path("stores.yaml").write_text("directory: there\nstores:\n  - name: all\n    match: ['>']\n")
    dry = run("import", "-c", "stores.yaml", "x.jsonl", "--dry-run")
    assert "9 messages of" in dry.stdout and "would be imported" in dry.stdout and not Path("there").exists()
    there = run("import", "-c", "stores.yaml", "-", "--json", given=Path("x.jsonl").read_bytes())
    assert there.exit_code == 0, there.output
    assert json.loads(there.stdout)["transactions"] == 1
    assert run("export", "there").exit_code == 0
    again = run("import", "there", "x.jsonl")
    assert "; 4 known already (messages and ids)." in again.stdout
    assert "4 messages without an id came too: once more, if FILE was" in again.stderr
    with anabranch.open("there"):
        refused = run("export", "there")
    assert (refused.exit_code, "or export a backup" in refused.stderr) == (1, True)
    assert run("import", "there").exit_code == 2
    assert run("import", "there", "nowhere.jsonl").exit_code == 1
