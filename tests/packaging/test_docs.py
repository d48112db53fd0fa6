"""The pages: their links lead somewhere, their tables tell all there is. What they show test_blocks.py runs."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

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
)
from anabranch.router.placement import record as placement
from anabranch.router.placement.on_disk.in_force import KEPT

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


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
