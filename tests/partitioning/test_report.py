"""The report as a file: what it says, what it escapes, how large it gets. In a browser: test_report_page.py."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.policies.advisor import (
    RecommendOptions,
    StorePlan,
    UsageEvent,
    from_events,
    generate,
    recommend,
    render_html,
)
from anabranch.policies.advisor.advice.answer import headline, moves, peak_bytes
from anabranch.policies.advisor.advice.figures import build_figures
from anabranch.policies.advisor.model.cost_model import CostModel, canonical
from anabranch.policies.advisor.model.evaluate import SetCosts
from anabranch.policies.advisor.report import svg
from anabranch.policies.advisor.report.pictures import share_scale
from anabranch.policies.advisor.report.scale import human_duration
from anabranch.policies.advisor.search.search import Constraints
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.statistics.sizes import Model
from anabranch.policies.advisor.statistics.summary import summarise
from anabranch.policies.text import human_bytes

from .conftest import SEGMENT_BYTES, in_force, shape, written

OPTIONS = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local")
_VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


class Reader(HTMLParser):
    """The text, and whether what was opened was closed in its order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"line {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def events(names: list[str], messages: int, slow: int) -> list[UsageEvent]:
    """Each name in turn; every `slow`th message waits for most of the trace."""
    made = []
    for i in range(messages):
        name, at = names[i % len(names)], 1767571200.0 + i
        made.append((at, "send", name, str(i)))
        if i % (11 * slow):
            made.append((at + (messages / 2 if i % slow == 0 else 3.5), "ack", name, str(i)))
    return [
        UsageEvent(seq, at, op, name, key, 60, None, 1, None, 700 if op == "send" else None)
        for seq, (at, op, name, key) in enumerate(sorted(made))
    ]


def test_it_says_what_the_summary_says(toymaker: pa.Table, tmp_path: Path) -> None:
    answer = recommend(toymaker, RecommendOptions(model="kahadb", segment_bytes=512 << 10, engine="local"))
    path = written(answer, tmp_path / "out")[3]
    page = path.read_text()
    assert page == render_html(answer, str(tmp_path / "out"))
    text = Reader(page).text
    for piece in (
        headline(answer),
        f"disk at the peak, all-together{human_bytes(peak_bytes(answer.candidate('all-together')))}",
        f"disk at the peak, recommended{human_bytes(peak_bytes(answer.recommended))}",
        "transactions over several stores0",
        f"anabranch mkahadb --from-config {tmp_path}/out/stores.yaml",
        '<filteredKahaDB queue="dlq,orders.custom">',
        "61 sends whose last ack the trace lacks",
        "ActiveMQ's KahaDB, with its ack rule",
        "At most 3.7 MB on disk at one moment",
        "All 51 journal files are drawn.",
        "queue://orders.custom",
        "queue://telemetry.press",
        "MiB-hours",
    ):
        assert piece in text, piece
    for candidate in answer.candidates:
        assert candidate.name in text
    assert len(page) < 60_000


def test_figures_are_those_of_journals_as_they_are_configured() -> None:
    """With compaction, by default, or without; of files that are kept it speaks where nothing is compacted."""
    table = generate(shape("never-acked"))
    names = sorted(set(table.column("destination").to_pylist()))
    for percent in (50, 0):
        current = in_force({"all": names}, compact_live_percent=percent)
        answer = recommend(table, replace(OPTIONS, current=current))
        now, best = answer.candidate("current"), answer.recommended
        text = Reader(render_html(answer)).text
        assert f"disk at the peak, current{human_bytes(now.peak_bytes)}" in text
        assert "disk without the free files that pool_files keeps" in text
        copied = f"copied by compaction, {human_bytes(now.copied_bytes)} current{human_bytes(best.copied_bytes)}"
        assert (copied in text) is (percent > 0) is (now.copied_bytes > 0)
        assert ("compact_live_percent is 0" in text) is (percent == 0)
        assert ("Journal files, and who keeps them" in text) is (percent == 0)
        assert "Not worked out" not in text


def test_what_changes_stands_under_the_first_sentence() -> None:
    table = generate(shape("slow-among-fast"))
    answer = recommend(table, replace(OPTIONS, current=in_force({"all": [">"]})))
    text = re.sub(r" ?queue", "queue", Reader(render_html(answer, "advice")).text)
    command = f"anabranch repartition --config advice/stores.yaml {answer.directory}"
    assert text.index(headline(answer)) < text.index(command) < text.index("What goes where: only this changes")
    moved = moves(answer)
    assert moved
    for move in moved:
        assert move.before == "all" != move.store
        assert f"{move.store}{', '.join(move.destinations)}" in text.replace(" queue", "queue").replace(
            ",queue", ", queue"
        )
    assert "all in one store" not in text, "it has a name, and one sign"
    stay = [s for s in answer.recommended.stores if s.name == "all"]
    assert {d for m in moved for d in m.destinations} == {one.name for one in answer.destinations} - set(
        stay[0].destinations
    )


def test_by_order_alone_there_are_no_hours(toymaker: pa.Table) -> None:
    text = Reader(render_html(recommend(toymaker, replace(OPTIONS, segment_bytes=512 << 10, clock="seq")))).text
    assert "operations since the trace began" in text
    assert "iB-h" not in text
    assert "half are acked within" in text
    assert "2026-" not in text


def test_what_is_compared_with_is_the_current_configuration() -> None:
    table = generate(shape("bursts"))
    names = sorted(set(table.column("destination").to_pylist()))
    current = in_force({f"s{i}": [name] for i, name in enumerate(names)})
    answer = recommend(table, replace(OPTIONS, current=current))
    text = Reader(render_html(answer)).text
    assert "disk at the peak, current" in text
    assert "Disk over time, current" in text
    assert "Disk over time, all-together" not in text


@pytest.mark.parametrize("model", ["anabranch", "kahadb"])
def test_odd_traces(model: Model) -> None:
    """Nothing but acks, nothing but sends, everything at two moments, messages larger than a file."""
    acks = [UsageEvent(i, 1.0 + i, "ack", f"queue://q{i % 2}", str(i), 80) for i in range(50)]
    sends = [UsageEvent(i, 1.0 + i, "send", f"queue://q{i % 2}", str(i), 900, body_size=800) for i in range(300)]
    moments = [event._replace(ts=5.0 if event.seq < 200 else 6.0) for event in sends]
    large = [event._replace(size=1 << 20, body_size=1 << 20) for event in sends[:40]]
    for rows, text in ((acks, "without any send"), (sends, "fewer than half"), (moments, "1 s"), (large, "41.9 MB")):
        answer = recommend(from_events(rows), replace(OPTIONS, model=model))
        page = render_html(answer)
        check_alone(page)
        assert text in Reader(page).text
        assert "nan" not in page
        assert "inf" not in Reader(page).text.replace("information", "")


def test_nothing_to_gain() -> None:
    for names in (["queue://a", "queue://b"], ["queue://only"]):
        answer = recommend(from_events(events(names, 300, 301)), OPTIONS)
        text = Reader(render_html(answer)).text
        assert text.count("Keep one store: ") == 1
        assert "Disk over time, all-together" not in text, "where it is the recommended one, it is shown once"
        assert "Disk over time, recommended" in text


def test_a_cap_that_cannot_be_kept_comes_first() -> None:
    answer = recommend(generate(shape("never-acked")), replace(OPTIONS, peak_bytes_max=1000))
    text = Reader(render_html(answer)).text
    assert text.index("The cap on the peak, 1.0 KB, cannot be kept") < text.index(headline(answer))


def test_what_was_not_worked_out_is_said(toymaker: pa.Table) -> None:
    answer = recommend(toymaker, replace(OPTIONS, segment_bytes=512 << 10, compact_live_percent=0))
    assert answer.figures is not None
    assert "Not worked out" not in Reader(render_html(answer)).text
    pictures = tuple(replace(picture, bars=None) for picture in answer.figures.pictures)
    lives_alone = replace(answer.figures, pictures=pictures, stores=(), listed=(), by_stores=())
    for figures, drawn, missing in (
        (lives_alone, 2, "who keeps which journal files; each destination"),
        (None, 0, "disk over time; who keeps which journal files; each destination"),
    ):
        reader = Reader(render_html(replace(answer, figures=figures)))
        assert f"Not worked out in this run: {missing}." in reader.text
        assert "Stores recommended" in reader.text
        assert sum(tag == "svg" and attrs.get("role") == "img" for tag, attrs in reader.elements) == drawn
        targets = {str(attrs["href"])[1:] for tag, attrs in reader.elements if tag == "a"}
        assert targets <= {attrs.get("id") for _, attrs in reader.elements}


def check_alone(page: str) -> None:
    """Nothing in it comes from elsewhere, and nothing in it runs."""
    for tag, attrs in Reader(page).elements:
        assert tag not in {"script", "iframe", "object", "embed", "form", "img", "base"}
        assert not any(name.startswith("on") for name in attrs)
        for name in ("href", "src"):
            assert attrs.get(name, "#") == "data:," or str(attrs.get(name, "#")).startswith("#")
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page


def test_names_cannot_break_out_of_it() -> None:
    names = [
        "queue://</bdi></table><script>alert(1)</script>",
        'queue://" onload="alert(1)',
        "queue://' style='position:fixed",
        "queue://{{ config }}{% for x in y %}",
        "queue://</style></svg></title><img src=http://example.com/x>",
        "topic://javascript:alert(1)//" + "z" * 170,
    ]
    answer = recommend(from_events(events(names, 1200, 6)), OPTIONS)
    page = render_html(answer)
    check_alone(page)
    text = Reader(page).text
    assert all(name in text for name in names)
    by_hand = replace(answer.recommended.stores[0], name="<b>&\"'", filters=("<i>",), sync="<u>")
    best = replace(answer.recommended, stores=(by_hand, *answer.recommended.stores[1:]))
    edited = replace(answer, recommended=best, figures=None)
    assert "<b>&\"'" in Reader(render_html(edited)).text
    check_alone(render_html(edited))


def test_many_destinations_are_told_of_in_bounds() -> None:
    """1,000 destinations in 100 stores, with names of 200 characters."""
    names = [f"queue://{'plant.line.machine.' * 9}{i:03}.{'x' * 17}" for i in range(1000)]
    small = recommend(from_events(events(names[:3], 300, 4)), OPTIONS)
    operations = build(from_events(events(names, 4000, 4)))
    stores = canonical([range(i, 1000, 100) for i in range(100)])
    called = [f"store{number}" for number in range(100)]
    costs = CostModel(SEGMENT_BYTES)
    figures = build_figures(
        operations,
        SetCosts(summarise(operations, SEGMENT_BYTES), costs),
        Constraints(),
        costs,
        {"all-together": (canonical([range(1000)]), ["all"]), "recommended": (stores, called)},
    )
    plans = tuple(
        StorePlan(name, (members := tuple(names[d] for d in ds)), members, "always", 0.1, 1 << 20, 1 << 20, 0)
        for name, ds in zip(called, stores, strict=True)
    )
    page = render_html(replace(small, figures=figures, recommended=replace(small.recommended, stores=plans)))
    check_alone(page)
    text = Reader(page).text
    assert len(page.encode()) < 1_000_000
    assert "800 more destinations write less." in text
    assert "40 more stores are in recommendation.json and stores.yaml." in text
    assert "94 other stores" in text


def test_durations() -> None:
    for seconds, text in (
        (0, "0 s"), (0.0123, "12.3 ms"), (4.5, "4.5 s"), (59.99, "60 s"), (61, "1 min 1 s"), (3599.9, "1 h"),
        (7800, "2 h 10 min"), (86400, "24 h"), (180000, "2 d 2 h"), (1e9, "11,574 d"),
    ):  # fmt: skip
        assert human_duration(seconds) == text


def test_marks_of_axes() -> None:
    for top in (1e-6, 0.3, 1, 7, 99, 12345, 8.1e15):
        marks = svg.round_marks(top)
        assert marks[0] == 0
        assert marks[-1] >= top * (1 - 1e-9)
        assert 2 <= len(marks) <= 6
        times = svg.time_marks(top)
        assert times[0] == 0
        assert 2 <= len(times) <= 8
        assert times[-1] <= top


def test_a_cost_far_above_the_others_leaves_them_apart() -> None:
    levels, heights = share_scale([1.5, 1.0, 2.0])
    assert levels == [(0.0, "0 %"), (0.25, "50 %"), (0.5, "100 %"), (0.75, "150 %"), (1.0, "200 %")]
    assert heights[2.0] == 1.0
    levels, heights = share_scale([0.99, 1.0, 2.0, 3600.0])
    assert [text for _, text in levels] == [
        "0.1 times",
        "1 times",
        "10 times",
        "100 times",
        "1,000 times",
        "10,000 times",
    ]
    assert heights[1.0] == pytest.approx(0.2)
    assert 0.99 > heights[3600.0] > heights[2.0] + 0.5


def test_a_staircase_is_the_area_between_its_edges() -> None:
    assert svg.steps([0, 0, 0, 0], [10, 10, 30, 0], 30) == "M0 200H500V0H750V300H1000V300H0Z"
    assert svg.steps([5, 5], [5, 5], 10) == ""
