"""Patterns: what they match, against an independent matcher; the order of precedence; the words that explain it."""

from __future__ import annotations

import itertools
import random
import time
import timeit

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from anabranch.policies.errors import ConfigError, DestinationError
from anabranch.policies.names.destination import Destination, Kind
from anabranch.policies.names.pattern import Pattern, escape
from anabranch.policies.names.routes import RouteTable

from . import reference

TRICKY = "ab.*?[]!-/\\>^ &|~\n:é🦫"
texts = st.text(alphabet=TRICKY, min_size=1, max_size=10)
characters = st.one_of(st.sampled_from(TRICKY), st.characters(exclude_characters=",\0", codec="utf-8"))
names = st.text(alphabet=characters, min_size=1, max_size=12)
CLASSES = ["[ab]", "[!a]", "[+-9]", "[]a]", "[A-z]", "[\ud700-\ue000]"]
pieces = st.sampled_from(["a", "b", "/", "\\", "]", "-", "^", "*", "?", "[*]", "[[]", " ", "\n", *CLASSES])
segments = st.one_of(st.just("*"), st.lists(pieces, max_size=4).map("".join))


@st.composite
def patterns(draw: st.DrawFn) -> str:
    parts = draw(st.lists(segments, min_size=1, max_size=4))
    if draw(st.booleans()):
        parts.append(">")
    text = draw(st.sampled_from(["", "queue://", "topic://"])) + ".".join(parts)
    assume("**" not in text and not text.endswith("//"))
    name = text.removeprefix("queue://").removeprefix("topic://")
    assume(name == name.strip())
    return text or ">"


@st.composite
def names_like(draw: st.DrawFn, pattern: str) -> str:
    """Draw a name that the pattern may well match."""
    parts = []
    for segment in pattern.partition("://")[2].split(".") if "://" in pattern else pattern.split("."):
        if segment == ">":
            parts += draw(st.lists(st.sampled_from(["", "a", ">"]), max_size=3))
            continue
        part = segment
        for wild in (*CLASSES, "?"):
            while wild in part:
                part = part.replace(wild, draw(st.sampled_from("ab/\\]-.0^")), 1)
        part = part.replace("[*]", "\1").replace("[[]", "\2").replace("*", draw(st.sampled_from(["", "a", "/b", "\n"])))
        parts.append(part.replace("\1", "*").replace("\2", "["))
    return ".".join(parts)


def queue(name: str) -> Destination:
    return Destination(Kind.QUEUE, name)


@given(patterns(), st.data())
def test_matches_what_an_independent_matcher_matches(text: str, data: st.DataObject) -> None:
    pattern = Pattern.parse(text)
    name = data.draw(st.one_of(names_like(text), names))
    assume(name)
    bare = text.partition("://")[2] if "://" in text else text
    for kind in Kind:
        wanted = kind in pattern.kinds and reference.matches(bare, name)
        assert pattern.matches(Destination(kind, name)) == wanted


@given(texts, names)
def test_any_text_is_a_pattern_that_matches_as_documented_or_is_refused(text: str, name: str) -> None:
    try:
        pattern = Pattern.parse(text)
    except DestinationError:
        return
    if "://" not in text:
        assert pattern.matches(queue(name)) == reference.matches(text, name)


@given(names, names)
def test_escape_matches_exactly_the_name(name: str, other: str) -> None:
    pattern = Pattern.parse(escape(name))
    assert pattern.exact
    assert pattern.matches(queue(name)) and pattern.matches(Destination(Kind.TOPIC, name))
    assert pattern.matches(queue(other)) == (name == other)
    assert Pattern.parse("queue://" + escape(name)).matches(queue(name))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("a.>", "a a.b a.b.c a. a.>", "b A a-b ab .a"),
        (">", "a a.b . .. >", ""),
        ("a.*", "a.b a. a.*", "a a.b.c b.a a.b."),
        ("*", "a *", "a.b ."),
        ("a.*.>", "a.b a.b.c a.", "a b.a"),
        ("orders.eu-*", "orders.eu- orders.eu-west/1", "orders.eu orders.eu-1.x ORDERS.eu-1"),
        ("a?c", "abc a/c a\\c", "ac a.c abbc"),
        ("a[b/]c", "abc a/c", "a\\c adc"),
        ("a\\b", "a\\b", "a/b"),
        ("a/b", "a/b", "a\\b a"),
        ("a", "a", "a.b a/b A"),
        ("a..b", "a..b", "a.b a.x.b"),
        ("[>]", ">", "a"),
        ("a>b", "a>b", "a.b"),
        ("[a-c]x", "ax bx cx", "dx -x"),
        ("[ac-]x", "-x ax", "bx"),
        ("a]", "a]", "a"),
        ("queue://http://x", "http://x", "http:\\\\x"),
    ],
)
def test_examples(pattern: str, yes: str, no: str) -> None:
    parsed = Pattern.parse(pattern)
    for name in yes.split():
        assert parsed.matches(queue(name)), name
    for name in no.split():
        assert not parsed.matches(queue(name)), name


@pytest.mark.parametrize("name", ["a b", "line\nbreak.\n", "naïve.ü", "..", "/", "a/../b", "\\..\\", " ", "\ue02f"])
def test_odd_names_are_told_apart(name: str) -> None:
    routes = RouteTable([(escape(name), "it"), (">", "rest")])
    assert routes.route(queue(name)).target == "it"  # type: ignore[union-attr]
    for other in (name + "\n", "\n" + name, name.replace("/", "\\") + "x", name + "."):
        assert routes.route(queue(other)).target == "rest"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("queue://", "is empty"),
        ("jms://a", "unknown scheme 'jms'"),
        ("a.>.b", "a literal one is [>]"),
        ("a.**", "** is no wildcard"),
        ("a[b", "a literal [ is written [[]"),
        ("a[b.c]", "a . always separates segments"),
        ("[z-a]", "write a-z"),
        ("a,b", "comma"),
        ("a\0", "NUL"),
        ("a\udc80", "not valid unicode"),
    ],
)
def test_what_is_no_pattern(text: str, says: str) -> None:
    with pytest.raises(DestinationError) as caught:
        Pattern.parse(text)
    assert says in str(caught.value)


def test_kinds() -> None:
    assert Pattern.parse("queue://a").kinds == {Kind.QUEUE}
    assert Pattern.parse("topic://a").kinds == {Kind.TOPIC}
    assert Pattern.parse("map://a").kinds == {Kind.MAP}
    assert Pattern.parse("a").kinds == {Kind.QUEUE, Kind.TOPIC, Kind.MAP}


# Precedence (invariant 5) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stronger", "weaker"),
    [
        ("a.b", "a.b", "queue://a.*"),
        ("a.b", "a.b*", "a.*"),
        ("a.b", "a.*", "a.>"),
        ("a.b", "a.*", "*.b"),
        ("a.b", "a.>", "*.b"),
        ("a.eu-1", "a.eu-*", "a.eu*"),
        ("a.eu-1", "a.*-1", "a.[e]*"),
        ("a.bc", "a.*c", "a.b*"),
        ("a.b", "queue://a.*", "a.*"),
        ("a.b", "a.*", "queue://a.>"),
        ("a.b", "a.*", "a.*.>"),
        ("a.b", "a.b", "a.b.>"),
        ("a.b", "queue://a.b", "a.b"),
        ("a.b", "queue://>", ">"),
    ],
)
def test_the_stronger_pattern_wins_wherever_it_stands(name: str, stronger: str, weaker: str) -> None:
    for order in itertools.permutations([stronger, weaker]):
        winner, loser = RouteTable([(text, None) for text in order]).matches(queue(name))
        assert (winner.pattern.text, loser.pattern.text) == (stronger, weaker)


@given(st.lists(patterns(), min_size=3, max_size=3))
def test_precedence_is_a_strict_total_order(three: list[str]) -> None:
    parsed = [Pattern.parse(text) for text in three]
    for a, b, c in itertools.permutations(parsed):
        assert (a == b) == (a._key == b._key)
        assert [a._key < b._key, a == b, b._key < a._key].count(True) == 1
        if a._key < b._key and b._key < c._key:
            assert a._key < c._key


@given(st.lists(patterns(), min_size=1, max_size=8, unique_by=Pattern.parse), st.data())
def test_the_route_does_not_depend_on_the_order_of_the_file(given_order: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(given_order).flatmap(names_like))
    assume(name)
    shuffled = data.draw(st.permutations(given_order))
    results = [RouteTable([(text, text) for text in order]).matches(queue(name)) for order in (given_order, shuffled)]
    assert results[0] == results[1]
    assert {match.target for match in results[0]} == {t for t in given_order if Pattern.parse(t).matches(queue(name))}


def test_reasons() -> None:
    texts_ = ["queue://a.b", "a.b", "a.b*", "a.*b", "a.*?", "a.*", "a.>", "queue://>", ">", "a.?*"]
    matches = RouteTable([(text, text) for text in texts_]).matches(queue("a.b"))
    assert {match.target: match.reason for match in matches} == {
        "queue://a.b": "wins over 'a.b': it is for queues alone, the other for all kinds",
        "a.b": "loses to 'queue://a.b': it is for queues alone, the other for all kinds",
        "a.*b": "loses to 'a.b': an exact name beats every wildcard",
        "a.b*": "loses to 'a.*b': in segment 2, '*b' comes before 'b*' in text order",
        "a.*?": "loses to 'a.b*': in segment 2, 'b*' has more literal characters than '*?' (1 to 0)",
        "a.?*": "loses to 'a.*?': in segment 2, '*?' comes before '?*' in text order",
        "a.*": "loses to 'a.?*': in segment 2, the glob '?*' beats the wildcard '*'",
        "a.>": "loses to 'a.*': in segment 2, the wildcard '*' beats the wildcard '>'",
        "queue://>": "loses to 'a.>': in segment 1, the literal 'a' beats the wildcard '>'",
        ">": "loses to 'queue://>': it is for queues alone, the other for all kinds",
    }
    assert RouteTable([("a", 1)]).matches(queue("a"))[0].reason == "the only pattern that matches"
    deeper = RouteTable([("a.*", 1), ("a.*.>", 2)]).matches(queue("a.b"))
    assert deeper[0].reason == "wins over 'a.*.>': it ends where the other goes on with '>'"


# The table -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"), [("a", "a"), ("a", "[a]"), ("x[ab]", "x[ba]"), ("[a-b]c", "[ab]c"), ("a.>", "a.>")]
)
def test_one_pattern_twice_is_refused(one: str, other: str) -> None:
    with pytest.raises(ConfigError, match="is the same as"):
        RouteTable([(one, 1), (other, 2)])


def test_no_route() -> None:
    routes = RouteTable([("queue://orders.custom", 1), ("topic://ticks.*", 2), ("telemetry.>", 3), ("x", 4)])
    lost = queue("order.custom")
    assert routes.route(lost) is None
    assert routes.matches(lost) == []
    assert routes.nearest(lost)[0] == "queue://orders.custom"
    assert len(routes.nearest(lost)) == 3
    assert RouteTable[int]([]).nearest(lost) == []


def test_routing_a_known_destination_takes_under_a_microsecond() -> None:
    generator = random.Random(1)
    routes = RouteTable([(f"s{n}.{generator.choice(['*', '>', 'x*', 'y'])}", n) for n in range(200)])
    destination = queue("s7.x")
    routes.route(destination)
    timer = time.process_time  # whatever else the machine does
    best = min(timeit.repeat(lambda: routes.route(destination), timer=timer, number=10_000, repeat=5)) / 10_000
    assert best < 5e-6


@pytest.mark.parametrize("text", ["queue:/x", "queue//z", "topic:x", "Queue:a.>"])
def test_a_mistyped_scheme(text: str) -> None:
    for parse in (Pattern.parse, Destination.parse):
        with pytest.raises(DestinationError, match="two slashes"):
            parse(text)
    assert Pattern.parse(escape(text.removesuffix(">"))).matches(queue(text.removesuffix(">")))


@pytest.mark.parametrize("text", [" a", "a ", " queue://a", "queue:// a", "\ta"])
def test_blanks_at_the_ends(text: str) -> None:
    with pytest.raises(DestinationError, match=r"blank|scheme"):
        Pattern.parse(text)
    assert Pattern.parse(escape(text)).matches(queue(text))


def test_a_destination_with_blanks_at_its_ends() -> None:
    for text in (" a", "a ", " queue://a"):
        with pytest.raises(DestinationError, match="begins or ends with a blank"):
            Destination.parse(text)
