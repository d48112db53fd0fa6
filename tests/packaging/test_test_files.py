"""Each module of the core, of the log and of transactions has a test file of its name: where one changes the one, one
finds the other."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS_OF = {"adapters/core": "core", "adapters/wal": "wal", "router/transactions": "router"}
MODULES = [
    (path.stem, tests) for package, tests in TESTS_OF.items() for path in sorted((ROOT / package).glob("[!_]*.py"))
]


@pytest.mark.parametrize(("module", "tests"), MODULES)
def test_a_module_has_a_test_file_of_its_name(module: str, tests: str) -> None:
    """Or of its plural, where the tests are of many of them."""
    named = [ROOT / "tests" / tests / f"test_{name}.py" for name in (module, f"{module}s")]
    found = [path for path in named if path.exists()]
    assert found, f"write {named[0].relative_to(ROOT)}"
    assert any("def test_" in path.read_text() for path in found)


def test_there_are_modules() -> None:
    assert {tests for _, tests in MODULES} == set(TESTS_OF.values())
