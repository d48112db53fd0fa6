"""The report in a real browser: wide and narrow, light and dark, on paper, by keyboard, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from anabranch.policies.advisor import recommend
from anabranch.policies.advisor.advice.options import RecommendOptions

from .conftest import SEGMENT_BYTES, told, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = (
    "queue://" + "unbroken" * 24,
    "queue://<script>document.title='taken'</script>",
    "queue://\"'><img src=x onerror=document.title='taken'>",
    "queue://&amp;</title></style></svg><h1>",
    "queue://" + ".".join(["dotted"] * 28),
    "queue://ورشة.ألعاب.طلبات",
    "queue://חנות.צעצועים",
    "queue://玩具工場.注文.特別",
    "queue://left\u202eright",
    "topic://bell\x07.tab\there",
    "topic://{{ 7 * 7 }}.{% raw %}",
    "topic://plain",
)
UNSEEN = {"\u202e": "[U+202E]", "\x07": "[U+0007]", "\t": "[U+0009]"}
SHOWN = tuple("".join(UNSEEN.get(c, c) for c in name) for name in HOSTILE)
VIEWS = {"wide": (1200, "light"), "wide-dark": (1200, "dark"), "narrow": (360, "light"), "narrow-dark": (360, "dark")}

_CONTRAST = """() => {
  const light = c => { const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => { v /= 255;
      return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126*r + 0.7152*g + 0.0722*b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x+0.05) / (y+0.05); };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    const s = getComputedStyle(e);
    if (own && !e.closest('svg') && ratio(s.color, behind(e)) < 4.5) low.push(e.outerHTML.slice(0, 80));
    const ink = s.fill === 'none' ? s.stroke : s.fill;
    if (e.matches('svg path:not(.grid), .patterns .full') && !e.closest('clipPath') &&
        ratio(ink, behind(e.parentElement)) < 3) low.push(e.getAttribute('class'));
    if (e.matches('span.key:not(.writing)') && ratio(s.backgroundColor, behind(e.parentElement)) < 3)
      low.push(e.className);
  }
  return low;
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a trace whose names were chosen to break it; twelve destinations, the first two slow."""
    made = []
    for i in range(3000):
        name, now = HOSTILE[i % len(HOSTILE)], 1767571200.0 + i
        made.append((now, "send", name, str(i)))
        made.append((now + (40 * 60 if i % 12 < 2 else 5.5), "ack", name, str(i)))
    made.sort()
    table = told([step for _, *step in made], [at for at, *_ in made], body=900, size=60)
    options = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local", compact_live_percent=0)
    return written(recommend(table, options), tmp_path_factory.mktemp("report"))[3]


@pytest.fixture(scope="module", params=sorted(VIEWS))
def page(request: pytest.FixtureRequest, chromium: Browser, report: Path) -> Iterator[Page]:
    width, scheme = VIEWS[request.param]
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    told: list[str] = []
    page.on("console", lambda message: told.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on("request", lambda one: told.append(f"request: {one.url}"))
    page.goto(report.as_uri())
    page.told = told  # type: ignore[attr-defined]
    yield page
    context.close()


def test_it_asks_for_nothing_and_complains_of_nothing(page: Page, report: Path) -> None:
    assert page.told == [f"request: {report.as_uri()}"]  # type: ignore[attr-defined]
    assert page.title() == "Which destinations should share a store"
    assert page.locator("script, link[rel=stylesheet], iframe, object").count() == 0
    assert page.locator("img").count() == 0


def test_names_are_shown_as_they_are(page: Page) -> None:
    shown = set(page.locator("#destinations ~ .scroll tbody th bdi").all_text_contents())
    assert shown == set(SHOWN)


def test_the_page_itself_never_scrolls_sideways(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    wider = """() => [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg, .skip') &&
        e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(wider) == []
    assert page.evaluate("Math.min(...[...document.querySelectorAll('p, td, th, li, dd, dt')].map(e => "
                         "parseFloat(getComputedStyle(e).fontSize)))") >= 12  # fmt: skip


def test_contrast_is_enough(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.evaluate(_CONTRAST) == []


_SIGNS = """() => {
  const found = {}, note = (sign, thing) => (found[sign] ??= new Set()).add(thing);
  for (const e of document.querySelectorAll('.key')) {
    const pattern = e.querySelector('rect'), s = getComputedStyle(e);
    note(pattern ? pattern.getAttribute('fill') : e.matches('.writing') ? 'hollow' : s.backgroundColor,
         e.parentElement.querySelector('bdi[title]')?.title ?? e.parentElement.textContent.trim());
  }
  return Object.entries(found).map(([sign, things]) => [sign, [...things]]);
}"""


def test_one_sign_is_one_thing(page: Page) -> None:
    """A colour is one destination and a pattern one store, wherever on the page; and neither is anything else."""
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    signs = dict(page.evaluate(_SIGNS))
    assert all(len(things) == 1 for things in signs.values()), signs
    colours = {sign for sign in signs if sign.startswith("rgb")}
    assert len(colours) >= 2
    assert {signs[sign][0] for sign in colours} <= {*SHOWN, "other destinations"}
    patterns = {sign for sign in signs if sign.startswith("url")}
    assert len(patterns) >= 2
    assert not {signs[sign][0] for sign in patterns} & set(SHOWN)
    used = """[...document.querySelectorAll('body *')].flatMap(e => { const s = getComputedStyle(e);
        return [s.color, s.fill, s.stroke, s.backgroundColor, s.borderTopColor, s.outlineColor]; })"""
    grey = {color for color in page.evaluate(used) if color.startswith("rgb(") and not is_grey(color)}
    assert grey <= colours | {page.evaluate(_REST)}


_REST = """(() => { const e = document.body.appendChild(document.createElement('p'));
    e.style.color = 'var(--rest)'; const found = getComputedStyle(e).color; e.remove(); return found; })()"""


def is_grey(color: str) -> bool:
    """Whether it is ink, paper, or between: hardly any hue."""
    parts = [int(part) for part in re.findall(r"\d+", color)[:3]]
    return max(parts) - min(parts) <= 24


def test_no_table_is_cut_without_a_hint(page: Page) -> None:
    """On a narrow screen the rows of those that matter are stacked; what is still too wide has a mirror at its edge."""
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    wide = """[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"""
    assert page.evaluate(f"{wide}.filter(e => e.querySelector('.stack')).length") == 0
    assert page.evaluate(f"{wide}.every(e => getComputedStyle(e).backgroundImage.includes('gradient'))")
    hidden = """[...document.querySelectorAll('.stack td')].filter(e => getComputedStyle(e).display === 'flex' &&
        getComputedStyle(e, '::before').content === 'none').length"""
    assert page.evaluate(hidden) == 0, "a cell without its column's name"


def test_labels_of_an_axis_do_not_lie_on_one_another(page: Page) -> None:
    overlaps = """() => [...document.querySelectorAll('.x, .y')].flatMap(axis => {
        const boxes = [...axis.children].map(e => e.getBoundingClientRect());
        return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => a.left < b.right && b.left < a.right &&
            a.top < b.bottom && b.top < a.bottom).map(b => axis.textContent)); })"""
    assert page.evaluate(overlaps) == []


def test_it_can_be_read_without_seeing_it(page: Page) -> None:
    assert page.locator("html").get_attribute("lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(e => +e.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    pictures = page.get_by_role("img")
    assert pictures.count() == 5
    for picture in pictures.all():
        described = picture.evaluate("e => e.getAttribute('aria-labelledby').split(' ').map(i => "
                                     "document.getElementById(i).textContent)")  # fmt: skip
        assert len(described) == 2
        assert all(len(text) > 10 for text in described)
        assert picture.evaluate("e => !!e.closest('figure').querySelector('details.data table')")
    assert page.evaluate("[...document.querySelectorAll('th')].every(e => e.scope)")
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    targets = page.evaluate("[...document.querySelectorAll('a')].map(e => e.getAttribute('href').slice(1))")
    assert set(targets) <= set(ids)


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = false)")
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    wanted = page.evaluate("[...document.querySelectorAll('a, summary, .scroll')].filter(e => !e.closest('details') || "
                           "e.tagName === 'SUMMARY').length")  # fmt: skip
    focused = """(() => { const e = document.activeElement, box = e.getBoundingClientRect();
        return [e.tagName, e.className, box.right > 0 && getComputedStyle(e).outlineStyle]; })()"""
    reached = []
    for _ in range(wanted):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focused))
    assert [entry[:2] for entry in reached[:1]] == [["A", "skip"]]
    assert all(entry[2] == "solid" for entry in reached), "what has the focus is in view and shows it"
    assert sum(entry[0] == "SUMMARY" for entry in reached) == page.locator("summary").count()
    assert sum(entry[1] == "scroll" for entry in reached) == 4
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None


def test_on_paper(chromium: Browser, report: Path) -> None:
    page = chromium.new_page(color_scheme="dark", viewport={"width": 688, "height": 971})
    page.goto(report.as_uri())
    pdf = page.pdf(format="A4")
    assert 2 <= len(re.findall(rb"/Type\s*/Page[^s]", pdf)) <= 12
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a table is cut at the paper's edge"
    assert page.evaluate(_CONTRAST) == []
    assert not page.locator("nav").is_visible()
    page.close()


def test_javascript_is_not_needed(chromium: Browser, report: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.get_by_text(re.compile("^(Put|Leave) these 12 destinations")).is_visible()
    page.locator("details.data > summary").first.click()
    assert page.locator("details.data table").first.is_visible()
    context.close()
