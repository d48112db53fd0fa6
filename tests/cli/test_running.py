"""The commands over a directory that another process has open, which goes on meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest

import anabranch
from anabranch import Config, StoreConfig, TransactionOptions, Xid
from anabranch.router.cli import top
from anabranch.router.inspection import Inspection
from anabranch.router.sharing import socket_file
from anabranch.router.sharing.client import router as shared_router

from ..children import CONTEXT, started
from ..contract.disk import PATIENCE, eventually
from . import commands

XID: Final = Xid(1, "order-17", "messages")


def config(control: bool = True) -> Config:
    options = {"sync": "never", "dead_letter": "dlq", "max_deliveries": 1}
    return Config(
        "data",
        [
            StoreConfig("all", [">"], journal=options),
            StoreConfig("urgent", ["queue://urgent"], journal={**options, "priorities": True}),
            StoreConfig("memory", ["queue://m.>"], memory={"dead_letter": "m.dlq", "max_deliveries": 1}),
        ],
        TransactionOptions(max_operations=10),
        control=control,
    )


class Owner:
    """A process that has the directory open."""

    def __init__(self, control: bool = True) -> None:
        self._pipe, its = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_own, args=(str(Path.cwd()), control, its))
        self._process.start()
        its.close()
        assert self._pipe.recv() == "open"
        self.pid = self._process.pid

    def do(self, program: str, *given: Any) -> Any:
        """Return the value of an expression in it, over `router`, and over `given`."""
        self._pipe.send((program, given))
        ok, value = self._pipe.recv()
        assert ok, value
        return value

    def bodies(self, queue: str) -> list[bytes]:
        return self.do("[one.read() for one in router.queue(given[0]).browse()]", queue)  # type: ignore[no-any-return]

    def send(self, queue: str, *bodies: bytes) -> None:
        self.do("router.queue(given[0]).send_many(given[1]) and None", queue, list(bodies))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(PATIENCE)
        assert self._process.exitcode == 0


def _own(directory: str, control: bool, pipe: Connection) -> None:
    os.chdir(directory)
    with anabranch.open(config(control)) as router:
        pipe.send("open")
        names = {"router": router, "kept": list[Any](), "XID": XID, "refuse": _refuse}
        while True:
            try:
                program, given = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((True, eval(program, names | {"given": given})))
            except Exception as error:
                pipe.send((False, repr(error)))


def _refuse() -> None:
    raise anabranch.StoreFailedError("no more of it")


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.chdir(tmp_path)
    owner = Owner()
    yield owner
    owner.close()


run = partial(commands.run, code=0)


def said(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code).stdout)


# Messages and queues --------------------------------------------------------------------------------------------------


def test_what_is_sent_is_there_at_once_also_in_memory(owner: Owner) -> None:
    for queue in ("jobs", "m.jobs"):
        result = run("send", "data", queue, "hello", "--header", "kind=greeting", "--id", "1")
        assert "Warning" not in result.stderr  # nothing goes when the command ends
        assert said("send", "data", queue, "hello", "--id", "1")["sent"][0]["duplicate"]
        assert owner.bodies(queue) == [b"hello"]
    large = bytes(range(256)) * 40_000
    run("send", "data", "jobs", "-", stdin=large)
    assert owner.bodies("jobs")[1:] == [large]
    assert [one["bytes"] for one in map(json.loads, run("browse", "data", "jobs", "--json").stdout.splitlines())] == [
        5, len(large),
    ]  # fmt: skip


def test_what_is_received_is_taken_from_the_program(owner: Owner) -> None:
    owner.send("jobs", b"1", b"2", b"3")
    assert owner.do("kept.append(router.queue('jobs').receive()) or kept[0].body") == b"1"
    assert run("receive", "data", "jobs", "--ack", "--raw").stdout == "2"
    assert run("receive", "data", "jobs", "--limit", "0", "--raw").stdout == "3"  # given back
    assert owner.do("router.sweep()") == 1
    assert owner.bodies("dlq") == [b"3"]  # once more than may be
    owner.do("kept[0].ack()")
    assert run("receive", "data", "jobs").stderr == "queue://jobs has no message that is ready.\n"


def test_queues_and_stats_are_the_programs(owner: Owner) -> None:
    owner.send("jobs", b"1", b"22", b"3")
    owner.do("router.queue('jobs').send(b'later', deliver_in=3600) and None")
    owner.do("router.topic('prices').subscribe('audit', client_id='c') and None")
    owner.do("router.topic('prices').send(b'1') and None")
    owner.do("router.queue('jobs').receive().reject('bad')")
    owner.do("kept.append(router.queue('jobs').receive())")
    rows = {row["queue"]: row for row in said("queues", "data")["queues"]}
    jobs = rows["queue://jobs"]
    assert [jobs[key] for key in ("ready", "leased", "delayed", "dead")] == [1, 1, 1, 1]
    assert jobs["bytes"] == owner.do("router._inspection.bytes_of(router.queue('jobs').destination)")
    assert rows["topic://prices"]["subscription"] == "audit"
    stats = said("stats", "data")["stores"]
    assert (stats["all"]["destinations"], stats["all"]["leased"]) == (
        {"queue://jobs": 3, "queue://dlq": 1, "topic://prices": 1}, 1,
    )  # fmt: skip


@pytest.mark.parametrize("target", ["other", "m.other", "urgent"])
def test_a_move_is_the_owners_page_by_page(owner: Owner, target: str) -> None:
    """The limits of transactions are not those of the command."""
    owner.send("jobs", *(b"%d" % n for n in range(2100)))
    assert said("move", "data", "jobs", target, "--limit", "1050")["moved"] == 1050
    assert said("move", "data", "jobs", target)["moved"] == 1050
    assert sorted(map(int, owner.bodies(target))) == list(range(2100))
    says = f"Error: queue://{target} is where its messages are already; name another queue to move to\n"
    assert run("move", "data", target, target, code=2).stderr == says


def test_a_move_that_fails_says_how_far_it_came(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.send("jobs", *(b"%d" % n for n in range(1500)))
    owner.do(
        "kept.append(type(router)._unlimited) or setattr(type(router), '_unlimited', lambda self: "
        "kept[0](self) if router.queue('b').depth() < 1000 else refuse())"
    )
    error = run("move", "data", "jobs", "b", code=1).stderr
    assert "1000 messages of queue://jobs were moved before this." in error
    assert (len(owner.bodies("b")), len(owner.bodies("jobs"))) == (1000, 500)


def test_dead_letters_go_back_also_into_memory(owner: Owner) -> None:
    for queue in ("jobs", "m.jobs"):
        owner.send(queue, b"1", b"2")
        owner.do("[router.queue(given[0]).receive().reject('bad') for _ in range(2)]", queue)
    assert said("requeue", "data", "dlq", "--limit", "1") == {"queue": "queue://dlq", "requeued": 1, "left": 1}
    assert [said("requeue", "data", queue)["requeued"] for queue in ("dlq", "m.dlq")] == [1, 2]
    assert (owner.bodies("jobs"), owner.bodies("m.jobs")) == ([b"1", b"2"], [b"1", b"2"])


def test_purge_and_delete(owner: Owner) -> None:
    owner.send("jobs", b"1", b"2")
    owner.do("kept.append(router.queue('jobs').receive())")
    assert said("purge", "data", "jobs", "--yes") == {"queue": "queue://jobs", "removed": 1, "left": 1}
    owner.do("kept.pop().ack()")
    owner.send("old", b"1")
    owner.do("router.map('values').put('key', b'1')")
    assert said("delete", "data", "old", "--yes")["removed"] == 1
    assert "with 1 value?" in run("delete", "data", "map://values", code=2).stderr
    assert owner.do("[str(one) for one in router.destinations()]") == ["map://values", "queue://jobs"]


@pytest.mark.parametrize("queue", ["jobs", "urgent"])
def test_tail_shows_what_the_program_sends(owner: Owner, tmp_path: Path, queue: str) -> None:
    owner.send(queue, b"old", b"last")
    out, err = tmp_path / "out", tmp_path / "err"
    process = started("anabranch", "tail", "data", queue, "-n", "1", "--raw", out=str(out), err=str(err))
    eventually(lambda: out.exists() and out.read_bytes() == b"last", err.read_text)
    owner.do("router.queue(given[0]).send(b'1', priority=9) and None", queue)
    eventually(lambda: out.read_bytes() == b"last1")
    owner.send(queue, b"2", b"3")
    eventually(lambda: out.read_bytes() == b"last123")
    owner.close()  # the next look says so
    process.join(PATIENCE)
    assert process.exitcode == 1
    assert err.read_text().endswith("open has closed it, or has ended; try again\n")


# Stores and transactions ----------------------------------------------------------------------------------------------


def test_compact(owner: Owner) -> None:
    owner.send("jobs", *(bytes(100_000) for _ in range(100)))
    assert list(said("compact", "data", "--store", "all")["freed_bytes"]) == ["all"]
    owner.do("router.queue('jobs').purge()")
    assert set(said("compact", "data")["freed_bytes"]) == {"all"}
    assert "there is no store 'x' to compact; there are: all" in run("compact", "data", "-s", "x", code=2).stderr


def test_explain_asks_the_program(owner: Owner) -> None:
    owner.send("jobs", b"1", b"2")
    found = said("explain", "data")
    assert [one["messages"] for one in found["stores"][0]["pinning"]] == [2]
    assert "queue://jobs" in run("explain", "data").stdout


def test_transactions_are_listed_and_decided(owner: Owner) -> None:
    owner.do("kept.append(router.transaction(XID))")
    owner.do("kept[0].send('queue://jobs,queue://urgent', b'1') and None")
    owner.do("kept.pop().prepare()")
    (one,) = said("transactions", "data")["in_doubt"]
    assert (one["xid"], one["sends"]) == (XID._asdict(), 2)
    done = said("transactions", "data", "--commit", str(XID))
    assert (done["outcome"], owner.bodies("jobs"), owner.bodies("urgent")) == ("commit", [b"1"], [b"1"])
    assert said("transactions", "data", "--forget", one["transaction"])["forgotten"]
    assert said("transactions", "data")["by_hand"] == []


def test_a_damaged_decision_log_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Inspection, "decisions_damage", anabranch.CorruptionError("log", 7, "it is torn"))
    with anabranch.open(config()):  # by this process, which serves the command
        result = run("transactions", "data", code=1)
    assert result.stderr == "Error: the decision log cannot be used: log at offset 7: it is torn\n"


def test_check_looks_at_a_directory_in_use(owner: Owner) -> None:
    assert run("check", "data").stdout.startswith("data/in-force.yaml is valid.")


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (("explain", "data/stores/all"), "Close it there first, or read a copy of the directory"),
        (("salvage", "data", "--to", "new"), "Close it there first, or read a copy of the directory"),
        (("repartition", "data", "-c", "new.yaml"), "itself by router.repartition('new.yaml')"),
        (("export", "data", "--out", "new"), "first; or export a backup, which `anabranch backup` makes meanwhile"),
        (("serve", "data"), "open it with shared=True to use it together, or use another directory"),
    ],
)
def test_what_needs_the_directory_for_itself_names_the_process(
    owner: Owner, arguments: tuple[str, ...], step: str
) -> None:
    owner.send("jobs", b"1")
    Path("new.yaml").write_text("directory: data\nstores: [{name: new, match: ['>'], journal: {}}]\n")
    error = run(*arguments, code=1).stderr
    assert f"by process {owner.pid} on {socket.gethostname()}, opened at " in error
    assert error.rstrip().endswith(step)
    assert not Path("new").exists()


# Who is asked ---------------------------------------------------------------------------------------------------------


def test_a_program_that_lets_nobody_look_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    owner = Owner(control=False)
    assert f"is open already, by process {owner.pid}" in run("queues", "data", code=1).stderr
    owner.close()
    run("queues", "data")


def test_a_program_that_is_stopped_is_named(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_router, "LOOKING_PATIENCE", 0.2)
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        error = run("queues", "data", code=1).stderr
    finally:
        os.kill(owner.pid, signal.SIGCONT)
    said = (
        f"{Path('data').absolute()} is open, and its process, {owner.pid}, has not answered in 0 s: it may be stopped"
    )
    assert error.startswith(f"Error: {said}")
    run("queues", "data")


def test_a_socket_that_was_left_is_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    anabranch.open(config()).close()
    left, _ = socket_file.bound(Path("data").absolute(), 1)
    left.close()
    assert said("queues", "data")["queues"] == []


def test_an_owner_that_goes_as_it_is_asked_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with anabranch.open(config()) as router:
        router.queue("jobs").send(b"1")
    listening = socket_file.bound_without_file(Path("data").absolute(), 8)
    listening.setblocking(True)

    def serve() -> None:
        for _ in range(2):  # the look whether somebody is there, and the greeting
            listening.accept()[0].close()
        listening.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert [row["queue"] for row in said("queues", "data")["queues"]] == ["queue://jobs"]
    thread.join()
    assert list(Path("data/clients").iterdir()) == []


# top ------------------------------------------------------------------------------------------------------------------


def look(*more: str) -> Any:
    return said("top", "data", "--once", "--interval", "0.1", *more)


def test_top_says_what_stores_hold_and_who_is_connected(owner: Owner) -> None:
    owner.send("jobs", b"1", b"2", b"3")
    owner.do("router.queue('jobs').send(b'later', deliver_in=3600) and None")
    owner.do("router.queue('jobs').receive().reject('bad')")
    owner.do("router.map('values').put('key', b'1')")
    owner.do("kept.append(router.queue('jobs').receive())")
    with anabranch.open("data", shared=True) as client:
        held = client.queue("jobs").receive_many(5)
        listener = client.queue("m.jobs").listen(lambda message: None)
        waiting = threading.Thread(target=client.queue("m.other").receive, args=(PATIENCE,))
        waiting.start()
        eventually(lambda: look()["clients"][0]["waiting"] == 1)
        seen = look()
        (one,) = seen["clients"]
        assert (seen["owner_pid"], one["pid"], one["held"], one["listeners"]) == (owner.pid, os.getpid(), 1, 1)
        words = Path("/proc/self/cmdline").read_text().replace("\0", " ").strip()
        program, end, more = words.partition(" ")
        assert one["process"] == f"{Path(program).name}{end}{more}"[: top.WORDS]
        stores = {store["store"]: store for store in seen["stores"]}
        counted = [stores["all"][key] for key in ("ready", "leased", "delayed", "dead", "failed")]
        assert counted == [1, 2, 1, 1, None]  # the dead letter is ready, too
        assert stores["all"]["oldest_ready_seconds"] is None, "and waits for nobody"
        assert stores["all"]["sends_per_second"] == 0
        assert stores["all"]["sync_seconds"] == stores["memory"]["sync_seconds"] == 0  # they wait for no disk
        text = run("top", "data", "--once", "-i", "0.1").stdout.splitlines()
        assert text[0].split("  ")[1].startswith(f"{Path('data').absolute()}, open in process {owner.pid}: ")
        assert [line.split()[:1] for line in text[2:5]] == [["store"], ["all"], ["memory"]]
        assert text[-1].split()[:5] == [str(os.getpid()), "1", "1", "1", "1"]
        client.queue("m.other").send(b"1")
        waiting.join()
        listener.close()
        client.release(held)
    eventually(lambda: look()["clients"] == [])
    assert run("top", "data", "--once", "-i", "0.1").stdout.endswith("\nnobody else is connected\n")


def test_top_over_a_directory_that_nobody_has_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    anabranch.open(config()).close()
    text = run("top", "data", "--once", "-i", "0.1").stdout
    assert f"{Path('data').absolute()}, open in this command\n\nno stores yet\n\nnobody else" in text


def test_rates_are_of_what_happened_between_two_looks() -> None:
    def at(seconds: float, sends: int) -> top.Look:
        return top.Look(seconds, 1, [{"store": "a", "sends": sends}], [])

    rate: Callable[..., float | None] = top.Look.rate
    assert rate(at(12, 250), at(10, 50), "a", "sends") == 100
    assert rate(at(12, 250), None, "a", "sends") is None
    assert rate(at(12, 250), at(12, 50), "a", "sends") is None
    assert rate(at(12, 0), at(10, 50), "a", "sends") is None  # the store was opened anew
    assert rate(at(12, 250), at(10, 50), "b", "sends") is None


def test_the_slowest_syncs_are_those_between_two_looks() -> None:
    def at(*counts: int, total: float | None = None) -> top.Look:
        row = {"store": "a", "sync_counts": (*counts, *[0] * (20 - len(counts)))}
        return top.Look(1, 1, [row | {"sync_total_seconds": 10.0 * sum(counts) if total is None else total}], [])

    slowest: Callable[..., float | None] = top.Look.sync_p99
    assert slowest(at(0, 100), None, "a") == pytest.approx(0.0000199)
    assert slowest(at(0, 1100, 0, 100), at(0, 1000), "a") == pytest.approx(0.000099)
    assert slowest(at(0, 100), at(0, 100), "a") is None
    assert slowest(at(0, 100), at(0, 0, 7, 1000), "a") == pytest.approx(0.0000199)  # the store was opened anew
    assert slowest(at(*[0] * 19, 1), None, "a") == 10 and slowest(at(), None, "a") is None
    assert slowest(at(1), None, "b") is None
    only = slowest(at(0, 1000, 0, 1, total=0.01506), at(0, 1000, total=0.015), "a")
    assert only == pytest.approx(0.00006), "of one it is known how long it took, not only in which bucket it is"


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120, 130, 140])
def test_top_leaves_out_what_a_terminal_has_no_room_for(columns: int) -> None:
    figures = dict.fromkeys(("sends", "acks", "syncs", "leased", "delayed", "dead", "waiting"), 7)
    store = {
        "kind": "journal",
        "sync": "periodic, 1s",
        "ready": 120000,
        "oldest_ready_seconds": 97,
        "sync_seconds": 0.00313,
        **figures,
        "sync_counts": [0, 0, 7, *[0] * 17],
        "sync_total_seconds": 0.0003,
    }
    names = ("customer-orders-of-the-north", "telemetry")
    look = top.Look(1.0, os.getpid(), [{"store": name, "failed": None, **store} for name in names], [])
    heads, first, second = top._lines(Path("data"), look, None, columns)[2:5]
    assert max(map(len, (heads, first, second))) <= columns
    assert re.match(r"custo\S*rth ", first) and second.startswith("telemetry ")
    assert {"store", "sends/s", "ready", "oldest"} <= set(heads.split()) and "120,000" in first and "97 s" in first
    assert ("dead" in heads, "p99 ms" in heads, "kind" in heads) == (columns >= 80, columns >= 100, columns >= 140)
    assert ("periodic, 1s" in first, "waiting" in heads) == (columns >= 120, columns >= 130)


def test_on_a_terminal_one_screen_is_drawn_anew(owner: Owner) -> None:
    owner.send("jobs", b"1")
    terminal, its = os.openpty()
    tty = os.ttyname(its)
    process = started("anabranch", "top", "data", "-i", "0.1", stdin=tty, out=tty, err=tty)
    shown = b""
    while shown.count(b"\x1b[H") < 3:
        shown += os.read(terminal, 65536)
    assert shown.count(b"\x1b[?1049h\x1b[?25l\x1b[H") == 1
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE)
    while b"Interrupted." not in shown:
        shown += os.read(terminal, 65536)
    assert (process.exitcode, b"\x1b[?25h\x1b[?1049lInterrupted." in shown) == (130, True)
    os.close(terminal)
    os.close(its)
