"""`anabranch calibrate`: how long a disk takes to sync, and what follows from that."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch.router.cli.app import app
from anabranch.router.offline import calibration
from anabranch.router.offline.calibration import calibrate


def test_it_measures_and_leaves_nothing(tmp_path: Path) -> None:
    found = calibrate(tmp_path, 50)
    assert found.writes == 50 and 0 < found.median <= found.p99 <= found.longest
    assert list(tmp_path.iterdir()) == []
    shown = CliRunner().invoke(app, ["calibrate", str(tmp_path), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["configuration"].startswith("journal: {sync: ")
    text = CliRunner().invoke(app, ["calibrate", str(tmp_path)])
    assert "For a store here:" in text.stdout
    missing = CliRunner().invoke(app, ["calibrate", str(tmp_path / "nowhere")])
    assert missing.exit_code == 2 and "is no directory" in missing.output


def test_a_slow_disk_is_given_another_policy_and_one_too_quick_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda fd: time.sleep(0.003))
    slow = calibrate(tmp_path, 20)
    assert slow.configuration == "journal: {sync: periodic}" and slow.doubt is None
    monkeypatch.setattr(calibration, "TOO_SHORT", 60.0)
    quick = calibrate(tmp_path, 20)
    assert quick.doubt is not None and "in which no disk keeps anything" in quick.doubt
    told = CliRunner().invoke(app, ["calibrate", str(tmp_path)]).stdout
    assert "A power failure costs nothing, if the disk keeps what it says that it has synced: see the warning" in told
