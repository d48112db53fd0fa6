"""A dead letter tells the last exception: whatever way it was given back, and wherever it goes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import DeadLetter, Settlement
from anabranch.router.offline.repartition import repartition

from ..children import run_program
from ..contract.disk import PATIENCE, eventually
from ..crash.interrupts import everywhere
from ..thirdparty import disk as thirdparty  # installs its kind of store
from .disk import take

assert thirdparty
KINDS = ("journal", "sql", "memory", "onefile")
SPENT: dict[str, Any] = {"max_deliveries": 2, "dead_letter": "dlq"}


def store(name: str, match: str, kind: str, **options: Any) -> anabranch.StoreConfig:
    kinds: dict[str, Any] = {"kind": kind, "options": options} if kind == "onefile" else {kind: options}
    return anabranch.StoreConfig(name, [match], **kinds)


def config(directory: Path, kind: str) -> anabranch.Config:
    """Dead letters of `far.>` go to another store."""
    return anabranch.Config(directory, [store("all", ">", kind, **SPENT), store("far", "far.>", kind, **SPENT)])


@pytest.fixture(params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        yield router


@pytest.fixture
def one(tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        yield router


def letter_of(router: anabranch.Router, name: str = "q") -> DeadLetter:
    router.sweep()
    eventually(lambda: router.queue("dlq").depth())
    (letter,) = router.queue(name).dead_letters()
    return letter


def raising(message: anabranch.Message, number: int) -> None:
    with message:
        raise LookupError(f"part {number} is missing")


def in_transaction(router: anabranch.Router, message: anabranch.Message, number: int) -> None:
    with router.transaction() as tx:
        tx.ack(message)
        tx.send("queue://out", b"x")
        raise LookupError(f"part {number} is missing")


def with_transaction(router: anabranch.Router, message: anabranch.Message, error: Exception) -> None:
    with router.transaction() as tx:
        tx.release(message, reason=error)


Way = Callable[[anabranch.Router, anabranch.Message, int, Exception], object]
WAYS: dict[str, Way] = {
    "release": lambda r, m, n, e: m.release(reason=e),
    "release_nowait": lambda r, m, n, e: m.release_nowait(reason=e).result(PATIENCE),
    "of many": lambda r, m, n, e: r.release([m], reason=e),
    "of many, soon": lambda r, m, n, e: r.release_nowait([m], reason=e).result(PATIENCE),
    "by token": lambda r, m, n, e: r.settle(m.token, Settlement.RELEASE, e),
    "by token, soon": lambda r, m, n, e: r.settle_nowait([m.token], Settlement.RELEASE, e).result(PATIENCE),
    "with": lambda r, m, n, e: raising(m, n),
    "a transaction": lambda r, m, n, e: in_transaction(r, m, n),
    "released in a transaction": lambda r, m, n, e: with_transaction(r, m, e),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["q", "far.q"])
def test_the_last_exception(router: anabranch.Router, way: str, name: str) -> None:
    router.queue(name).send(b"1", {"own": 1})
    for number in range(2):
        message = take(router, name)
        try:
            WAYS[way](router, message, number, LookupError(f"part {number} is missing"))
        except LookupError:
            pass
        del message
    letter = letter_of(router, name)
    assert (letter.reason, letter.deliveries) == ("delivery_limit", 2)
    assert (letter.error_type, letter.error_text) == ("LookupError", "part 1 is missing")
    assert letter.message.headers["own"] == 1
    assert letter.message.headers["dead_letter_error_type"] == "LookupError"
    assert letter.message.headers["dead_letter_error_text"] == "part 1 is missing"


def test_a_listener_that_raises(router: anabranch.Router) -> None:
    def fail(message: anabranch.Message) -> None:
        raise LookupError(f"delivery {message.deliveries}")

    listener = router.queue("q").listen(fail, credit=5)
    router.queue("q").send(b"1")
    letter = letter_of(router)
    assert (letter.error_type, letter.error_text) == ("LookupError", "delivery 2")
    listener.close()


def test_of_a_subscription(router: anabranch.Router) -> None:
    topic = router.topic("t")
    topic.subscribe("well")
    ill = topic.subscribe("ill")
    topic.send(b"1")
    for number in range(2):
        message = ill.receive()
        assert message is not None
        message.release(reason=f"no. {number}")
    router.sweep()
    eventually(lambda: router.queue("dlq").depth())
    (letter,) = topic.dead_letters()
    assert (letter.error_type, letter.error_text, letter.subscription) == (None, "no. 1", ("", "ill"))


def test_an_earlier_one_counts_where_the_last_says_nothing(router: anabranch.Router) -> None:
    """And for what is rejected or expires after it."""
    queue = router.queue("q")
    queue.send(b"spent")
    take(router, "q").release(reason=ValueError("v"))
    take(router, "q").release()
    assert letter_of(router).error_text == "v"
    router.queue("dlq").purge()
    queue.send(b"rejected")
    take(router, "q").release(reason=ValueError("w"))
    take(router, "q").reject("in my words")
    letter = letter_of(router)
    assert (letter.reason, letter.error_type, letter.error_text) == ("in my words", "ValueError", "w")
    router.queue("dlq").purge()
    queue.send(b"expired", expires_in=0.2)
    take(router, "q").release(reason=ValueError("x"), delay=3600)
    eventually(lambda: router.sweep() or router.queue("dlq").depth())
    letter = letter_of(router)
    assert (letter.reason, letter.error_text) == ("expired", "x")


def test_without_a_reason_there_is_none(router: anabranch.Router) -> None:
    router.queue("q").send(b"1")
    for _ in range(2):
        take(router, "q").release()
    letter = letter_of(router)
    assert (letter.error_type, letter.error_text) == (None, None)
    assert not {"dead_letter_error_type", "dead_letter_error_text"} & {*letter.message.headers}
    router.queue("dlq").purge()
    router.queue("q").send(b"2")
    take(router, "q").reject()
    assert letter_of(router).error_text is None


def test_rejected_with_an_exception(router: anabranch.Router) -> None:
    router.queue("q").send(b"1")
    take(router, "q").reject(anabranch.DecodeError("no JSON", None))
    letter = letter_of(router)
    assert (letter.reason, letter.error_text) == ("rejected", "no JSON")
    assert letter.error_type == "anabranch.policies.errors.DecodeError"
    router.queue("dlq").purge()
    router.queue("q").send(b"1")
    router.settle(take(router, "q").token, Settlement.REJECT, ValueError("v"))
    assert letter_of(router).error_type == "ValueError"


def test_it_goes_along_back_and_is_replaced(one: anabranch.Router) -> None:
    """What was put back tells what it had failed for; what fails once more says that, and forgets what was before."""
    one.queue("q").send(b"1")
    take(one, "q").reject(ValueError("first"))
    assert one.requeue("dlq") == 1
    message = take(one, "q")
    assert message.headers["requeued_error_type"] == "ValueError"
    assert message.headers["requeued_error_text"] == "first"
    assert not [name for name in message.headers if name.startswith("dead_letter_")]
    message.reject("words")
    letter = letter_of(one)
    assert (letter.error_text, letter.message.headers["requeued_error_text"]) == (None, "first")
    one.requeue("dlq")
    assert not [name for name in take(one, "q").headers if "_error_" in name]


def test_a_dead_letter_that_fails_in_its_queue_tells_the_later_one(one: anabranch.Router) -> None:
    one.queue("q").send(b"1")
    take(one, "q").reject(ValueError("first"))
    for number in range(2):
        take(one, "dlq").release(reason=f"second {number}")
    one.sweep()
    eventually(lambda: one.queue("dlq").counts().ready)
    (letter,) = one.queue("q").dead_letters()
    assert (letter.error_type, letter.error_text, letter.deliveries) == (None, "second 1", 2)


@pytest.mark.parametrize("kind", ["journal", "sql", "onefile"])
def test_it_survives_restarts_and_moves(tmp_path: Path, kind: str) -> None:
    """Also if the router closes right behind the last delivery."""
    setup = config(tmp_path / "data", kind)
    with anabranch.open(setup) as router:
        for name in ("q", "far.q"):
            router.queue(name).send(b"1")
            for number in range(2):
                take(router, name).release(reason=ValueError(str(number)))
    with anabranch.open(setup) as router:
        assert [letter_of(router, name).error_text for name in ("q", "far.q")] == ["1", "1"]
    moved = anabranch.Config(tmp_path / "data", [store("new", ">", kind, **SPENT)])
    repartition(moved, setup)
    with anabranch.open(moved) as router:
        assert [letter_of(router, name).error_text for name in ("q", "far.q")] == ["1", "1"]


def test_a_process_that_is_killed_once_it_is_a_dead_letter(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, anabranch\n"
        "from pathlib import Path\n"
        "from tests.router.test_reasons import config, letter_of, take\n"
        "router = anabranch.open(config(Path(sys.argv[1]), 'journal'))\n"
        "router.queue('q').send(b'1')\n"
        "for number in range(2): take(router, 'q').release(reason=ValueError(str(number)))\n"
        "letter_of(router)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, told = run_program(program, str(tmp_path / "data"), seconds=PATIENCE)
    assert code == -signal.SIGKILL, told
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        assert letter_of(router).error_text == "1"


def test_one_that_would_be_too_large_with_it_goes_without(tmp_path: Path) -> None:
    setup = anabranch.Config(tmp_path / "data", [store("all", ">", "journal", message_bytes_max=400, **SPENT)])
    with anabranch.open(setup) as router:
        router.queue("q").send(b"x" * 200)
        for _ in range(2):
            take(router, "q").release(reason="y" * 300)
        letter = letter_of(router)
        assert (letter.reason, letter.error_text) == ("delivery_limit", None)


def test_long_ones_are_cut(one: anabranch.Router) -> None:
    one.queue("q").send(b"1")
    take(one, "q").reject("x" * 5000)
    assert letter_of(one).reason == "x" * 997 + "..."


@pytest.mark.parametrize("reason", [5, ValueError])
def test_what_is_no_reason(one: anabranch.Router, reason: Any) -> None:
    one.queue("q").send(b"1")
    message = take(one, "q")
    calls: list[Callable[[], object]] = [
        lambda: message.release(reason=reason), lambda: message.release_nowait(reason=reason),
        lambda: message.reject(reason), lambda: one.release([message], reason=reason),
        lambda: one.settle(message.token, Settlement.RELEASE, reason),
        lambda: one.transaction().release(message, reason=reason),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match="a reason is a str or an exception, not "):
            call()
    message.ack()


def test_ctrl_c_anywhere_where_it_is_given_back(one: anabranch.Router) -> None:
    """It is free, held still, or a dead letter, once; what is held can be given back again."""

    held: list[anabranch.Message] = []

    def prepare(at: int) -> Callable[[], object]:
        one.queue("q").send(b"%d" % at)
        take(one, "q").release()
        held[:] = [take(one, "q")]
        return lambda: held[0].release(reason=ValueError(str(at)))

    def check(at: int, where: str) -> None:
        with suppress(anabranch.UnknownMessageError):  # it was given back
            held[0].release(reason=ValueError(str(at)))
        eventually(lambda: one.sweep() or one.queue("q").depth() == 0)
        eventually(lambda: one.queue("dlq").depth() == 1)
        (letter,) = one.queue("dlq").receive_many(5)
        assert letter.body == b"%d" % at, where
        assert letter.headers["dead_letter_error_text"] == str(at), where
        letter.ack()

    assert everywhere(prepare, check) > 30
