"""The campaign of delivering.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anabranch

from ..shares import Share
from .delivering import MOST, config, verify


def test_nothing_is_delivered_too_often_whatever_is_killed(tmp_path: Path, share: Share) -> None:
    share.run("tests.crash.delivering", "--directory", str(tmp_path), every=1200)
    assert "0 complaints" in share.counts[0]


def test_it_sees_what_is_wrong(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        router.queue("q").send(b"1")
    marks = tmp_path / "marks"
    marks.write_text("sent 1\nsent 2\nacked 1\n" + "delivered 1\n" * (MOST + 1))
    wrong = Counter(complaint.partition(" ")[0] for complaint in verify(tmp_path / "data", "journal", marks))
    assert wrong == {"message": 4}
