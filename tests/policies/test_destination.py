"""Destinations: parsing, composites, and what is refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.policies.errors import DestinationError
from anabranch.policies.names.destination import NAME_BYTES_MAX, Destination, Kind

names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=50)


@given(st.sampled_from(Kind), names)
def test_text_and_back(kind: Kind, name: str) -> None:
    made = {Kind.QUEUE: Destination.queue, Kind.TOPIC: Destination.topic, Kind.MAP: Destination.map}
    destination = made[kind](name)
    assert destination == Destination(kind, name)
    assert Destination.restored(str(destination)) == destination
    assert pickle.loads(pickle.dumps(destination)) == destination
    assert hash(Destination.restored(str(destination))) == hash(destination)
    if "," not in name:
        assert Destination.parse(str(destination)) == destination


def test_a_bare_name_is_a_queue() -> None:
    assert Destination.parse("a.b") == Destination(Kind.QUEUE, "a.b")
    assert Destination.parse("topic://a.b") == Destination(Kind.TOPIC, "a.b") != Destination(Kind.QUEUE, "a.b")
    assert Destination.parse("queue://http://x").name == "http://x"


def test_a_name_may_hold_what_separates_where_it_is_parsed() -> None:
    assert Destination.queue("a,queue://b").name == "a,queue://b"
    assert Destination.topic(" a ") != Destination.queue(" a ")
    for wrong in ("", "a\0", "\udc80"):
        with pytest.raises(DestinationError):
            Destination.queue(wrong)


def test_composites_keep_their_order_and_each_part_once() -> None:
    parts = Destination.parse_composite("queue://b, topic://a,b,queue://a")
    assert [str(part) for part in parts] == ["queue://b", "topic://a", "queue://a"]
    assert Destination.parse_composite("x") == (Destination.parse("x"),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "needs a name"),
        ("queue://", "needs a name"),
        ("jms://a", "unknown scheme 'jms'"),
        ("a,b", "separates the parts of a composite"),
        ("a\0", "NUL"),
        ("a\udc80", "not valid unicode"),
        ("é" * (NAME_BYTES_MAX // 2 + 1), "at most 1024"),
    ],
)
def test_what_is_no_destination(text: str, says: str) -> None:
    with pytest.raises(DestinationError) as caught:
        Destination.parse(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "a,", ",a", "a,,b", "a,jms://b"])
def test_what_is_no_composite(text: str) -> None:
    with pytest.raises(DestinationError):
        Destination.parse_composite(text)


def test_the_longest_name() -> None:
    assert Destination.parse("x" * NAME_BYTES_MAX).name
