"""Chromium as it is installed here, headless, for what has to be looked at in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
LEFT_OUT: Final = "NO CHROMIUM (apt-get install chromium): how the report looks in a browser stays unproved"
FLAGS: Final = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
"""Chromium has no sandbox for root, and opens nothing here but files of the tests' own."""


def binary() -> str | None:
    """Its path; None without one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def asks_for_one(item: pytest.Item) -> bool:
    """Whether a test needs it."""
    return "chromium" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all tests of a module. As long as it is there, an event loop runs in this thread, and no other
    test could run one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary(), args=list(FLAGS))
        yield browser
        browser.close()
