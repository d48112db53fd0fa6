"""Filters route exactly what they were made for, and are few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.policies.advisor.search.patterns import filters
from anabranch.policies.names.destination import Destination
from anabranch.policies.names.routes import RouteTable

SEGMENTS = st.sampled_from(["a", "b", "c", "orders", "eu-1", "", "*", ">", "?", "[x]", "ü", "a/b", "**", "\\", "://"])
NAMES = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join).filter(bool)
DESTINATIONS = st.builds(str.__add__, st.sampled_from(["queue://", "topic://"]), NAMES)


@given(st.dictionaries(DESTINATIONS, st.integers(0, 3), min_size=1, max_size=25))
def test_every_destination_goes_to_its_store(store_of: dict[str, int]) -> None:
    stores = [sorted(name for name, number in store_of.items() if number == n) for n in range(4)]
    found = filters(stores)
    table = RouteTable([(">", -1), *((text, n) for n, texts in enumerate(found) for text in texts)])
    for name, number in store_of.items():
        match = table.route(Destination.parse(name))
        assert match is not None
        assert match.target == number
    for names, texts in zip(stores, found, strict=True):
        assert len(texts) <= len(names)


@given(st.dictionaries(DESTINATIONS, st.integers(0, 3), min_size=1, max_size=25))
def test_a_store_that_takes_all_others_has_no_other_filter(store_of: dict[str, int]) -> None:
    """ActiveMQ knows no filter beside it; and the others' must leave it what is its own."""
    stores = [sorted(name for name, number in store_of.items() if number == n) for n in range(4)]
    found = filters(stores, catch_all=0)
    assert found[0] == [">"]
    table = RouteTable([(text, n) for n, texts in enumerate(found) for text in texts])
    for name, number in store_of.items():
        match = table.route(Destination.parse(name))
        assert match is not None
        assert match.target == number
    for names, texts in list(zip(stores, found, strict=True))[1:]:
        assert len(texts) <= len(names)


def test_what_the_catch_all_holds_is_in_nobodys_way() -> None:
    stores = [["queue://a.x", "queue://b"], ["queue://a.y", "queue://a.z"], ["queue://c.x", "queue://c.y"]]
    assert filters(stores, catch_all=0) == [[">"], ["queue://a.y", "queue://a.z"], ["queue://c.>"]]


def test_a_prefix_takes_its_like_along() -> None:
    stores = [["queue://telemetry.press", "queue://telemetry.paint"], ["queue://orders.custom"]]
    assert filters(stores) == [["queue://telemetry.>"], ["queue://orders.custom"]]


def test_an_exception_costs_less_than_a_list() -> None:
    stores = [["queue://a.x", "queue://a.y", "queue://a.z", "queue://a"], ["queue://a.w"]]
    assert filters(stores) == [["queue://a.>"], ["queue://a.w"]]


def test_what_differs_in_one_segment_is_merged() -> None:
    stores = [["queue://eu.new", "queue://us.new"], ["queue://eu.old", "queue://us.old"]]
    assert filters(stores) == [["queue://*.new"], ["queue://*.old"]]


def test_no_merge_that_takes_anothers() -> None:
    stores = [["queue://eu.new", "queue://us.new"], ["queue://eu.old", "queue://us.old", "queue://cn.new"]]
    found = filters(stores)
    assert "queue://cn.new" in found[1]
    assert found[0] == ["queue://*.new"]


def test_kinds_are_kept_apart() -> None:
    assert filters([["queue://a"], ["topic://a"]]) == [["queue://a"], ["topic://a"]]


def test_everything_in_one_store_leaves_the_root_to_the_catch_all() -> None:
    assert filters([["queue://a", "queue://b.c"]]) == [["queue://a", "queue://b.c"]]


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
