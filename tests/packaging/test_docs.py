"""The pages that a newcomer reads: their links lead somewhere, their program runs, their rule numbers exist."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import anabranch
from anabranch.adapters.core.record import large as large
from anabranch.adapters.journal.index import checksums, index
from anabranch.adapters.wal import format as segments
from anabranch.policies.config import (
    Config,
    JournalOptions,
    MemoryOptions,
    SqlOptions,
    StoreConfig,
    StoreOptions,
    TransactionOptions,
    UsageOptions,
    loads,
)
from anabranch.router.placement import record as placement
from anabranch.router.placement.on_disk.in_force import KEPT

from .core_only import smallest_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_smallest_program_of_the_readme_runs(tmp_path: Path) -> None:
    program = smallest_program((ROOT / "README.md").read_text())
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_the_programs_of_the_page_on_transactions_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "transactions.md").read_text()
    programs = [
        block for block in re.findall(r"(?:^(?:    .*)?\n)+", page, re.MULTILINE) if "import anabranch" in block
    ]
    assert len(programs) == 2
    for number, program in enumerate(programs):
        (tmp_path / str(number)).mkdir()
        lines = "\n".join(line[4:] for line in program.splitlines())
        run = subprocess.run(
            [sys.executable, "-c", lines], capture_output=True, text=True, cwd=tmp_path / str(number), check=False
        )
        assert run.returncode == 0, run.stderr


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / name).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_what_is_called_python_compiles(page: Path) -> None:
    for program in blocks(page.name, "python"):
        compile(program, page.name, "exec")


def test_the_programs_of_the_page_on_messages_run_one_after_the_other(tmp_path: Path) -> None:
    programs = blocks("messages.md", "python")
    assert len(programs) >= 7
    options = anabranch.JournalOptions(max_deliveries=1, dead_letter="dlq")
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], journal=options)])
    with anabranch.open(config) as router:
        orders = router.queue("orders")
        orders.send_many([b"1", b"2", b"3"])  # for the page's last program, which puts dead letters back
        while (message := orders.receive()) is not None:
            message.release()
        router.sweep()
        names: dict[str, object] = {"router": router}
        for program in programs:
            exec(program, names)
        assert [s.subscription.name for s in router.topic("prices.eu").subscriptions()] == ["charts"]
        assert sorted(message.body for message in orders.browse()) == [b"1", b"2", b"3"]
        assert router.queue("jobs").depth() == 0
        assert [m.headers["dead_letter_reason"] for m in router.queue("dlq").browse()] == ["nobody makes three"]


def test_the_program_of_the_page_on_maps_runs(tmp_path: Path) -> None:
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"])])
    with anabranch.open(config) as router:
        router.queue("jobs").send(b"job-1")
        for program in blocks("maps.md", "python"):
            exec(program, {"router": router})
        assert router.queue("jobs").depth() == 0


def test_the_programs_of_the_page_on_configuration_run() -> None:
    for program in blocks("configuration.md", "python"):
        exec(program, {"__name__": "a_program"})


def test_the_configurations_of_the_pages_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEDGER_PASSWORD", "s3cret")
    found = blocks("configuration.md", "yaml")
    assert len(found) == 5
    ledger = re.search(r"^    stores:\n(?:    .*\n)+", (ROOT / "docs" / "sql.md").read_text(), re.MULTILINE)
    assert ledger is not None
    for text in (*found, f"    directory: data\n{ledger[0]}"):
        assert loads(text, tmp_path).stores


@pytest.mark.parametrize("name", ["format.md", "invariants.md"])
def test_a_page_of_bytes_and_rules_fits_the_screen(name: str) -> None:
    lines = (ROOT / "docs" / name).read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []


def test_the_page_of_formats_tells_the_version_of_each_file() -> None:
    rows = re.findall(r"^\| (`.*?) \| (\d+) \|", (ROOT / "docs" / "format.md").read_text(), re.MULTILINE)
    assert dict(rows) == {
        "`*.seg`, also of decisions and usage": str(segments.VERSION),
        "`watermark`, also of decisions and usage": str(segments.VERSION),
        "`index.mdb`": str(index.VERSION),
        "`index.sums`": str(checksums.MAGIC[-1]),
        "`placement.records`": str(placement.VERSION),
        "`*.body`, and a body in LARGE": str(large.VERSION),
    }


def test_the_page_says_of_each_option_what_a_change_does_to_a_directory_that_exists() -> None:
    """And those that leave something as it was are the ones that an open tells of."""
    section = (ROOT / "docs" / "configuration.md").read_text().split("a directory that exists:\n")[1].split("\n## ")[0]
    told: dict[str, dict[str, str]] = {}
    for line in section.splitlines():
        keys, _, effect = line.removeprefix("| ").rstrip(" |").partition(" | ")
        if effect == "a change":
            table = told.setdefault(keys, {})
        elif line.startswith("| "):
            for key in re.findall("`([a-z_]+)`", keys):
                assert key not in table, key
                table[key] = effect
    general = told["of every kind"]
    models: dict[str, type[BaseModel]] = {
        "of the file": Config, "of a store": StoreConfig, "of every kind": StoreOptions, "of a journal": JournalOptions,
        "of SQL": SqlOptions, "of memory": MemoryOptions, "of the usage log": UsageOptions,
        "of transactions": TransactionOptions,
    }  # fmt: skip
    for heading, model in models.items():
        apart = {"kind", "options"} if model is StoreConfig else general if model.__base__ is StoreOptions else ()
        assert set(told[heading]) == set(model.model_fields).difference(apart), heading
    texts = [text for table in told.values() for text in table.values()]
    assert all(re.match("Applied|Refused|From then on|Another|As the", text) for text in texts)
    kept = {
        f"usage.{key}" if heading == "of the usage log" else key
        for heading, table in told.items()
        for key, text in table.items()
        if text.startswith("From then on")
    }
    assert kept == set(KEPT)


@pytest.mark.parametrize(
    ("module", "names"),
    [("adapters/core/store_types.py", {"_Counts", "Counts", "StoreStats"}), ("router/router.py", {"RouterStats"})],
)
def test_each_field_that_counts_something_is_explained(module: str, names: set[str]) -> None:
    classes = [node for node in ast.parse((ROOT / module).read_text()).body if isinstance(node, ast.ClassDef)]
    missing = []
    for found in (one for one in classes if one.name in names):
        for field, following in itertools.pairwise([*found.body, ast.Pass()]):
            explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and not explained:
                missing.append(f"{found.name}.{ast.unparse(field.target)}")
    assert not missing
