"""The placement record and the decision log in a directory of their own (invariant 6)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

import anabranch
from anabranch.adapters.system import files
from anabranch.router.offline.repartition import repartition
from anabranch.router.placement import bindings
from anabranch.router.upkeep.explanation import explain


def config(tmp_path: Path, elsewhere: bool = True, **options: object) -> anabranch.Config:
    stores = [anabranch.StoreConfig("a", ["a.>"]), anabranch.StoreConfig("rest", [">"])]
    where = tmp_path / "safe" if elsewhere else None
    return anabranch.Config(tmp_path / "data", stores, bindings_directory=where, **options)  # type: ignore[arg-type]


def use(config: anabranch.Config) -> int:
    """Send to both stores at once, receive nothing; how many there are."""
    with anabranch.open(config) as router:
        with router.transaction() as tx:
            tx.send("a.x", b"1")
            tx.send("b.x", b"1")
        return router.queue("a.x").depth()


def test_they_are_there_and_nowhere_else(tmp_path: Path) -> None:
    use(config(tmp_path))
    assert sorted(path.name for path in (tmp_path / "safe").iterdir()) == [
        "bindings.id",
        "decisions",
        "placement.records",
    ]
    assert not (tmp_path / "data/placement.records").exists()
    assert not (tmp_path / "data/decisions").exists()
    assert use(config(tmp_path)) == 2


def test_commands_find_them(tmp_path: Path) -> None:
    use(config(tmp_path))
    found = explain(tmp_path / "data")
    assert {store.name for store in found.stores} == {"a", "rest"}
    assert found.decisions is not None
    assert found.decisions.count
    one = anabranch.Config(
        tmp_path / "data", [anabranch.StoreConfig("rest", [">"])], bindings_directory=tmp_path / "safe"
    )
    repartition(one)
    with anabranch.open(one) as router:
        assert router.queue("a.x").depth() == 1


def unmounted(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "safe")


def empty(tmp_path: Path) -> None:
    unmounted(tmp_path)
    (tmp_path / "safe").mkdir()


def anothers(tmp_path: Path) -> None:
    unmounted(tmp_path)
    (tmp_path / "other").mkdir()
    use(config(tmp_path / "other"))
    (tmp_path / "other/safe").rename(tmp_path / "safe")


def damaged(tmp_path: Path) -> None:
    mark = tmp_path / "safe/bindings.id"
    first, *rest = mark.read_bytes()
    mark.write_bytes(bytes([first ^ 0x80, *rest]))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (unmounted, "is missing"),
        (empty, "is empty"),
        (anothers, "is another one's"),
        (damaged, "is another one's"),
    ],
)
def test_what_is_not_theirs_is_never_an_empty_start(tmp_path: Path, spoil: Callable[[Path], None], says: str) -> None:
    use(config(tmp_path))
    spoil(tmp_path)
    with pytest.raises(anabranch.PlacementError, match=says):
        anabranch.open(config(tmp_path))
    assert not (tmp_path / "safe/placement.records").exists() or spoil in (anothers, damaged)


def test_a_configuration_without_them_is_refused(tmp_path: Path) -> None:
    use(config(tmp_path))
    with pytest.raises(anabranch.PlacementError, match=r"bindings_directory: .*safe"):
        anabranch.open(config(tmp_path, elsewhere=False))


def test_those_of_another_data_directory_are_refused(tmp_path: Path) -> None:
    use(config(tmp_path))
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(anabranch.PlacementError, match="of another data directory"):
        anabranch.open(config(tmp_path))


def test_they_are_moved_by_hand(tmp_path: Path) -> None:
    use(config(tmp_path, elsewhere=False))
    with pytest.raises(anabranch.PlacementError, match=r"move placement\.records and decisions/"):
        anabranch.open(config(tmp_path))
    (tmp_path / "safe").mkdir()
    for name in ("placement.records", "decisions"):
        (tmp_path / "data" / name).rename(tmp_path / "safe" / name)
    assert use(config(tmp_path)) == 2
    for name in ("placement.records", "decisions"):  # and back
        (tmp_path / "safe" / name).rename(tmp_path / "data" / name)
    (tmp_path / "data/bindings.id").unlink()
    assert use(config(tmp_path, elsewhere=False)) == 3


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_crash_while_they_are_made_leaves_what_can_be_made(tmp_path: Path, step: int) -> None:
    """Before each of the three files of ids."""
    calls = 0

    def replace_file(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            raise KeyboardInterrupt
        files.replace_file(*arguments)  # type: ignore[arg-type]

    with mock.patch.object(bindings, "replace_file", replace_file), pytest.raises(KeyboardInterrupt):
        anabranch.open(config(tmp_path))
    assert use(config(tmp_path)) == 1


def test_with_create_directory_false_they_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(anabranch.ConfigError, match="the bindings directory"):
        anabranch.open(config(tmp_path, create_directory=False))
    assert not (tmp_path / "safe").exists()
    (tmp_path / "safe").mkdir()
    use(config(tmp_path, create_directory=False))


@pytest.mark.parametrize("where", ["data", "data/safe", "data/stores/a", "."])
def test_they_are_a_directory_of_their_own(tmp_path: Path, where: str) -> None:
    with pytest.raises(anabranch.ConfigError, match="lie in one another"):
        anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("a", [">"])], bindings_directory=tmp_path / where)
