"""The progress bar: what it says, and that its clock goes on. Errors of the disk as the user sees them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.progress import Progress

import anabranch
from anabranch.router.cli import operating, output
from anabranch.router.cli.app import app
from anabranch.router.cli.output import Work, working


def test_stages_are_named_and_the_clock_runs_to_the_end() -> None:
    progress = Progress(disable=True)
    work = Work(progress, "Recommending")
    (task,) = progress.tasks
    assert (task.description, task.total) == ("Recommending", None)
    for name, share in (("read", 1.0), ("start Spark", 0.0), ("summarise", 0.5), ("search", 1.0)):
        work.stage(name, share)
        assert task.description == f"Recommending: {name}"
        assert not task.finished
        assert (task.total is None) == (share == 0)
    work(7, 7)
    assert task.percentage > 99 and not task.finished


def test_labels_are_short() -> None:
    progress = Progress(disable=True)
    Work(progress, "Reading " + "long-" * 30)
    assert len(progress.tasks[0].description) == 32


def test_a_bar_does_not_flash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with working("Opening data"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "SHOWN_AFTER", 0.0)
    shown = ""
    with working("Opening data"):
        while "Opening data" not in shown:
            time.sleep(0.001)
            shown += capsys.readouterr().err


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the copy, and not of what is copied; and that of the file that is written."""
    monkeypatch.chdir(tmp_path)
    anabranch.open("data").close()

    def copied(*_: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device", "data/index.mdb", None, "/tmp/index.mdb")

    def exported(config: object, write: Callable[[bytes], object], told: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(operating, "verify", copied)
    monkeypatch.setattr(operating, "export", exported)
    said = CliRunner().invoke(app, ["verify", "data"]).stderr
    assert said == "Error: /tmp/index.mdb: No space left on device\n"
    said = CliRunner().invoke(app, ["export", "data", "--out", "x.jsonl"]).stderr
    assert said == "Error: x.jsonl: No space left on device\n"
