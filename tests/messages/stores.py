"""The configurations that tests of messages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anabranch


def config(directory: Path, to: str = "one", **options: Any) -> anabranch.Config:
    """Everything is in a journal, or in `two`, a SQLite store."""
    one, two = ([">"], ["none"]) if to == "one" else (["none"], [">"])
    return anabranch.Config(
        directory / "data",
        [
            anabranch.StoreConfig("one", one, journal=anabranch.JournalOptions(**options)),
            anabranch.StoreConfig("two", two, sql=anabranch.SqlOptions()),
        ],
    )
