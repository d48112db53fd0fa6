"""A matcher that shares nothing with the real one: plain recursion over characters, straight from the grammar."""

from __future__ import annotations


def matches(pattern: str, name: str) -> bool:
    """Tell whether the pattern, without a scheme, matches the name."""
    return _segments(pattern.split("."), name.split("."))


def _segments(patterns: list[str], names: list[str]) -> bool:
    if patterns == [">"]:
        return True
    if not patterns or not names:
        return not patterns and not names
    return _characters(patterns[0], names[0]) and _segments(patterns[1:], names[1:])


def _characters(pattern: str, text: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(_characters(pattern[1:], text[skip:]) for skip in range(len(text) + 1))
    if not text:
        return False
    if pattern[0] == "?":
        return _characters(pattern[1:], text[1:])
    if pattern[0] == "[":
        end = 2 if pattern[1] != "!" else 3
        while pattern[end] != "]":
            end += 1
        return _in_brackets(pattern[1:end], text[0]) and _characters(pattern[end + 1 :], text[1:])
    return pattern[0] == text[0] and _characters(pattern[1:], text[1:])


def _in_brackets(members: str, char: str) -> bool:
    if members.startswith("!"):
        return not _in_brackets_plain(members[1:], char)
    return _in_brackets_plain(members, char)


def _in_brackets_plain(members: str, char: str) -> bool:
    while members:
        if len(members) >= 3 and members[1] == "-":
            if members[0] <= char <= members[2]:
                return True
            members = members[3:]
        else:
            if members[0] == char:
                return True
            members = members[1:]
    return False
