"""The commands over what lies in a directory that nobody has open: queues, browse, send, receive, tail, move, requeue,
purge, delete; and how each finds its directory."""

from __future__ import annotations

import base64
import json
import os
import pickle
import pty
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anabranch

from ..children import started
from ..contract.disk import PATIENCE
from ..taking import take
from ..thirdparty.disk import SITE
from . import commands

assert SITE.is_dir()  # the third party is installed
ANABRANCH = [sys.executable, "-m", "anabranch"]
KINDS: dict[str, dict[str, Any]] = {
    "journal": {"journal": {"sync": "never", "segment_size": "64KiB"}},
    "sql": {"sql": {}},
    "onefile": {"onefile": None},
}
DLQ = {"dead_letter": "dlq", "max_deliveries": 1}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options of one kind of store for everything, in a directory that has been opened with them."""
    name = request.param
    options: dict[str, Any] = {name: {**(KINDS[name][name] or {}), **DLQ}}
    anabranch.open(anabranch.Config("data", [anabranch.StoreConfig("all", [">"], **options)])).close()
    return options


run = partial(commands.run, code=0)


def lines(*arguments: str) -> list[dict[str, Any]]:
    """What a command says with --json, a line a message."""
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


def bodies(queue: str) -> list[bytes]:
    with anabranch.open("data") as router:
        return [message.body for message in router.queue(queue).browse()]


def send(*texts: str, queue: str = "jobs") -> None:
    with anabranch.open("data") as router:
        for text in texts:
            router.queue(queue).send(text.encode())


def dead_letters(*texts: str) -> None:
    send(*texts)
    with anabranch.open("data") as router:
        for _ in texts:
            message = take(router.queue("jobs"))
            message.release()
        router.sweep()


# Which directory ------------------------------------------------------------------------------------------------------

ALL = [
    ("stats",), ("queues",), ("compact",), ("transactions",), ("browse", "jobs"), ("receive", "jobs"),
    ("send", "jobs", "more"), ("move", "jobs", "other"), ("purge", "jobs", "--yes"), ("delete", "other", "--yes"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", ALL, ids=lambda given: given[0])
@pytest.mark.parametrize("how", ["DIR", "FILE", "-c FILE", "-c DIR"])
def test_each_command_finds_its_directory(arguments: tuple[str, ...], how: str) -> None:
    Path("stores.yaml").write_text("directory: data\nstores: [{name: a, match: ['>'], journal: {sync: never}}]\n")
    with anabranch.open("stores.yaml") as router:
        for queue in ("jobs", "other"):
            router.queue(queue).send(b"1")
    command, *others = arguments
    source = "data" if how.endswith("DIR") else "stores.yaml"
    run(command, *(["-c"] if how.startswith("-c") else []), source, *others)
    assert anabranch.policies.config.load("stores.yaml") == anabranch.open("data").config


@pytest.mark.parametrize("command", ["stats", "queues", "compact", "transactions"])
def test_without_anything_it_is_the_file_here(command: str) -> None:
    assert "Error: no stores.yaml is here; give DIR, the data directory, or -c FILE" in run(command, code=2).stderr
    Path("stores.yaml").write_text("directory: data\nstores: [{name: a, match: ['>']}]\n")
    anabranch.open("stores.yaml").close()
    run(command)


@pytest.mark.parametrize("arguments", ALL, ids=lambda given: given[0])
def test_nothing_is_made_of_what_is_not_there(arguments: tuple[str, ...]) -> None:
    Path("empty").mkdir()
    Path("others").mkdir()
    Path("others/file").touch()
    before = sorted(Path().rglob("*"))
    command, *others = arguments
    for directory, says in (
        ("missing", "missing does not exist yet"),
        ("empty", "empty holds no data of Anabranch's yet"),
        ("others", "others holds file, and no data of a router"),
        ("missing.yaml", "missing.yaml: no such file"),
    ):
        assert says in run(command, directory, *others, code=2).stderr
    assert sorted(Path().rglob("*")) == before


def test_a_directory_that_nobody_may_look_into_says_who_uses_it() -> None:
    send("1")
    text = "{directory: ., control: false, stores: [{name: all, match: ['>'], journal: {}}]}"
    Path("data/stores.yaml").write_text(text)
    with anabranch.open("data"):
        for command, *others in ALL:
            assert "is open already, by this process" in run(command, "data", *others, code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("browse", "data"), "Missing argument 'QUEUE'"),
        (("browse",), "Missing argument 'DIR'"),
        (("move", "data", "jobs"), "Missing argument 'TARGET'"),
        (("stats", "data", "-c", "stores.yaml"), "says the directory already; leave DIR, data, out"),
        (("browse", "-c", "stores.yaml", "data", "jobs"), "leave DIR, data, out"),
        (("browse", "data", "job"), "has no queue://job; did you mean jobs?"),
        (("receive", "data", "x"), "has no queue://x; it has jobs"),
        (("purge", "data", "x", "--yes"), "has no queue://x"),
        (("delete", "data", "topic://x", "--yes"), "has no topic://x; there is none yet"),
        (("requeue", "data", "x"), "has no queue://x"),
        (("move", "data", "jobs", "jobs"), "is where its messages are already"),
        (("receive", "data", "topic://t"), "topic://t is a topic: give a queue; `browse` and `tail` show "),
        (("move", "data", "jobs", "map://m"), "map://m is a map: give a queue\n"),
        (("browse", "data", "map://m"), "map://m is a map, which has no messages: give a queue or a topic\n"),
        (("send", "data", "map://m", "x"), "map://m is a map, to which nothing is sent: give a queue or a topic\n"),
        (("send", "data", "jobs,a.*", "x"), "queue://a.* holds the wildcard *: give one name; `anabranch queues`"),
        (("browse", "data", "orders.>"), "queue://orders.> holds the wildcard >: give one name; `anabranch queues` "),
        (("purge", "data", "a,b", "--yes"), "'a,b' has a comma, which stands between several names: give one\n"),
        (("delete", "data", "a.?", "--yes"), "queue://a.? holds the wildcard ?: give one name; "),
        (("send", "data", "jobs"), "give the BODY, - for stdin, or --file FILE"),
        (("send", "data", "jobs", "x", "--file", "y"), "give the BODY"),
        (("send", "data", "jobs", "--file", "nowhere"), "--file nowhere: No such file"),
        (("send", "data", "jobs", "--file", "data"), "--file data: Is a directory"),
        (("send", "data", "jobs", "x", "--delay", "2 weeks"), "expected a duration: seconds or a number with a unit"),
        (("send", "data", "jobs", "x", "--expires", "0s"), "0.0 is not in the range x>0"),
        (("receive", "data", "jobs", "--timeout", "-1"), "expected a duration"),
        (("send", "data", "jobs", "x", "-H", "novalue"), "'novalue' is no header; write name=value"),
        (("send", "data", "jobs", "x", "-H", "a=1", "-H", "a=2"), "'a' is given twice"),
        (("send", "data", "jobs", "x", "--priority", "70000"), "70000"),
        (("send", "data", "a.>", "x"), "wildcard"),
        (("browse", "data", "jobs", "--raw", "--json"), "exclude each other"),
        (("browse", "data", "jobs", "--limit", "-1"), "-1"),
    ],
)
def test_bad_input_changes_nothing(arguments: tuple[str, ...], says: str) -> None:
    send("1")
    Path("stores.yaml").write_text("directory: data\nstores: [{name: all, match: ['>']}]\n")
    result = run(*arguments, code=2)
    assert says in result.stderr and "Traceback" not in result.output
    assert bodies("jobs") == [b"1"]


def test_a_name_is_compared_with_names_of_its_kind() -> None:
    """`queue://` makes no two names alike. What loses messages suggests a slip alone."""
    with anabranch.open("data") as router:
        for queue in ("orders", "a", "b", "c", "d", "e"):
            router.queue(queue).declare()
        router.topic("prices").subscribe("desk")
        router.topic("order").subscribe("desk")
    it_has = "it has a, b, c, d, e and 1 more\n"
    for command, *options in (("browse",), ("receive",), ("purge", "--yes"), ("delete", "--yes")):
        loses = bool(options)
        for name, says in {
            "odrers": "did you mean orders?\n",
            "ordexs": it_has if loses else "did you mean orders?\n",
            "zebra": it_has,
        }.items():
            assert run(command, "data", name, *options, code=2).stderr.endswith(f"has no queue://{name}; {says}")
    assert "did you mean topic://prices?" in run("browse", "data", "topic://price", code=2).stderr
    says = "has no topic://orders; did you mean topic://order?"
    assert says in run("browse", "data", "topic://orders", code=2).stderr


# What there is --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kind")
def test_queues() -> None:
    assert run("queues", "data").stdout.endswith("holds no queues yet.\n")
    dead_letters("d1", "d2")
    with anabranch.open("data") as router:
        router.queue("jobs").send(b"1")
        router.queue("jobs").send(b"2", deliver_in=3600)
        router.topic("prices").subscribe("desk", client_id="c1")
        router.topic("prices").send(b"3")
        tx = router.transaction(anabranch.Xid(1, "waits", ""))
        router.queue("claimed").send(b"4")
        message = take(router.queue("claimed"))
        tx.ack(message)
        tx.prepare()
    found = json.loads(run("queues", "data", "--json").stdout)["queues"]
    rows = {row["queue"]: row for row in found}
    assert {
        name: [row[key] for key in ("ready", "leased", "delayed", "dead")] for name, row in rows.items()
    } == {
        "queue://jobs": [1, 0, 1, 2], "queue://dlq": [2, 0, 0, 0], "topic://prices": [1, 0, 0, 0],
        "queue://claimed": [0, 1, 0, 0],
    }  # fmt: skip
    assert rows["queue://jobs"]["oldest_ready_seconds"] >= 0 and rows["queue://claimed"]["oldest_ready_seconds"] is None
    assert (rows["topic://prices"]["subscription"], rows["topic://prices"]["client_id"]) == ("desk", "c1")
    assert all(row["bytes"] > 0 for row in found)
    text = run("queues", "data").stdout
    assert text.splitlines()[0].split() == ["queue", "ready", "leased", "delayed", "dead", "oldest", "bytes", "sync"]
    assert "topic://prices c1/desk" in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.usefixtures("kind")
def test_a_queue_that_was_only_received_from_is_not_listed() -> None:
    with anabranch.open("data") as router:
        router.queue("jobs").declare()
        assert router.queue("jbos").receive(timeout=0.01) is None
    for _ in range(2):
        found = json.loads(run("queues", "data", "--json").stdout)["queues"]
        assert [row["queue"] for row in found] == ["queue://jobs"]


@pytest.mark.usefixtures("kind")
def test_browse_shows_what_is_text_and_hints_at_what_is_none() -> None:
    with anabranch.open("data") as router:
        jobs = router.queue("jobs")
        jobs.send(
            "grüße\nzwei".encode(), {"sku": "T-1", "n": 3, "raw": b"\x00\xff"}, "id-1", priority=7, expires_in=999
        )
        jobs.send(bytes(range(256)))
        router.queue("jobs", codec="msgpack").send({"a": [1, b"x"]})
        router.queue("jobs", codec="json").send({"b": 2})
        router.queue("jobs", codec="pickle").send(print)
        jobs.send(b"\x1b[2Jgone", {"evil": "\x1b[31m"}, "\x07id")
        jobs.send(b"")
    text = run("browse", "data", "jobs").stdout
    assert "id id-1  priority 7  expires 20" in text and "  sku: T-1\n  n: 3\n  raw: 00ff\n  grüße\n  zwei\n" in text
    assert "<256 bytes: 00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f ...>" in text
    assert '  {"a": [1, "eA=="]}\n' in text and '  {"b":2}\n' in text
    assert "<application/x-python-pickle, " in text and "print" not in text
    assert "\x1b" not in text and "\x07" not in text and "\\x1b[31m" in text and "id \\x07id" in text
    found = lines("browse", "data", "jobs")
    assert [found[0][key] for key in ("body", "message_id", "priority")] == ["grüße\nzwei", "id-1", 7]
    assert found[0]["headers"] == {"sku": "T-1", "n": 3, "raw": base64.b64encode(b"\x00\xff").decode()}
    assert base64.b64decode(found[1]["body_base64"]) == bytes(range(256)) and "body" not in found[1]
    assert (found[2]["value"], found[3]["value"]) == ({"a": [1, "eA=="]}, {"b": 2})
    assert pickle.loads(base64.b64decode(found[4]["body_base64"])) is print
    assert found[6]["body"] == "" and len(found) == 7
    assert run("browse", "data", "jobs", "--raw", "--limit", "1").stdout_bytes == "grüße\nzwei".encode()
    assert len(bodies("jobs")) == 7


@pytest.mark.parametrize(
    ("body", "value"), [(rb'{"a":"\ud800"}', None), (b"[NaN, Infinity, 1.5]", ["nan", "inf", 1.5])]
)
def test_json_is_written_that_others_read_whatever_a_body_says(body: bytes, value: Any) -> None:
    with anabranch.open("data") as router:
        router.queue("jobs").send(body, {"content_type": "application/json", "n": float("nan")})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    process = started("anabranch", "receive", "data", "jobs", "--ack", "--json", out="out", err="err")
    process.join(PATIENCE)
    assert process.exitcode == 0
    shown = json.loads(Path("out").read_bytes(), parse_constant=refuse)
    assert (shown.get("value"), shown["body"], shown["headers"]["n"]) == (value, body.decode(), "nan")
    assert bodies("jobs") == []


def test_browse_has_a_limit_and_says_what_is_left() -> None:
    send(*(str(number) for number in range(25)))
    result = run("browse", "data", "jobs")
    assert result.stderr == "... and 5 more messages; --limit 0 shows all.\n" and "19" in result.stdout
    assert len(lines("browse", "data", "jobs", "--limit", "0")) == 25
    assert [one["body"] for one in lines("browse", "data", "queue://jobs", "-n", "2")] == ["0", "1"]
    run("purge", "data", "jobs", "--yes")
    assert run("browse", "data", "jobs").stderr == "queue://jobs is empty.\n"


def test_a_topic_s_messages_are_browsed() -> None:
    with anabranch.open("data") as router:
        router.topic("t").subscribe("desk")
        router.topic("t").send(b"1")
    assert [one["body"] for one in lines("browse", "data", "topic://t")] == ["1"]


# Send and receive -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kind")
def test_what_is_sent_is_received() -> None:
    big = os.urandom(3 << 20)
    Path("file").write_bytes(big)
    run("send", "data", "jobs", "hello", "-H", "a=1", "--header", "b=x=y", "--id", "one", "--priority", "9")
    run("send", "data", "jobs", "-", stdin=b"\xff\x00")
    run("send", "data", "jobs", "--file", "file")
    assert run("send", "data", "jobs", "hello", "--id", "one").stdout == "queue://jobs: there already\n"
    (first,) = lines("receive", "data", "jobs", "--ack")
    assert (first["body"], first["headers"], first["priority"]) == ("hello", {"a": "1", "b": "x=y"}, 9)
    assert run("receive", "data", "jobs", "--ack", "--raw").stdout_bytes == b"\xff\x00"
    (last,) = lines("browse", "data", "jobs")
    assert (last["bytes"], last["large"], "body" in last) == (3 << 20, True, False)
    assert run("receive", "data", "jobs", "--ack", "--raw").stdout_bytes == big
    result = run("receive", "data", "jobs", "--ack")
    assert (result.stdout, result.stderr) == ("", "queue://jobs has no message that is ready.\n")


def test_send_makes_a_directory_if_it_is_told_to() -> None:
    run("send", "data", "jobs", "1", code=2)
    assert not Path("data").exists()
    assert run("send", "data", "jobs", "1", "--create").stdout == "queue://jobs: sent, number 1\n"
    assert bodies("jobs") == [b"1"]


def test_a_body_that_is_no_text_is_sent_as_it_is_given() -> None:
    run("send", "data", "jobs", os.fsdecode(b"\xff\xfe"), "--create")
    assert bodies("jobs") == [b"\xff\xfe"]
    closed = 'exec "$@" <&-'
    result = subprocess.run(
        ["sh", "-c", closed, "-", *ANABRANCH, "send", "data", "jobs", "-"],
        capture_output=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (result.returncode, b"stdin is closed" in result.stderr) == (2, True)


def test_send_says_that_a_queue_is_new() -> None:
    assert run("send", "data", "jobs", "1", "--create").stderr == "queue://jobs is a new queue\n"
    assert run("send", "data", "jobs", "2").stderr == ""
    result = run("send", "data", "jbos,zebra,jobs", "3", "--json")
    assert result.stderr == "queue://jbos is a new queue; did you mean jobs?\nqueue://zebra is a new queue\n"
    assert len(json.loads(result.stdout)["sent"]) == 3
    run("send", "data", "jobs.>", "4", code=2)


def test_send_as_json_and_to_several() -> None:
    with anabranch.open("data") as router:
        router.topic("t").subscribe("desk")
    sent = json.loads(run("send", "data", "queue://jobs,topic://t", "1", "--json").stdout)["sent"]
    assert [one["destination"] for one in sent] == ["queue://jobs", "topic://t"]
    assert "topic://nobody has no durable subscription" in run("send", "data", "topic://nobody", "1").stderr


def test_send_warns_of_what_goes_with_the_command() -> None:
    memory = anabranch.StoreConfig("fast", ["fast.>", "topic://fast.>"], memory={})
    config = anabranch.Config("data", [memory, anabranch.StoreConfig("all", [">"], journal={"sync": "never"})])
    with anabranch.open(config) as router:
        for queue in ("fast.jobs", "jobs"):
            router.queue(queue).declare()
    result = run("send", "data", "fast.jobs,jobs", "1")
    assert result.stderr == (
        "Warning: queue://fast.jobs is in a memory store, whose messages go when this command ends, so "
        "nobody gets this message\n"
    )
    assert bodies("fast.jobs") == [] and bodies("jobs") == [b"1"]
    assert "has no durable subscription, so nobody" in run("send", "data", "topic://fast.t", "1").stderr


def test_send_with_a_delay_and_an_end() -> None:
    run("send", "data", "jobs", "later", "--delay", "1h", "--create")
    run("send", "data", "jobs", "gone", "--expires", "1ms")
    run("send", "data", "jobs", "gone", "--expires", "0.001")
    result = run("receive", "data", "jobs", "--ack", "--limit", "0", "--timeout", "1ms")
    assert result.stdout == ""
    assert json.loads(run("queues", "data", "--json").stdout)["queues"][0]["delayed"] == 1


def test_receive_gives_back_what_is_not_acked() -> None:
    send("1", "2", "3")
    assert [one["body"] for one in lines("receive", "data", "jobs", "--limit", "2")] == ["1", "2"]
    assert [one["given_back"] for one in lines("browse", "data", "jobs")] == [1, 1, 0]
    assert [one["body"] for one in lines("receive", "data", "jobs", "--limit", "0", "--ack")] == ["1", "2", "3"]
    assert bodies("jobs") == []


def test_a_reader_that_has_gone_costs_nothing() -> None:
    """What was not written out is not acked."""
    send(*("x" * 1000 for _ in range(500)))
    process = subprocess.Popen(
        [*ANABRANCH, "receive", "data", "jobs", "--ack", "--limit", "0", "--json"], stdout=-1, stderr=-1
    )
    assert process.stdout is not None and process.stderr is not None
    read = [process.stdout.readline() for _ in range(3)]
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(PATIENCE)
    left = [one["seq"] for one in lines("browse", "data", "jobs", "--limit", "0")]
    acked = 500 - len(left)
    assert left == list(range(left[0], left[0] + len(left)))  # those before
    assert acked >= 2 and [json.loads(line)["seq"] for line in read] == [1, 2, 3]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ended_while_it_receives_it_has_lost_nothing(number: int, code: int) -> None:
    """Each message was written out, or is there, or both."""
    total = 3000
    send(*map(str, range(total)))
    Path("out").touch()
    process = started("anabranch", "receive", "data", "jobs", "--ack", "--limit", "0", "--json", out="out", err="err")
    while Path("out").stat().st_size < 20_000:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(PATIENCE)
    assert process.exitcode in (code, 0)
    text = Path("out").read_text()
    written = [json.loads(line)["body"] for line in text.splitlines() if line.endswith("}")]
    left = [body.decode() for body in bodies("jobs")]
    assert set(written) | set(left) == set(map(str, range(total)))
    assert len(set(written) & set(left)) <= 1


# tail -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priorities", [False, True])
def test_tail_shows_what_is_there_and_what_comes(priorities: bool) -> None:
    options = {**DLQ, "priorities": priorities, "sync": "never"}
    config = anabranch.Config("data", [anabranch.StoreConfig("all", [">"], journal=options)])
    with anabranch.open(config) as router:
        router.queue("dlq").send_many([b"old", b"last"])
        router.queue("jobs").send(b"expires", expires_in=0.01)
    process = subprocess.Popen(
        [*ANABRANCH, "tail", "data", "dlq", "--limit", "1", "--json"], stdout=-1, stderr=-1,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    found = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert {one["body"] for one in found} == {"last", "expires"}
    told = f"by process {process.pid} on .*, opened by `anabranch tail`;"
    with pytest.raises(anabranch.StoreLockedError, match=told):
        anabranch.open("data")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, b"", b"Interrupted.\n")
    assert len(bodies("dlq")) == 3


@pytest.mark.parametrize("command", ["tail", "requeue"])
def test_the_help_says_which_queue_has_the_dead_letters(command: str) -> None:
    assert "that `dead_letter:` names in the configuration" in " ".join(run(command, "--help").stdout.split())


# What changes things --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kind")
def test_dead_letters_are_put_back() -> None:
    dead_letters("1", "2", "3")
    assert (bodies("jobs"), bodies("dlq")) == ([], [b"1", b"2", b"3"])
    assert run("requeue", "data", "dlq", "--limit", "2").stdout == "2 dead letters of queue://dlq put back; 1 left.\n"
    assert json.loads(run("requeue", "data", "dlq", "--json").stdout) == {
        "queue": "queue://dlq", "requeued": 1, "left": 0,
    }  # fmt: skip
    assert bodies("jobs") == [b"1", b"2", b"3"]


def test_nothing_is_put_where_it_goes_with_the_command() -> None:
    memory = anabranch.StoreConfig("fast", ["fast.>"], memory={})
    config = anabranch.Config("data", [memory, anabranch.StoreConfig("all", [">"], journal={"sync": "never"})])
    with anabranch.open(config) as router:
        router.queue("jobs").send(b"1")
        router.queue("dlq").send(b"2", {"dead_letter_source": "queue://fast.jobs"})
    for _ in range(2):
        for arguments in (("move", "data", "jobs", "fast.jobs"), ("requeue", "data", "dlq")):
            assert "queue://fast.jobs is in a memory store" in run(*arguments, code=2).stderr
        with anabranch.open("data") as router:  # the same once it is recorded where that queue lives
            router.queue("fast.jobs").declare()
    assert (bodies("jobs"), bodies("dlq")) == ([b"1"], [b"2"])


def test_what_is_no_dead_letter_stays_and_the_error_says_how_far_it_came() -> None:
    anabranch.open(anabranch.Config("data", [anabranch.StoreConfig("all", [">"], journal=DLQ)])).close()
    dead_letters("1")
    send("mine", queue="dlq")
    result = run("requeue", "data", "dlq", code=1)
    assert (
        "is no dead letter" in result.stderr and "1 dead letters of queue://dlq were put back before" in result.stderr
    )
    assert (bodies("jobs"), bodies("dlq")) == ([b"1"], [b"mine"])


@pytest.mark.usefixtures("kind")
def test_purge_and_delete() -> None:
    send("1", "2")
    assert run("purge", "data", "jobs", "--yes").stdout == "2 messages of queue://jobs removed; 0 left.\n"
    assert run("purge", "data", "jobs").stdout == "0 messages of queue://jobs removed; 0 left.\n"  # nothing to ask
    send("3")
    with anabranch.open("data") as router:
        router.topic("t").subscribe("desk")
        router.topic("t").send(b"1")
        router.map("m").put("k", b"v")
    assert run("delete", "data", "jobs", "--yes").stdout == "queue://jobs deleted, with 1 message.\n"
    for name in ("topic://t", "map://m"):
        assert json.loads(run("delete", "data", name, "-y", "--json").stdout) == {"destination": name, "removed": 1}
    with anabranch.open("data") as router:
        assert router.destinations() == []


@pytest.mark.parametrize(("command", "asks"), [("purge", "Remove 2 messages of "), ("delete", "Delete ")])
def test_what_destroys_asks_and_refuses_without_a_terminal(command: str, asks: str) -> None:
    send("1", "2")
    result = run(command, "data", "jobs", code=2)
    assert "there is no terminal to ask on" in result.stderr and asks in result.stderr and "2 messages" in result.stderr
    assert "--yes" in result.stderr and bodies("jobs") == [b"1", b"2"]


@pytest.mark.parametrize("command", ["purge", "delete"])
@pytest.mark.parametrize(
    ("answer", "code"), [("n\n", 1), ("\n", 1), ("\x04", 1), ("maybe\n", 1), ("y\n", 0), ("\x03", 130)]
)
def test_it_does_what_is_answered(command: str, answer: str, code: int) -> None:
    send("1", "2")
    fd, follower = pty.openpty()
    terminal = os.ttyname(follower)
    process = started("anabranch", command, "data", "jobs", stdin=terminal, out=terminal, err=terminal)
    output = b""
    while b"[y/N]" not in output:
        assert select.select([fd], [], [], PATIENCE)[0]
        output += os.read(fd, 1024)
    os.write(fd, answer.encode())
    process.join(PATIENCE)
    os.close(follower)
    while select.select([fd], [], [], 0)[0]:
        try:
            output += os.read(fd, 1024)
        except OSError:  # nobody has the other end any more
            break
    os.close(fd)
    assert process.exitcode == code
    assert b"with 2 messages?" in output or b"Remove 2 messages of queue://jobs in " in output
    with anabranch.open("data") as router:
        assert router.exists("jobs") is (code != 0 or command == "purge")
        assert router.queue("jobs").depth() == (0 if code == 0 else 2)
