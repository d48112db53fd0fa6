"""One listener of many queues, with one credit, whatever stores they are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.policies.errors import ClosedError, DestinationError, NoRouteError

from ..contract.disk import PATIENCE, eventually
from .test_pattern_consumers import KINDS, config, fill
from .test_pattern_consumers import journals as journals  # a fixture


@pytest.fixture(params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        yield router


class Ear:
    """What is called with messages."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[Message] = SimpleQueue()

    def next(self) -> Message:
        return self.heard.get(timeout=PATIENCE)

    def bodies(self, count: int) -> list[str]:
        return [str(self.next().body, "ascii") for _ in range(count)]


def test_one_credit_for_all(router: anabranch.Router) -> None:
    """Each queue has its turn, in its own order, also those that come later."""
    names = ["a.a", "a.b", "each.c"]
    fill(router, names, 3)
    ear = Ear()
    listener = router.listen(["a.>", "each.c"], ear.heard.put, credit=6)
    first = [ear.next() for _ in range(6)]
    assert Counter(str(one.body, "ascii") for one in first) == {f"{name} {n}": 1 for name in names for n in range(2)}
    assert listener.withdraw_credit(1) == 0 and ear.heard.empty()
    fill(router, ["b", "a.new"], 1)  # one of another name, and one that comes
    listener.add_credit(5)
    assert sorted(ear.bodies(4)) == ["a.a 2", "a.b 2", "a.new 0", "each.c 2"]
    router.queue("each.c").send(b"x")
    assert ear.bodies(1) == ["x"]
    router.queue("a.a").send(b"y")
    assert (listener.withdraw_credit(1), router.queue("a.a").counts().ready) == (0, 1)
    first[0].release()
    listener.add_credit(2)
    assert sorted(ear.bodies(2)) == sorted(["y", str(first[0].body, "ascii")])
    listener.add_credit(3)
    assert listener.withdraw_credit(2) == 2
    eventually(lambda: not listener.close())
    router.queue("a.a").send(b"z")
    assert router.queue("b").depth() == router.queue("a.a").counts().ready == 1 and ear.heard.empty()


def test_begun_without_waiting(router: anabranch.Router) -> None:
    ear = Ear()
    many = router.listen_nowait("a.>", ear.heard.put, credit=1).result(PATIENCE)
    router.queue("a.a").send(b"1")
    assert ear.bodies(1) == ["1"]
    one = router.queue("each.b").listen_nowait(ear.heard.put, lease=60).result(PATIENCE)
    router.queue("each.b").send(b"2")
    assert ear.bodies(1) == ["2"]
    subscription = router.topic("t").subscribe("s")
    of_topic = subscription.listen_nowait(ear.heard.put).result(PATIENCE)
    router.topic("t").send(b"3")
    assert ear.bodies(1) == ["3"]
    for listener in (many, one, of_topic):
        eventually(lambda: not listener.close())  # noqa: B023
    assert isinstance(router.listen_nowait([], print).exception(PATIENCE), ValueError)
    assert isinstance(router.queue("a.a").listen_nowait(print, -1).exception(PATIENCE), ValueError)


def test_queues_by_their_objects_and_codecs(router: anabranch.Router) -> None:
    odd = router.queue(anabranch.Destination.queue("Smith, J.*"))
    values = router.queue("values", codec="json")
    ear: SimpleQueue[Any] = SimpleQueue()
    router.listen([odd, values, "plain"], lambda message: ear.put(message.body), credit=9)
    odd.send(b"1")
    assert ear.get(timeout=PATIENCE) == b"1"
    values.send({"n": 2})
    assert ear.get(timeout=PATIENCE) == {"n": 2}
    router.queue("plain").send(b"3")
    router.queue("Smith, J.x".replace(", ", "_")).send(b"none of them")
    assert ear.get(timeout=PATIENCE) == b"3"
    coded: SimpleQueue[Any] = SimpleQueue()
    router.listen("v.*", lambda message: coded.put(message.body), codec="json")
    router.queue("v.a", codec="json").send([4])
    assert coded.get(timeout=PATIENCE) == [4] and ear.empty()


def test_a_callback_that_raises_gives_its_message_back(router: anabranch.Router) -> None:
    fill(router, ["a.a"], 1)
    heard: list[int] = []

    def refuse(message: Message) -> None:
        heard.append(message.deliveries)
        raise ValueError("it is not for me")

    listener = router.listen("a.*", refuse, credit=2)
    eventually(lambda: heard == [1, 2])
    listener.close()
    eventually(lambda: router.queue("a.a").counts() == anabranch.Counts(1, 0))


def test_it_hears_of_the_end_of_its_router(router: anabranch.Router) -> None:
    ended: SimpleQueue[Exception] = SimpleQueue()
    idle = router.listen("a.>", print, 0, on_end=ended.put)
    router.listen(["a.a"], print, 3, on_end=ended.put)
    router.listen("a.>", print, 3, on_end=ended.put).close()
    router.close()
    assert {type(ended.get(timeout=PATIENCE)) for _ in range(2)} == {ClosedError}
    idle.add_credit(1)
    assert (idle.withdraw_credit(1), idle.close(), ended.empty()) == (0, False, True)
    with pytest.raises(ClosedError):
        router.listen("a.>", print)


def test_what_is_sent_and_withdrawn_at_once_is_heard_once(router: anabranch.Router) -> None:
    """No message is leased with credit that was taken back."""
    heard: list[Message] = []
    listener = router.listen("a.*", heard.append, credit=0)
    given = 0
    for n in range(30):
        listener.add_credit(2)
        router.queue(f"a.{n % 3}").send(b"x")
        given += 2 - listener.withdraw_credit(n % 4)
    given -= listener.withdraw_credit(1000)
    eventually(lambda: len(heard) == given, lambda: (len(heard), given))
    assert sum(router.queue(f"a.{n}").counts().leased for n in range(3)) == given


def test_stores_that_are_closed_for_being_idle(journals: anabranch.Router) -> None:
    """It keeps none of them open, and hears of what is sent there."""
    ear = Ear()
    journals.listen("each.*", ear.heard.put, credit=100)
    for n in range(3):
        journals.queue(f"each.{n}").send(b"1")
        with ear.next() as message:
            assert message.body == b"1"
        journals.reopen(next(name for name in journals.stats().stores if name.endswith(f"each.{n}")))
        journals.queue(f"each.{n}").send(b"2")
        assert ear.next().body == b"2"


@pytest.mark.parametrize(
    ("queues", "error", "text"),
    [
        ([], ValueError, "no queue was named"),
        ("topic://t", DestinationError, "names topics"),
        ("map://*", DestinationError, "names maps"),
        ([3], TypeError, "a destination is given as text"),
        ("queue:/a", DestinationError, "queue://"),
    ],
)
def test_what_names_no_queues(journals: anabranch.Router, queues: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        journals.listen(queues, print)


def test_what_no_queue_can_match(tmp_path: Path) -> None:
    store = anabranch.StoreConfig("one", ["orders.>"], memory={})
    with anabranch.open(anabranch.Config(tmp_path, [store])) as router, pytest.raises(NoRouteError, match="of that"):
        router.listen(["orders.a", "invoices.*"], print)
