"""Each feature of a store can be taken away: its folder, and its line among the features. The rest stands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "adapters/core/features"
LISTED = dict(re.findall(r"^from \.(\w+)\S* import (\w+)$", (FEATURES / "__init__.py").read_text(), re.MULTILINE))
PARTS = "parts"
REST = """
import importlib, io, pkgutil, sys, tempfile
import anabranch
for room in ("adapters.core", "adapters.journal", "adapters.memory", "adapters.sql", "router"):
    package = importlib.import_module(f"anabranch.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

def kinds():
    yield {"journal": anabranch.JournalOptions(max_messages=100)}
    yield {"memory": anabranch.MemoryOptions(max_messages=100)}
    yield {"sql": anabranch.SqlOptions(max_messages=100)}

def asked(what):
    try:
        what()
    except (anabranch.AnabranchError, TypeError) as error:
        return str(error)
    return None

refused = set()
for options in kinds():
    with tempfile.TemporaryDirectory() as path:
        config = anabranch.Config(f"{path}/data", [anabranch.StoreConfig("all", [">"], **options)])
        with anabranch.open(config) as router:
            queue = router.queue("q")
            queue.send_many([b"1", b"2"])
            queue.receive().release()
            with router.transaction() as transaction:
                message = queue.receive()
                transaction.ack(message)
                transaction.send("queue://p", message.body)
            assert router.queue("p").receive().body == b"1"
            for name, what in (
                ("keyed", lambda: router.map("m").put("k", b"v")),
                ("scheduled", lambda: queue.send(b"x", deliver_in=60)),
                ("groups", lambda: queue.send(b"x", group="g")),
                ("large", lambda: queue.send(io.BytesIO(b"x" * (2 << 20)))),
                ("transient", lambda: queue.send(b"x", persistent=False)),
            ):
                if asked(what) is not None:
                    refused.add(name)
print(*sorted(refused))
"""


def without(name: str, path: Path) -> Path:
    """A copy of the tree that lacks a feature."""
    for top in ("adapters", "policies", "router", "src"):
        # With what Python has compiled: it looks at the times of the sources, which are copied too.
        shutil.copytree(ROOT / top, path / top, ignore=shutil.ignore_patterns("*.nb?"), symlinks=True)
    features = path / "adapters/core/features"
    if (features / name).is_dir():
        shutil.rmtree(features / name)
    else:
        (features / f"{name}.py").unlink()
    page = features / "__init__.py"
    listed = LISTED[name]
    kept = [
        line
        for line in page.read_text().splitlines(keepends=True)
        if line.strip() != f"{listed}," and not line.startswith(f"from .{name}")
    ]
    page.write_text("".join(kept))
    return path / "src"


def test_every_feature_is_listed() -> None:
    there = {path.stem for path in FEATURES.iterdir() if not path.name.startswith("__")}
    assert there == LISTED.keys()


@pytest.mark.parametrize("name", sorted(LISTED.keys() - {PARTS}))
def test_the_rest_stands_without(name: str, tmp_path: Path) -> None:
    """What asks for the feature is refused, and nothing else is. Without quotas, or an outbox, nothing is asked for."""
    source = without(name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", REST], cwd=source, env={"PYTHONPATH": str(source)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ([name] if name in ("keyed", "scheduled", "groups", "large") else [])
