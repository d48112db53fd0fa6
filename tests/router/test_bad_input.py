"""What is mistyped is refused by name, at once, and nothing is done: the calls that concern messages and maps."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import DestinationError, JournalOptions, MemoryOptions, Outgoing, Settlement
from anabranch.policies.config import load

from ..contract.disk import PATIENCE

Call = Callable[[anabranch.Router], object]


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    stores = [anabranch.StoreConfig("all", [">"], memory=MemoryOptions())]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        yield router


def in_transaction(call: Callable[[Any], object]) -> Call:
    def run(router: anabranch.Router) -> None:
        with router.transaction() as tx:
            call(tx)

    return run


def nested() -> list[Any]:
    """So deeply that it cannot even be shown."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


OUTGOING: Any = Outgoing(b"x")
NUMBER: Any = 5
MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda r: r.queue("q").send(b"x", persistent=None), TypeError, "persistent is True or False, not NoneType: None"),
    (lambda r: r.queue("q").send(b"x", persistent="no"), TypeError, "persistent is True or False, not str: 'no'"),
    (lambda r: r.queue("q").send_nowait(b"x", persistent=0), TypeError, "persistent is True or False, not int: 0"),
    (lambda r: r.queue("q").send_many([OUTGOING._replace(persistent=0)]), TypeError, "persistent is True or False"),
    (in_transaction(lambda tx: tx.send("q", b"x", persistent=None)), TypeError, "persistent is True or False"),
    (lambda r: r.queue("q").send(Path("film")), TypeError, "a message body is .* not PosixPath; open it for reading"),
    (lambda r: r.queue("q").send("film"), TypeError, "a message body is .* not str; encode it first"),
    (lambda r: r.queue("q").send(b"x", expires_in=math.inf), ValueError, "expires_in is .* above 0, .*not inf"),
    (lambda r: r.queue("q").send(b"x", expires_in=1e18), ValueError, "expires_in is .* above 0, .*not 1e[+]18"),
    (lambda r: r.queue("q").send(b"x", expires_in=True), TypeError, "expires_in is a number of seconds, not bool"),
    (lambda r: r.queue("q").send_many(5), TypeError, "send_many takes a list of messages, .* not int; one message is"),
    (lambda r: r.queue("q").send_many(b"text"), TypeError, "send_many takes a list of messages, .* not bytes"),
    (lambda r: r.queue("q").send_many(OUTGOING), TypeError, "send_many takes a list of messages, .* not Outgoing"),
    (lambda r: r.ack(5), TypeError, "messages that were received can be acked or released, not int: 5"),
    (lambda r: r.release(None), TypeError, "can be acked or released, not NoneType: None"),
    (lambda r: r.settle(5, Settlement.ACK), TypeError, "a token is a str, not int: 5"),
    (lambda r: r.settle("x", "ack"), TypeError, "how to settle is a Settlement, not str: 'ack'; there are"),
    (lambda r: r.destinations(5), TypeError, "a prefix of destinations is a str, not int: 5"),
    (lambda r: r.receive("map://results"), DestinationError, r"map://results names maps, .* router.map\(name\).get"),
    (lambda r: r.queue("q").browse(limit="3"), TypeError, "limit is a number of messages, not str: '3'"),
    (lambda r: r.queue("q").browse(after="3"), TypeError, "after is a message, or the seq of one, not str: '3'"),
    (lambda r: r.queue("q").listen(5), TypeError, "on_message is a function of one message, not int: 5"),
    (lambda r: r.queue("q", codec="json").listen(5), TypeError, "on_message is a function of one message, not int"),
    (lambda r: r.queue("q").listen(print, on_end=5), TypeError, "on_end is a function of one error, not int: 5"),
    (lambda r: r.topic("t").receive_many(5), AttributeError, r"topic.subscribe\(name\).receive_many\(\)"),
    (lambda r: r.topic("t").consume(timeout=0), AttributeError, r"topic.subscribe\(name\).consume\(\)"),
    (lambda r: r.topic("t").listen(print, lease=3), AttributeError, r"topic.subscribe\(name\).listen\(\)"),
    (
        lambda r: anabranch.open(NUMBER),
        TypeError,
        "a source is a path as str or pathlib.Path, not int: 5; ",
    ),
    (lambda r: anabranch.Router(NUMBER), TypeError, "a Router takes an anabranch.Config, not int: 5; anabranch.open"),
    (lambda r: r.repartition(None), TypeError, "a configuration is the path of a file, .* not NoneType: None"),
    (lambda r: r.repartition(r.config, prepared_seconds=-1), ValueError, "prepared_seconds is .* 0 or more, not -1"),
    (
        lambda r: r.repartition(r.config, prepared_seconds="1"),
        TypeError,
        "prepared_seconds is .* seconds, not str: '1'",
    ),
    (lambda r: list(r.map("m").items(prefix=b"k")), TypeError, "prefix of a map is a str, not bytes: b'k'"),
    (lambda r: list(r.map("m").items(after=5)), TypeError, "after of a map is a str, not int: 5"),
    (lambda r: r.map("m").get(5), TypeError, "a key of a map is a str, not int: 5"),
    (lambda r: r.map("m").pop(5), TypeError, "a key of a map is a str, not int: 5"),
    (lambda r: r.map("m").put("\ud800", b"1"), ValueError, "key .* is not valid unicode"),
    (lambda r: r.map("m").put("k", 5), TypeError, "a value of a map is bytes, not int; encode it first, or give the"),
    (lambda r: r.map("m").put("k", io.BytesIO(b"1")), TypeError, "a value of a map is bytes, not BytesIO"),
    (in_transaction(lambda tx: tx.put("m", "k", "text")), TypeError, "a value of a map is bytes, not str"),
    (lambda r: r.map("m").put("k", b"1", ttl=math.inf), ValueError, "ttl is a number of seconds above 0, .*not inf"),
    (lambda r: r.map("m").increment("k", True), TypeError, "a number is incremented by an int, not bool: True"),
    (
        lambda r: r.map("m").increment("k", 10**5000),
        ValueError,
        "the number of 'k' in map://m would have more than 1000",
    ),
    (lambda r: r.queue("q").receive(lease=10**400), ValueError, "lease is a number of seconds above 0, not 1000"),
    (lambda r: r.queue("q", codec="json").send(nested()), ValueError, "for queue://q cannot be .*; it is a list"),
    (lambda r: r.map("a,b"), DestinationError, r"or Destination.map\(name\)"),
]


@pytest.mark.parametrize(("call", "error", "says"), MISTAKES, ids=[says for *_, says in MISTAKES])
def test_a_mistake_is_told_at_once(router: anabranch.Router, call: Call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(router)
    assert router.queue("q").depth() == 0
    assert router.map("m").count() == 0


def test_keys_are_asked_for_by_the_names_of_the_parameters(router: anabranch.Router) -> None:
    results: Any = router.map("m")
    results.put("k", b"1")
    with pytest.raises(TypeError, match="prefix of a map is a str, not bytes"):
        list(results.items(prefix=b"k"))
    with pytest.raises(TypeError, match="after of a map is a str, not int"):
        list(results.items(after=5))


class _Text:
    content_type = "text/plain"

    def encode(self, value: object) -> Any:
        return str(value)

    def decode(self, body: bytes) -> Any:
        return body.decode()


def test_a_codec_of_maps_that_makes_no_bytes(router: anabranch.Router) -> None:
    with pytest.raises(TypeError, match="the codec of text/plain has encoded 5 as str, not bytes"):
        router.map("m", codec=_Text()).put("k", 5)


def test_a_message_is_no_body_and_says_what_is(router: anabranch.Router) -> None:
    queue: Any = router.queue("q")
    queue.send(b"body")
    message = queue.receive()
    for send in (queue.send, queue.send_nowait, lambda body: queue.send_many([Outgoing(body)])):
        with pytest.raises(TypeError, match=r"not a message: send <Message .*>\.content"):
            send(message)
    with pytest.raises(TypeError, match="limit is a number of bytes, not str"):
        message.read("1")
    assert queue.counts() == (0, 1, 0, 0)
    queue.send(message.content)
    assert queue.counts() == (1, 1, 0, 0)


@pytest.mark.parametrize("kind", ["journal", "memory"])
def test_a_file_may_be_longer_than_the_largest_message(tmp_path: Path, kind: str) -> None:
    """Also where `message_bytes_max` is less than `large_message_size`."""
    options: Any = {"journal": JournalOptions, "memory": MemoryOptions}[kind](message_bytes_max=65_536)
    stores = [anabranch.StoreConfig("all", [">"], **{kind: options})]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        queue = router.queue("films")
        for size in (65_000, 65_537, 200_000):
            queue.send(io.BytesIO(bytes(size)))
            message = queue.receive()
            assert message is not None
            assert (message.size, message.is_large) == (size, size > 65_536)
            message.ack()
        with pytest.raises(anabranch.MessageTooLargeError):
            queue.send(bytes(65_537))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("{delay: 2h}", "delay, 7200 s, is longer than max_delay, 3600 s: no message would wait so long"),
        ("{delay: 1s, multiplier: '2'}", "redelivery.multiplier: expected a number; found '2'"),
        ("{delay: 1s, jitter: true}", "redelivery.jitter: expected a number; found true"),
    ],
)
def test_waits_that_contradict_each_other(tmp_path: Path, options: str, says: str) -> None:
    file = tmp_path / "stores.yaml"
    file.write_text(
        f"directory: data\nstores:\n  - name: all\n    match: ['>']\n    journal: {{redelivery: {options}}}\n"
    )
    with pytest.raises(anabranch.ConfigError) as caught:
        load(file)
    assert says in caught.value.problems[0].message


def test_a_missing_extra_is_told_in_one_error_that_names_the_store(tmp_path: Path) -> None:
    """At open, and by `check`."""
    file = tmp_path / "stores.yaml"
    file.write_text("directory: data\nstores:\n- {name: a, match: [a]}\n- {name: audit, match: ['>'], sql: {}}\n")
    without = "import sys; sys.modules['sqlalchemy'] = None; sys.argv = ['anabranch', 'check', sys.argv[1]]; "
    says = "SQL stores need SQLAlchemy: pip install 'anabranch[sql]'\n"

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", without + code, str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

    opened = run("import anabranch; anabranch.open(sys.argv[2])")
    assert opened.stderr.endswith(f"MissingExtraError: {file}:4: store 'audit': {says}")
    assert opened.stderr.count("Traceback") == 1
    checked = run("from anabranch.router.cli import main; main()")
    assert (checked.returncode, checked.stderr) == (2, f"{file}:4: store 'audit': {says}")
