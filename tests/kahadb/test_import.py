"""What a broker had pending is in stores of ours, once, whatever happens on the way."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import anabranch
from anabranch.adapters.core.migration import copying
from anabranch.adapters.kahadb import explain
from anabranch.adapters.kahadb.pending import pending_of
from anabranch.policies.config import load
from anabranch.router.cli.app import app
from anabranch.router.offline import importing
from anabranch.router.placement.on_disk.import_marker import MARKER

from ..crash.calls import Crash, Faults, Jobs, simulated
from ..shares import Share
from . import writer as w

KINDS = {"journal": "journal: {segment_size: 64KiB}", "sqlite": "sql: {}"}
TEXT = b"\x00\x00\x00\x05hello"


@pytest.fixture
def to(tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration of one store that takes all."""

    def write(kind: str = "journal", match: str = ">", name: str = "s.yaml") -> Path:
        path = tmp_path / name
        path.write_text(f"directory: data\nstores:\n- {{name: all, match: ['{match}'], {KINDS.get(kind, kind)}}}\n")
        return path

    return write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A queue, with a message that came back, and a topic with two subscriptions; a transaction between."""
    directory = tmp_path / "kahadb"
    tx = w.local("ID:c", 1)
    again = w.any_message(28, TEXT, redeliveries=2)
    w.write_file(
        directory / "db-1.log",
        w.batch(
            w.add("q", "ID:p:1:1:1", tx, openwire=w.any_message(28, TEXT)),
            w.add("q", "ID:p:1:1:2", openwire=w.any_message(28, TEXT, priority=7)),
            w.add("q", "ID:p:1:1:3", openwire=w.any_message(24, b"gone")),
            w.commit(tx),
        ),
        w.batch(
            w.update(w.add("q", "ID:p:1:1:2", openwire=again)),
            w.remove("q", "ID:p:1:1:3"),
            w.subscription("t", "c", "early", "a > 1"),
            *(w.add("t", f"ID:p:1:2:{n}", kind=w.TOPIC, openwire=w.any_message(28, TEXT)) for n in range(3)),
            w.subscription("t", "c", "late"),
            w.subscription("idle", "c", "idle"),
            w.add("t", "ID:p:1:2:3", kind=w.TOPIC, openwire=w.any_message(28, TEXT, redeliveries=1)),
            w.remove("t", "ID:p:1:2:1", kind=w.TOPIC, subscription="c:early"),
        ),
    )
    return directory


Facts = dict[str, list[tuple[Any, ...]]]

SMALL: Facts = {
    "queue://q": [("ID:p:1:1:2", b"hello", 4, 2), ("ID:p:1:1:1", b"hello", 4, 0)],
    "early": [("ID:p:1:2:0", b"hello", 4, 0), ("ID:p:1:2:2", b"hello", 4, 0), ("ID:p:1:2:3", b"hello", 4, 1)],
    "late": [("ID:p:1:2:3", b"hello", 4, 1)],
    "idle": [],
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["import", *map(str, arguments)])


def imported(source: Path, config: Path, *more: str) -> Result:
    result = run("--from-kahadb", source, "-c", config, *more)
    assert result.exit_code == 0, result.output
    return result


def facts(config: Path) -> Facts:
    """By queue or subscription: id, body, priority, deliveries of each message."""
    found: Facts = {}
    with anabranch.open(config) as router:
        stats = router.stats().stores.values()
        for destination in [one for store in stats for one in store.destinations]:
            if str(destination).startswith("queue://"):
                found[str(destination)] = [_fact(m) for m in router.queue(destination).browse()]
        for one in router.subscriptions():
            found[one.name] = [_fact(m) for m in _subscriber(router, one).browse()]
    return found


def _subscriber(router: anabranch.Router, wanted: anabranch.Subscription) -> anabranch.Subscriber:
    (found,) = [one for one in router.topic(wanted.topic).subscriptions() if one.subscription == wanted]
    return found


def _fact(message: anabranch.Message) -> tuple[Any, ...]:
    return message.message_id, message.body, message.priority, message.deliveries


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_one(small: Path, to: Callable[..., Path], kind: str) -> None:
    before = {path: path.read_bytes() for path in small.iterdir()}
    result = imported(small, to(kind))
    assert result.stdout.splitlines()[-1].startswith("5 messages of 3 destinations imported")
    assert facts(to(kind)) == SMALL
    with anabranch.open(to(kind)) as router:
        assert [(s.name, s.selector) for s in router.subscriptions()] == [
            ("idle", None), ("early", "a > 1"), ("late", None),
        ]  # fmt: skip
        assert router.queue("q").send(b"again", message_id="ID:p:1:1:1").duplicate
    assert {path: path.read_bytes() for path in small.iterdir()} == before
    assert not (to(kind).parent / "data" / MARKER).exists()


def counted(source: Path, config: Path) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Import; messages that there are then, by destination and by subscription."""
    imported(source, config)
    with anabranch.open(config) as router:
        (store,) = router.stats().stores.values()
    return (
        {str(one): count for one, count in store.destinations.items() if count},
        {(f"topic://{s.topic.name}", f"{s.client_id}:{s.name}"): count for s, count in store.subscriptions.items()},
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["kinds", "mixed"])
def test_what_a_real_broker_left(name: str, kind: str, to: Callable[..., Path], request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(name)
    (store,) = explain(source).stores
    assert store.pending
    assert counted(source, to(kind)) == (
        {one.destination: one.messages for one in store.pending},
        {(one.destination, one.key): one.pending_messages for one in store.subscriptions},
    )


def test_what_a_broker_left_after_a_day(toymaker: Path, to: Callable[..., Path]) -> None:
    telemetry = {"queue://telemetry.paint": 10, "queue://telemetry.press": 10}
    expected = {"queue://audit": 5, "queue://dlq": 16, "queue://orders.standard": 20, **telemetry}
    assert counted(toymaker, to()) == (expected, {})


def test_every_class_of_message_of_a_real_broker(kinds: Path, to: Callable[..., Path]) -> None:
    imported(kinds, to())
    with anabranch.open(to()) as router:
        queue = list(router.queue("ORDERS.EU").browse())
        (subscriber,) = router.topic("PRICES.X").subscriptions()
        (on_topic,) = subscriber.browse()
    assert [m.body for m in queue if len(m.body) < 10] == [b"hello 3", b"hello 4", b"tx1", b"tx2", b"xa0"]
    first = queue[0]
    assert (first.priority, first.timestamp_ms, first.expires_at_ms) == (1, 1795295268957, 0)
    assert first.headers == {
        "color": "red", "price": 9, "content-type": "text/plain; charset=utf-8", "JMSType": "typ",
        "JMSCorrelationID": "corr-3", "JMSReplyTo": "queue://REPLY", "JMSXGroupID": "grp", "JMSXGroupSeq": 0,
        "message_group": "grp",
    }  # fmt: skip
    by_type = {m.headers["content-type"]: m.body for m in queue}
    assert by_type["application/octet-stream"] == bytes(20000)
    assert by_type["application/x-activemq-map"] == b"\x00\x00\x00\x01\x00\x01k\x09\x00\x01v"
    assert by_type["application/x-java-serialized-object"].startswith(b"\xac\xed\x00\x05sr\x00\x0ejava.util.Date")
    assert by_type["text/plain; charset=utf-8"] == b"compressed compressed compressed compressed"
    assert (len(on_topic.body), on_topic.headers["price"], on_topic.message_id) == (
        300, 9, "ID:vm-44563-1795295268737-4:1:1:2:4",
    )  # fmt: skip


def test_a_transaction_that_was_left_prepared_is_listed(kinds: Path, to: Callable[..., Path]) -> None:
    result = imported(kinds, to(), "--json")
    assert json.loads(result.stdout)["prepared"] == [{"transaction": "xa:86:01020302:09c802", "operations": 1}]
    assert "transaction xa:86:01020302:09c802 was left prepared" in result.stderr


def test_an_mkahadb_comes_whole(tmp_path: Path, to: Callable[..., Path]) -> None:
    tx = w.xa(61616, b"ID:c", b"1")
    for number, name in enumerate(("a", "b")):
        w.write_file(
            tmp_path / "m" / f"store{name}" / "db-1.log",
            w.batch(w.add(name, f"ID:p:1:1:{number}", tx), w.prepare(tx), w.add("both", f"ID:p:1:2:{number}")),
        )
    w.write_file(tmp_path / "m" / "txStore" / "db-1.log", w.batch(w.prepare(tx)))
    imported(tmp_path / "m", to())
    with anabranch.open(to()) as router:
        assert {name: router.queue(name).depth() for name in ("a", "b", "both")} == {"a": 1, "b": 1, "both": 2}


# Dry runs, and what is refused


def test_a_dry_run_writes_nothing(small: Path, to: Callable[..., Path]) -> None:
    result = imported(small, to(), "--dry-run")
    assert result.stdout.splitlines() == [
        "destination   messages      bytes  subscriptions  store",
        "queue://q            2  162 bytes              0  all",
        "topic://idle         0    0 bytes              1  all",
        "topic://t            3  243 bytes              2  all",
        "5 messages of 3 destinations would be imported.",
    ]
    assert not (to().parent / "data").exists()


def test_what_has_no_route_is_named_before_anything_is_written(small: Path, to: Callable[..., Path]) -> None:
    config = to(match="queue://q")
    for more in ((), ("--force",), ("--dry-run",)):
        result = run("--from-kahadb", small, "-c", config, *more)
        assert result.exit_code == 2
        assert "no pattern matches topic://idle, which has 0 messages" in result.stderr
        assert "no pattern matches topic://t, which has 3 messages" in result.stderr
    assert not (config.parent / "data").exists()


def test_a_store_that_keeps_nothing_is_refused(small: Path, to: Callable[..., Path]) -> None:
    result = run("--from-kahadb", small, "-c", to("memory: {}"))
    assert result.exit_code == 2
    assert "queue://q goes to store 'all', of kind memory, which keeps nothing over a restart" in result.stderr
    assert not (to().parent / "data").exists()


@pytest.mark.parametrize(("name", "says"), [("nothing", "does not exist"), ("empty", "holds no KahaDB journal")])
def test_what_is_no_kahadb(name: str, says: str, tmp_path: Path, to: Callable[..., Path]) -> None:
    (tmp_path / "empty").mkdir()
    result = run("--from-kahadb", tmp_path / name, "-c", to())
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert not (to().parent / "data").exists()


def test_a_second_import_is_refused_by_name(small: Path, to: Callable[..., Path]) -> None:
    imported(small, to())
    with anabranch.open(to()) as router:  # that all was consumed does not matter: it would come twice
        for _ in range(2):
            message = router.queue("q").receive()
            assert message is not None
            message.ack()
    for more in ((), ("--dry-run",)):
        result = run("--from-kahadb", small, "-c", to(), *more)
        assert result.exit_code == 2
        assert "remembered message ids here already: queue://q (store 'all'), topic://idle (sto" in result.stderr
    assert "queue://q" not in {name for name, messages in facts(to()).items() if messages}


def test_a_target_that_a_router_has_open(small: Path, to: Callable[..., Path]) -> None:
    with anabranch.open(to()):
        result = run("--from-kahadb", small, "-c", to())
    assert result.exit_code == 1
    assert "is open already" in result.stderr


def test_a_source_that_a_broker_has_open(small: Path, to: Callable[..., Path]) -> None:
    (small / "lock").touch()
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('locked', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, small / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as broker:
        assert broker.stdout is not None and broker.stdout.readline() == b"locked\n"
        result = run("--from-kahadb", small, "-c", to())
        broker.communicate()
    assert result.exit_code == 1
    assert f"{small} is in use by a broker" in result.stderr
    assert not (to().parent / "data").exists()
    imported(small, to())


def test_a_broker_cannot_start_meanwhile(small: Path) -> None:
    (small / "lock").touch()
    program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    start = [sys.executable, "-c", program, str(small / "lock")]
    with pending_of(small):
        assert subprocess.run(start, capture_output=True, check=False).returncode == 1
    assert subprocess.run(start, capture_output=True, check=False).returncode == 0


def test_damage_is_refused_without_force(small: Path, to: Callable[..., Path]) -> None:
    path = small / "db-1.log"
    data = bytearray(path.read_bytes())
    data[40] ^= 1  # in the first batch
    path.write_bytes(data)
    result = run("--from-kahadb", small, "-c", to())
    assert result.exit_code == 2
    assert "db-1.log at offset 0: the checksum of a batch" in result.stderr and "--force" in result.stderr
    assert not (to().parent / "data").exists()
    forced = imported(small, to(), "--force")
    assert "the checksum of a batch" in forced.stderr
    assert facts(to())["early"] == SMALL["early"]


def test_what_cannot_be_carried_over_is_counted(tmp_path: Path, to: Callable[..., Path]) -> None:
    source = tmp_path / "kahadb"
    w.write_file(
        source / "db-1.log",
        w.batch(
            w.add("q", "ID:p:1:1:1", openwire=w.any_message(29, b"")),
            w.add("q", "ID:p:1:1:2", openwire=b"\x00"),
            w.add("q", "ID:p:1:1:3", openwire=w.any_message(24, b"good")),
            w.add("q", "ID:p:1:1:4", openwire=w.any_message(24, bytes(2000))),
            w.add("reply", "ID:p:1:1:5", kind=2),
            w.add("x\0y", "ID:p:1:1:6"),
        ),
    )
    config = to("journal: {message_bytes_max: 1000}")
    dry = json.loads(imported(source, config, "--dry-run", "--json").stdout)
    assert dry["not_carried"] == {
        "blob messages: their bodies lie on another server": 1,
        "messages larger than message_bytes_max of their store": 1,
        "messages of destinations whose names are none here": 1,
        "messages of temporary queues and topics, whose connections are gone": 1,
        "messages that cannot be decoded": 1,
    }
    result = run("--from-kahadb", source, "-c", config)
    assert result.exit_code == 2 and "1 blob messages" in result.stderr
    imported(source, config, "--force")
    assert facts(config) == {"queue://q": [("ID:p:1:1:3", b"good", 4, 0)]}


def test_what_has_expired_comes_as_it_is(tmp_path: Path, to: Callable[..., Path]) -> None:
    """It is counted before it is dead-lettered, as any message is that expires here."""
    source = tmp_path / "kahadb"
    w.write_file(source / "db-1.log", w.batch(w.add("q", "ID:1", openwire=w.any_message(24, b"old", expiration=5))))
    config = to("journal: {dead_letter: DLQ}")
    assert "1 message of 1 destination imported" in imported(source, config).stdout
    with anabranch.open(config) as router:
        assert router.queue("q").depth() == 1
        assert router.sweep() == 1
        assert [m.body for m in router.queue("DLQ").browse()] == [b"old"]


# Cut short


def test_a_full_target_is_gone_on_with(small: Path, to: Callable[..., Path]) -> None:
    result = run("--from-kahadb", small, "-c", to("journal: {max_messages: 4}"))
    assert result.exit_code == 1 and "max_messages is 4" in result.stderr
    other = small.parent / "other"
    shutil.copytree(small, other)
    refused = run("--from-kahadb", other, "-c", to())
    assert refused.exit_code == 2 and f"an import of {small} was cut short" in refused.stderr
    imported(small, to())
    assert facts(to()) == SMALL


def test_no_router_uses_what_an_import_has_left(small: Path, to: Callable[..., Path]) -> None:
    """What it consumed could come a second time, once its ids have left the duplicate window."""
    assert run("--from-kahadb", small, "-c", to("journal: {max_messages: 4}")).exit_code == 1
    with pytest.raises(anabranch.PlacementError, match="was cut short; run `anabranch import --from-kahadb DIR` again"):
        anabranch.open(to())
    imported(small, to())
    assert facts(to()) == SMALL


def test_what_has_come_can_be_kept_as_it_is(small: Path, to: Callable[..., Path]) -> None:
    assert run("--from-kahadb", small, "-c", to("journal: {max_messages: 4}")).exit_code == 1
    (to().parent / "data" / MARKER).unlink()
    left = facts(to())
    assert left
    assert run("--from-kahadb", small, "-c", to()).exit_code == 2
    assert facts(to()) == left


def test_what_the_source_has_no_longer_is_named(small: Path, to: Callable[..., Path]) -> None:
    assert run("--from-kahadb", small, "-c", to("journal: {max_messages: 4}")).exit_code == 1
    w.write_file(small / "db-1.log", w.batch(w.add("other", "ID:p:1:1:1")))
    result = run("--from-kahadb", small, "-c", to())
    assert result.exit_code == 2 and "since their import was cut short: queue://q" in result.stderr


def test_a_damaged_marker_is_told_of(small: Path, to: Callable[..., Path]) -> None:
    (to().parent / "data").mkdir()
    (to().parent / "data" / MARKER).write_text("{")
    result = run("--from-kahadb", small, "-c", to())
    assert result.exit_code == 2 and "import-kahadb.json is damaged" in result.stderr


def bring(config: Path, source: Path, progress: Callable[[str, int, int], None] = lambda *_: None) -> None:
    with pending_of(source) as pending:
        report = importing.survey(load(config), pending)
        importing.bring_in(load(config), pending, report, progress)


@pytest.mark.parametrize("per_destination", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", range(3))
def test_ctrl_c(small: Path, to: Callable[..., Path], kind: str, per_destination: bool, place: int) -> None:
    """At each destination."""
    config = to(f"per_destination: {str(per_destination).lower()}, {KINDS[kind]}")
    left = iter(range(place))

    def progress(what: str, done: int, total: int) -> None:
        if what == "Importing" and next(left, None) is None:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        bring(config, small, progress)
    assert (config.parent / "data" / MARKER).exists() == (place < 2)  # one of three has no message
    if place < 2:
        assert "5 messages of 3 destinations imported" in imported(small, config).stdout
    assert facts(config) == SMALL


def spoiled(source: Path, config: Path, kind: str, at: int) -> Faults:
    """Import; call number `at` fails, or the process is gone before it."""
    faults, jobs = Faults(config.parent, kind, at), Jobs()
    data, killed = config.parent / "data", config.parent / "killed"
    with simulated(jobs, f"{kind} {at}"), faults.patched():
        with contextlib.suppress(Crash, anabranch.AnabranchError, OSError):
            bring(config, source)
        faults.dead = True  # what the abandoned objects still try to do does not reach the disk
        shutil.copytree(data, killed) if data.exists() else killed.mkdir()
        gc.collect()
    shutil.rmtree(data, ignore_errors=True)
    killed.rename(data)
    return faults


@pytest.mark.parametrize("kind", ["crash", "enospc"])
def test_spoiled_at_every_call(
    small: Path, to: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, share: Share, kind: str
) -> None:
    """The same command then goes on, and nothing comes twice; or all is there, and it says so."""
    monkeypatch.setattr(copying, "PAGE", 2)
    config = to()
    log = spoiled(small, config, kind, 0).log
    shutil.rmtree(config.parent / "data")
    for at in share.of(range(1, len(log) + 1), every=12):
        where = f"{kind} at {at} of {len(log)}: {spoiled(small, config, kind, at).hit}"
        try:
            bring(config, small)
        except anabranch.PlacementError as error:
            assert "here already" in str(error), where
        assert facts(config) == SMALL, where
        shutil.rmtree(config.parent / "data")
    share.counts.append(f"import, {kind}: {len(log)} calls")
