"""Very many, or very large, in bounded memory: in each kind of store. No timing is asserted."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from ..children import run_module
from ..shares import PATIENCE, Share
from .scale import KINDS

ROOT = Path(__file__).resolve().parents[2]


def measured(scenario: str, kind: str, n: int, directory: Path) -> dict[str, float]:
    options = ["--kind", kind, "--n", str(n), "--dir", str(directory)]
    code, told = run_module("tests.bench.scale", scenario, *options, seconds=6 * PATIENCE)
    assert code == 0, told
    found: dict[str, float] = json.loads(told)
    return found


@pytest.mark.parametrize(
    ("scenario", "few", "few_mib", "many", "mib"),
    [
        ("large", 48, 24, 5120, 64),
        ("delays", 2000, 64, 1_000_000, 128),
        ("maps", 500, 64, 1_000_000, 128),
        ("stores", 40, 512, 2000, 512),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_bounded_memory(
    tmp_path: Path, share: Share, scenario: str, few: int, few_mib: int, many: int, mib: int, kind: str
) -> None:
    if not share.whole:
        found = measured(scenario, kind, few, tmp_path)
    else:  # on a disk: there may be no room for that in memory
        (ROOT / "build").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="scale-", dir=ROOT / "build") as directory:
            count = many // 10 if kind == "sql" and scenario != "large" else many
            found = measured(scenario, kind, count, Path(directory))
    share.counts.append(", ".join(f"{name} {value}" for name, value in found.items()))
    if kind != "memory" or scenario == "large":  # else its messages are there
        assert found["grown_mib"] < (mib if share.whole else few_mib)
