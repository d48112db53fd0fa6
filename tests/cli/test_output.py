"""The progress bar: what it says, and that its clock goes on."""

from __future__ import annotations

import time

import pytest
from rich.progress import Progress

from anabranch.router.cli import output
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
