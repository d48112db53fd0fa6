"""The numbers of rules: each means one thing, is written down once, and is cited by code and by a test."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text()
INVARIANTS = re.findall(r"^(\d+)\. \*\*", PAGE, re.MULTILINE)
RULES = re.findall(r"^- \*\*([A-Z]\d+)\b", PAGE, re.MULTILINE)
LISTS = re.findall(r"^\| ([A-Z]\d+)(?:(?: to|,) ([A-Z]\d+))? \|.*\| `([^`]+)` \|$", PAGE, re.MULTILINE)
"""Those of one module: the first, the last, where they stand."""
CODE = sorted(
    path
    for folder in ("adapters", "policies", "router", "src/anabranch/hosts")
    for path in (ROOT / folder).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

NUMBER = r"[A-Z]\d{1,2}"
CITED = re.compile(rf"(?:\b[Rr]ules?\s+|\(){NUMBER}(?:(?:,? and|,| to)\s+(?:rules? )?{NUMBER})*(?=\W)")


def numbers(first: str, last: str) -> list[str]:
    return [f"{first[0]}{number}" for number in range(int(first[1:]), int(last[1:]) + 1)]


def cited(text: str) -> set[str]:
    """The rules that a text names: "rule J4", "(rules G1, J1 to J3)", "(X6)"."""
    found: set[str] = set()
    for match in CITED.finditer(text):
        for first, last in re.findall(rf"({NUMBER})(?: to ({NUMBER}))?", match[0]):
            found.update(numbers(first, last or first))
    return found


def cited_invariants(text: str) -> set[str]:
    found: set[str] = set()
    for first, last, others in re.findall(r"\b[Ii]nvariants? (\d+)(?: to (\d+))?((?:(?:,| and) \d+)*)", text):
        found.update(str(number) for number in range(int(first), int(last or first) + 1))
        found.update(re.findall(r"\d+", others))
    return found


def test_no_two_rules_share_a_number() -> None:
    defined = Counter(RULES)
    for path in CODE:
        defined.update(re.findall(rf"^ *({NUMBER})  \S", path.read_text(), re.MULTILINE))
    assert [number for number, count in defined.items() if count > 1] == []
    assert [str(number) for number in range(1, len(INVARIANTS) + 1)] == INVARIANTS


def test_the_page_says_where_the_rules_of_one_module_stand() -> None:
    told = {path: numbers(first, last or first) for first, last, path in LISTS}
    found = {str(p.relative_to(ROOT)): re.findall(rf"^ *({NUMBER})  \S", p.read_text(), re.MULTILINE) for p in CODE}
    assert told == {path: some for path, some in found.items() if some}


def test_what_is_cited_is_written_down() -> None:
    rules = {*RULES, *(number for first, last, _ in LISTS for number in numbers(first, last or first))}
    wrong = {}
    for path in [*CODE, *TESTS, *PAGES]:
        text = path.read_text()
        if missing := (cited(text) - rules) | (cited_invariants(text) - set(INVARIANTS)):
            wrong[str(path.relative_to(ROOT))] = missing
    assert wrong == {}


def test_each_rule_of_the_page_is_cited_by_code_and_by_a_test() -> None:
    for paths in (CODE, TESTS):
        texts = [path.read_text() for path in paths]
        assert set(RULES) <= set().union(*map(cited, texts))
        assert set(INVARIANTS) <= set().union(*map(cited_invariants, texts))
