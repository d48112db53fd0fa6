"""Filters route exactly what they were made for, and are few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.policies.advisor.search.patterns import filters
from anabranch.policies.names.destination import Destination
from anabranch.policies.names.routes import RouteTable

SEGMENTS = st.sampled_from(["a", "b", "c", "orders", "eu-1", "", "*", ">", "?", "[x]", "ü", "a/b", "**", "\\", "://"])
NAMES = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join).filter(bool)
DESTINATIONS = st.builds(str.__add__, st.sampled_from(["queue://", "topic://"]), NAMES)


@pytest.mark.parametrize("catch_all", [None, 0])
@given(st.dictionaries(DESTINATIONS, st.integers(0, 3), min_size=1, max_size=25))
def test_every_destination_goes_to_its_store(catch_all: int | None, store_of: dict[str, int]) -> None:
    """A store that takes all others has no other filter: ActiveMQ knows none beside it; and the others' must leave it
    what is its own."""
    stores = [sorted(name for name, number in store_of.items() if number == n) for n in range(4)]
    found = filters(stores, catch_all)
    rest = [] if catch_all is not None else [(">", -1)]
    table = RouteTable([*rest, *((text, n) for n, texts in enumerate(found) for text in texts)])
    for name, number in store_of.items():
        match = table.route(Destination.parse(name))
        assert match is not None
        assert match.target == number
    for number, (names, texts) in enumerate(zip(stores, found, strict=True)):
        assert texts == [">"] if number == catch_all else len(texts) <= len(names)


@pytest.mark.parametrize(
    ("stores", "catch_all", "found"),
    [
        pytest.param(
            [["a.x", "b"], ["a.y", "a.z"], ["c.x", "c.y"]], 0, [[">"], ["a.y", "a.z"], ["c.>"]], id="beside-catch-all"
        ),
        pytest.param(
            [["telemetry.press", "telemetry.paint"], ["orders.custom"]],
            None,
            [["telemetry.>"], ["orders.custom"]],
            id="a-prefix-takes-its-like-along",
        ),
        pytest.param([["a.x", "a.y", "a.z", "a"], ["a.w"]], None, [["a.>"], ["a.w"]], id="an-exception-is-cheaper"),
        pytest.param(
            [["eu.new", "us.new"], ["eu.old", "us.old"]], None, [["*.new"], ["*.old"]], id="one-segment-is-merged"
        ),
        pytest.param([["a"], ["topic://a"]], None, [["a"], ["topic://a"]], id="kinds-are-kept-apart"),
        pytest.param([["a", "b.c"]], None, [["a", "b.c"]], id="the-root-is-left-to-the-catch-all"),
    ],
)
def test_filters_are_few(stores: list[list[str]], catch_all: int | None, found: list[list[str]]) -> None:
    """Names and filters without a scheme are a queue's."""

    def whole(texts: list[str]) -> list[str]:
        return [text if "://" in text or text == ">" else f"queue://{text}" for text in texts]

    assert filters([*map(whole, stores)], catch_all) == [*map(whole, found)]


def test_no_merge_that_takes_anothers() -> None:
    stores = [["queue://eu.new", "queue://us.new"], ["queue://eu.old", "queue://us.old", "queue://cn.new"]]
    found = filters(stores)
    assert "queue://cn.new" in found[1]
    assert found[0] == ["queue://*.new"]


def test_deep_names_and_many_of_them() -> None:
    deep = "queue://" + ".".join("x" * 500)
    stores = [[f"queue://shop{i}.orders.new" for i in range(0, 1000, 2)] + [deep]]
    stores.append([f"queue://shop{i}.orders.new" for i in range(1, 1000, 2)])
    found = filters(stores)
    assert min(len(texts) for texts in found) <= 2


def test_thousands_of_destinations_in_hundreds_of_stores() -> None:
    """What is tried for each store must not ask all destinations, or this takes minutes."""
    stores: list[list[str]] = [[] for _ in range(400)]
    for i in range(4000):
        stores[i * 7919 % 400].append(f"queue://site.device{i}")
        stores[i % 20].append(f"queue://shop{i // 20}.desk.{i % 20}")
    found = filters(stores)
    assert sum(map(len, found)) == 20 + 1 + 3990
    assert [texts for texts in found[:20] if any("*" in text for text in texts)] == found[:20]
