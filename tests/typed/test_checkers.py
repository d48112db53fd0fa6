"""What the type checkers say of a user's program (user.py), and that what they call right runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import anabranch

from . import user

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(user.__file__)
MADE_UP = """
import anabranch

anabranch.JournalOptions(sync="nevr")
anabranch.JournalOptions(sync="never")  # type: ignore
"""
"""A program with an error, and with a comment that silences none: what finds these two finds those of user.py."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT)


def mypy(programs: list[Path], scratch: Path) -> subprocess.CompletedProcess[str]:
    """As a user runs it, whose packages are followed for their types alone, and in a cache of its own: `make lint`
    looks into what they do as well, which takes half a minute."""
    options = ["--strict", "--follow-imports", "silent", "--cache-dir", ".mypy_cache/of-users"]
    return run("mypy", *options, *map(str, programs))


def pyright(programs: list[Path], scratch: Path) -> subprocess.CompletedProcess[str]:
    settings = {
        "include": [os.path.relpath(program, scratch) for program in programs],
        "extraPaths": [os.path.relpath(ROOT / "src", scratch)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (scratch / "pyrightconfig.json").write_text(json.dumps(settings))
    return run("pyright", "--project", str(scratch), "--pythonpath", sys.executable)


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_all_that_is_wrong_is_an_error_and_nothing_else(checker: object, tmp_path: Path) -> None:
    """Both programs in one run, and the errors of one."""
    assert callable(checker)
    made_up = tmp_path / "made_up.py"
    made_up.write_text(MADE_UP)
    told = checker([made_up, PROGRAM], tmp_path)
    assert told.returncode == 1, told.stdout + told.stderr
    assert "2 errors" in told.stdout, told.stdout
    assert len(re.findall(r"made_up\.py:[45]\b.* error:", told.stdout)) == 2, told.stdout


def test_what_is_right_runs(tmp_path: Path) -> None:
    with anabranch.open(user.options_as_they_run(tmp_path / "data")) as router:
        user.queues_as_they_run(router)
        user.topics_and_maps_as_they_run(router)
        router.queue("a").send(b"x")
        message = router.queue("a").receive()
        assert message is not None
        assert user.passed_on(router.queue("c.a"), router.queue("c.b", codec=user.MailCodec()), message) == b"x"
