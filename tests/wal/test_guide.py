"""The package's guide does what it says."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path

from anabranch.adapters import wal

LOG_ID = bytes(range(16))


def example() -> str:
    """The program in the package's docstring."""
    assert wal.__doc__ is not None
    found = re.search(r"\n\n(    from .*?)\n\n(?=\S)", wal.__doc__, re.DOTALL)
    assert found is not None
    return textwrap.dedent(found[1])


def run(program: str, path: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {"path": path, "log_id": LOG_ID})
    return printed.getvalue()


def test_the_example_runs_and_its_record_is_there_when_the_log_is_opened_again(tmp_path: Path) -> None:
    program = example()
    assert run(program, tmp_path / "log") == "on disk: [(1, b'hello', None)]\non disk: []\n"
    again = re.sub(r"create_log\(path.*\n", "\n", program)
    assert again != program
    assert run(again, tmp_path / "log").splitlines()[0] == "1 1 b'hello'"


def test_it_imports_nothing_of_messages_destinations_or_transactions() -> None:
    """Neither directly nor by the modules of ours that it stands on."""
    allowed = {"system"}
    found = set()
    for path in Path(wal.__file__).parent.glob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r"^from \.\.(\w+)", text, re.MULTILINE))
        assert set(re.findall(r"^from \.\.\.(\S+) import", text, re.MULTILINE)) <= {
            "policies.errors", "policies.config.durability", "policies.compaction",
        }  # fmt: skip
    assert found <= allowed
