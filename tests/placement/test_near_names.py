"""Who waits where nothing can come is told: by an error if none can match, by one line of the log if none does yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch import Destination
from anabranch.policies.names.pattern import Pattern
from anabranch.router.placement.near_names import LOOKED_AT, near_name, near_pattern

from ..contract.disk import Parallel, eventually


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    memory = anabranch.MemoryOptions()
    stores = [
        anabranch.StoreConfig("orders", ["queue://orders.>", "topic://news.>"], memory=memory),
        anabranch.StoreConfig("tasks", ["tasks.*"], memory=memory),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        yield router


@pytest.fixture
def open_to_all(tmp_path: Path) -> Iterator[anabranch.Router]:
    stores = [anabranch.StoreConfig("all", [">"], memory=anabranch.MemoryOptions())]
    with anabranch.open(anabranch.Config(tmp_path / "all", stores)) as router:
        yield router


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("pattern", ["oders.>", "queue://oders.>", "news.*", "tasks.a.b.>", "tasks.*.b"])
def test_a_pattern_that_no_store_takes_is_an_error(router: anabranch.Router, pattern: str) -> None:
    for call in (
        lambda: router.receive(pattern),
        lambda: router.receive(pattern, None),
        lambda: list(router.consume(pattern)),
    ):
        says = r"no queue can match .* the closest patterns of stores are "
        with pytest.raises(anabranch.NoRouteError, match=says):
            call()
    assert router.receive("*.a") is None
    assert router.receive(">") is None


def test_what_is_known_still_can_be_received_though_no_store_takes_it_now(tmp_path: Path) -> None:
    both = [anabranch.StoreConfig("all", [">"]), anabranch.StoreConfig("old", ["old.>"])]
    config = anabranch.Config(tmp_path / "data", both)
    with anabranch.open(config) as router:
        router.queue("old.a").send(b"1")
        router._registry.routing.routes = anabranch.Config(
            tmp_path / "data", [anabranch.StoreConfig("all", ["new.>"])]
        ).routes()
        message = router.receive("old.*")
        assert message is not None
        assert message.body == b"1"


def test_a_pattern_that_nothing_matches_yet_is_told_once(
    open_to_all: anabranch.Router, said: Callable[[], list[str]]
) -> None:
    open_to_all.queue("orders.custom").send(b"1")
    open_to_all.queue("other").send(b"1")
    assert open_to_all.receive("oders.>") is None  # it does not wait: it may come again
    assert said() == []
    with Parallel(lambda: open_to_all.receive("oders.>", None)) as waiting:
        eventually(lambda: said())
        open_to_all.queue("oders.x").send(b"2")
        assert waiting.result().body == b"2"
    expected = "no queue matches oders.> yet, of which somebody waits for messages; did you mean orders.>?"
    open_to_all.delete("oders.x")
    with Parallel(lambda: next(open_to_all.consume("oders.>"))) as waiting:
        open_to_all.queue("oders.y").send(b"3")
        assert waiting.result().body == b"3"
    assert said() == [expected]


def test_a_pattern_that_matches_is_not_told(open_to_all: anabranch.Router, said: Callable[[], list[str]]) -> None:
    open_to_all.queue("orders.custom").send(b"1")
    assert open_to_all.receive("orders.>", None) is not None
    assert said() == []


WAYS: dict[str, Callable[[anabranch.Queue], object]] = {
    "receive": lambda queue: queue.receive(None),
    "receive_many": lambda queue: queue.receive_many(1, None),
    "consume": lambda queue: next(queue.consume()),
    "listen": lambda queue: queue.listen(print).close(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_slip_in_a_name_is_told(open_to_all: anabranch.Router, said: Callable[[], list[str]], way: str) -> None:
    open_to_all.queue("orders.eu").send(b"1")
    queue = open_to_all.queue("oders.eu")
    with Parallel(lambda: WAYS[way](queue)) as waiting:
        eventually(lambda: said())
        queue.send(b"1")
        waiting.result()
    assert said() == [
        "somebody waits for messages of queue://oders.eu, to which nothing was ever sent; did you mean queue://orders.eu?"
    ]


def test_other_names_are_names_of_their_own(open_to_all: anabranch.Router, said: Callable[[], list[str]]) -> None:
    """And one that is there is no slip; who comes back soon is told nothing."""
    known = ["orders.eu", "worker1", "mail.a", "pay", "tasks"]
    for name in known:
        open_to_all.queue(name).send(b"1")
    for name in ["orders.us", "worker2", "worker11", "mail.b", "ay", "task.a", "orders", "tasks"]:
        open_to_all.queue(name).listen(print).close()
    assert open_to_all.queue("taks").receive(0.001) is None
    assert said() == []


@pytest.mark.parametrize(
    ("name", "near"),
    [("oders", "orders"), ("orderss", "orders"), ("odrers", "orders"), ("orders.ue", None), ("ordexs", None),
     ("orders.custom.x", None), ("x.oders", "x.orders")],
)  # fmt: skip
def test_slips(name: str, near: str | None) -> None:
    known = [Destination.queue(text) for text in ("orders", "x.orders", "orders.eu")] + [Destination.topic("oder")]
    found = near_name(Destination.queue(name), known)
    assert (found.name if found is not None else None) == near


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("oders.>", "orders.>"), ("queue://oders.*", "queue://orders.*"), ("*.custm", "*.custom"),
     ("orders.custm.>", "orders.custom.>"), ("zebra.>", None), ("o?ders.eu", "o?ders.custom")],
)  # fmt: skip
def test_patterns(pattern: str, near: str | None) -> None:
    known = [Destination.queue("orders.custom"), Destination.queue("x"), Destination.topic("zebras.a")]
    assert near_pattern(Pattern.parse(pattern), known) == near


def test_among_many_a_slip_is_not_looked_for(open_to_all: anabranch.Router, said: Callable[[], list[str]]) -> None:
    for number in range(LOOKED_AT):
        open_to_all.queue(f"q.{number}").declare()
    open_to_all.queue("orders").declare()
    open_to_all.queue("oders").listen(print).close()
    assert said() == []
