"""A trie of patterns finds what trying each of them finds, in the order of precedence; and forgets what is removed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.policies.names.destination import Destination
from anabranch.policies.names.pattern import Pattern
from anabranch.policies.names.routes import RouteTable
from anabranch.policies.names.trie import PatternTrie

SEGMENTS = ["a", "b", "", "ab", "*", "a*", "*b", "?", "a?", "[ab]", "[!a]*", "[*]", "aab"]
NAMED = st.lists(st.sampled_from(["a", "b", "", "ab", "aab", "*", ">", "ba"]), min_size=1, max_size=4)
NAMES = st.builds(str.__add__, st.sampled_from(["queue://", "topic://"]), NAMED.map(".".join).filter(bool))
TEXTS = st.builds(
    lambda scheme, segments, rest: scheme + ".".join([*segments, *rest]),
    st.sampled_from(["", "queue://", "topic://"]),
    st.lists(st.sampled_from(SEGMENTS), max_size=3),
    st.sampled_from([[], [">"]]),
)
PATTERNS = TEXTS.filter(lambda text: bool(text) and not text.endswith("//")).map(Pattern.parse)


@given(st.lists(PATTERNS, max_size=30, unique=True), st.lists(NAMES, min_size=1, max_size=10), st.data())
def test_it_finds_what_trying_each_finds(patterns: list[Pattern], names: list[str], data: st.DataObject) -> None:
    trie: PatternTrie[str] = PatternTrie()
    for pattern in patterns:
        trie.add(pattern, pattern.text)
    kept = set(data.draw(st.lists(st.sampled_from(patterns), unique=True))) if patterns else set()
    for left in (patterns, [pattern for pattern in patterns if pattern in kept]):
        for name in map(Destination.parse, names):
            matching = sorted((pattern for pattern in left if pattern.matches(name)), key=lambda pattern: pattern._key)
            assert list(trie.matching(name)) == [(pattern, pattern.text) for pattern in matching]
        for pattern in patterns:
            if left is patterns and pattern not in kept:
                trie.remove(pattern)
    for pattern in kept:
        trie.remove(pattern)
    assert trie.empty


def test_what_is_there_already_and_what_is_not() -> None:
    trie: PatternTrie[int] = PatternTrie()
    trie.add(Pattern.parse("a.[xy].>"), 1)
    with pytest.raises(ValueError, match="there already"):
        trie.add(Pattern.parse("a.[yx].>"), 2)
    for missing in ("a.[xy]", "a", "queue://a.[xy].>", "a.[xz].>"):
        with pytest.raises(KeyError):
            trie.remove(Pattern.parse(missing))
    trie.remove(Pattern.parse("a.[yx].>"))
    assert trie.empty


def test_a_name_of_a_thousand_segments() -> None:
    deep = ".".join("x" * 500)
    table = RouteTable([(f"{deep}.>", "below"), (f"{deep}.*", "one"), (">", "all"), ("*.>", "any")])
    matches = table.matches(Destination.parse(f"{deep}.y"))
    assert [match.target for match in matches] == ["one", "below", "any", "all"]
