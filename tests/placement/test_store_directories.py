"""Directory names of destinations: none shared, none escaping, none told apart by case alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.policies.names.destination import NAME_BYTES_MAX, Destination, Kind
from anabranch.router.placement.on_disk.directories import directory_name

characters = st.one_of(
    st.characters(codec="utf-8", exclude_characters="\0"), st.sampled_from("aAbB.%~/\\_- \u0130\u0131\ufb01")
)
names = st.text(characters, min_size=1, max_size=NAME_BYTES_MAX // 4)
destinations = st.builds(Destination, st.sampled_from(Kind), names)


@given(destinations)
@example(Destination(Kind.QUEUE, ".."))
@example(Destination(Kind.QUEUE, "."))
@example(Destination(Kind.TOPIC, "a/../../b"))
@example(Destination(Kind.QUEUE, "x" * NAME_BYTES_MAX))
@example(Destination(Kind.QUEUE, "CON"))
def test_a_name_is_one_safe_directory(destination: Destination) -> None:
    name = directory_name(destination)
    assert 0 < len(name.encode()) <= 120
    assert name == name.lower() == name.casefold()
    assert name.isascii()
    assert not set(name) & set('/\\\0 :*?"<>|')
    assert name.startswith(("queue.", "topic.", "map."))
    assert name == directory_name(Destination(destination.kind, destination.name))


@settings(max_examples=500)
@given(destinations, destinations)
@example(Destination(Kind.QUEUE, "a"), Destination(Kind.TOPIC, "a"))
@example(Destination(Kind.QUEUE, "a"), Destination(Kind.QUEUE, "A"))
@example(Destination(Kind.QUEUE, "%41"), Destination(Kind.QUEUE, "A"))
@example(Destination(Kind.QUEUE, "é"), Destination(Kind.QUEUE, "e\u0301"))
@example(Destination(Kind.QUEUE, "x" * 500 + "1"), Destination(Kind.QUEUE, "x" * 500 + "2"))
@example(Destination(Kind.QUEUE, "x" * 114), Destination(Kind.QUEUE, "x" * 115))
def test_two_destinations_never_share_one(one: Destination, two: Destination) -> None:
    assert (directory_name(one) == directory_name(two)) == (one == two)


def test_names_that_differ_little_never_share_one() -> None:
    chance = random.Random(3)
    made: dict[str, str] = {}
    for _ in range(20_000):
        name = "".join(chance.choices("aA%~.4é1", k=chance.choice((1, 2, 3, 60, 200))))
        found = directory_name(Destination(Kind.QUEUE, name))
        assert made.setdefault(found, name) == name


@pytest.mark.parametrize("length", range(100, 130))
def test_the_cut_keeps_the_length(length: int) -> None:
    name = directory_name(Destination(Kind.QUEUE, "x" * length))
    assert len(name) == min(length + len("queue."), 120)
    assert ("~" in name) == (length + len("queue.") > 120)
