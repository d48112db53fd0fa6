"""Who may read the files, and directories that must be there: real files, made by real processes under any umask."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import anabranch
from anabranch.policies.config import loads
from anabranch.policies.errors import ConfigError
from anabranch.router.cli.app import app

from ..children import run_program

ALL_KINDS = """
import os, sys, pathlib
os.umask(int(sys.argv[2], 8))
import anabranch
from anabranch.policies.config import loads
with anabranch.open(loads(sys.argv[1], "/")) as router:
    for i in range(9):
        router.queue(f"j.{i % 3}").send(bytes(30_000))
    for name in ("j.0", "j.1", "j.2"):
        while (message := router.queue(name).receive()) is not None:
            message.ack()
    router.reclaim()
    for name in ("s.a", "m.a"):
        for _ in range(5):
            router.queue(name).send(bytes(30_000))
    router.queue("each.a").send(b"1")
    with router.transaction() as tx:
        tx.send("j.a", b"1")
        tx.send("s.a", b"1")
    for directory, names, files in os.walk(sys.argv[3]):
        for name in [".", *files]:
            path = os.path.normpath(os.path.join(directory, name))
            print(oct(os.stat(path).st_mode & 0o777), path)
"""


def made(tmp_path: Path, umask: str, more: str) -> dict[str, str]:
    """The modes of all that a router with stores of every kind makes, by path in `tmp_path`."""
    there = tmp_path / "all"
    text = f"""
directory: {there}/deep/data
{more}
stores:
  - name: j
    match: ["j.>"]
    index_directory: {there}/index
    journal: {{segment_size: 64KiB, archive_directory: {there}/archive, sync: never, max_messages: 100}}
  - {{name: s, match: ["s.>"], directory: {there}/elsewhere/s, sql: {{}}}}
  - {{name: m, match: ["m.>"], memory: {{max_bytes: 64KiB}}}}
  - {{name: each, match: ["each.>"], per_destination: true}}
"""
    there.mkdir()
    code, told = run_program(ALL_KINDS, text, umask, str(there))
    assert code == 0, told
    lines = (line.split(" ", 1) for line in told.splitlines())
    return {path.removeprefix(f"{there}").lstrip("/"): mode for mode, path in lines if path != str(there)}


@pytest.mark.parametrize(
    ("umask", "more", "file", "directory"),
    [
        ("000", "", "0o600", "0o700"),
        ("777", "", "0o600", "0o700"),
        ("077", "file_mode: 0640", "0o640", "0o750"),
        ("022", 'file_mode: "0o660"', "0o660", "0o770"),
    ],
)
def test_all_that_is_made_has_the_mode_that_is_said(
    tmp_path: Path, umask: str, more: str, file: str, directory: str
) -> None:
    modes = made(tmp_path, umask, more)
    files = {path for path in modes if Path(path).suffix in FILES or Path(path).name == "watermark"}
    assert {modes[path] for path in files} == {file}, modes
    assert {mode for path, mode in modes.items() if path not in files} == {directory}, modes
    names = {Path(path).name for path in modes}
    assert {"router.lock", "placement.records", "store.id", "store.lock", "store.db", "store.db-wal", "1.swap"} <= names
    assert any(path.startswith("archive/") and path.endswith(".seg") for path in modes)
    assert {Path(path).suffix for path in modes if path.startswith("index/")} >= {".mdb", ".sums"}
    assert "deep/data/decisions/journal" in modes


FILES = {
    ".lock",
    ".mdb",
    ".records",
    ".sums",
    ".id",
    ".db",
    ".db-wal",
    ".db-shm",
    ".swap",
    ".seg",
    ".free",
    ".spare",
    ".tmp",
    ".yaml",
}


def test_a_store_may_say_another_mode(tmp_path: Path) -> None:
    stores = [
        anabranch.StoreConfig("a", ["a"], journal=anabranch.JournalOptions(file_mode=0o640)),
        anabranch.StoreConfig("b", ["b"]),
    ]
    configuration = anabranch.Config(tmp_path / "data", stores, file_mode="0660")
    with anabranch.open(configuration) as router:
        router.queue("a").send(b"1")
        router.queue("b").send(b"1")
    mode = {name: stat.S_IMODE((tmp_path / "data" / name).stat().st_mode) for name in (".", "stores/a", "stores/b")}
    assert mode == {".": 0o770, "stores/a": 0o750, "stores/b": 0o770}
    assert stat.S_IMODE((tmp_path / "data" / "stores" / "a" / "index.mdb").stat().st_mode) == 0o640


@pytest.mark.parametrize("value", ["640", "0400", "0700", "01640", "rw", "0o777", "true", "[1]", '"6400"'])
def test_what_is_no_mode_of_files(value: str) -> None:
    text = f"{{directory: d, file_mode: {value}, stores: [{{name: a, match: [a]}}]}}"
    with pytest.raises(ConfigError, match="file_mode: expected the mode of files in octal with a 0 in front"):
        loads(text, "/")


def test_what_exists_is_left_as_it_is_and_check_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    Path("stores.yaml").write_text("{directory: data, stores: [{name: a, match: [a]}]}")
    data.mkdir()
    data.chmod(0o755)
    with anabranch.open("stores.yaml") as router:
        router.queue("a").send(b"1")
    segment = data / "stores" / "a" / "journal" / "000000000001.seg"
    segment.chmod(0o644)
    with anabranch.open("stores.yaml") as router:
        router.queue("a").send(b"1")
    assert (stat.S_IMODE(data.stat().st_mode), stat.S_IMODE(segment.stat().st_mode)) == (0o755, 0o644)

    checked = CliRunner().invoke(app, ["check"])
    assert checked.exit_code == 0
    found = checked.stderr.splitlines()
    assert len(found) == 2
    assert found[0].startswith(f"stores.yaml: warning: {data}: 1 of the files and directories here may be read")
    assert found[1].startswith(f"stores.yaml: warning: {data / 'stores' / 'a'}: 1 of")
    assert f"such as {segment};" in found[1]
    for line in found:  # what it says to do is enough
        subprocess.run(line.partition("Change it with: ")[2], shell=True, check=True)
    assert CliRunner().invoke(app, ["check"]).stderr == ""


def test_of_a_directory_that_others_use_too_check_tells_of_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stores.yaml").write_text("{directory: data, stores: [{name: a, match: [a], index_directory: fast}]}")
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast").chmod(0o777)
    (tmp_path / "fast" / "photo").write_text("x")
    (tmp_path / "fast" / "photo").chmod(0o666)
    with anabranch.open("stores.yaml") as router:
        router.queue("a").send(b"1")
    assert CliRunner().invoke(app, ["check"]).stderr == ""
    (index,) = (tmp_path / "fast").glob("*.mdb")
    index.chmod(0o604)
    (warning,) = CliRunner().invoke(app, ["check"]).stderr.splitlines()
    subprocess.run(warning.partition("Change it with: ")[2], shell=True, check=True)
    assert CliRunner().invoke(app, ["check"]).stderr == ""
    assert (tmp_path / "fast" / "photo").stat().st_mode & 0o777 == 0o666


class TestDirectoriesThatAreNotThere:
    def test_the_data_directory(self, tmp_path: Path) -> None:
        stores = [anabranch.StoreConfig("a", [">"])]
        configuration = anabranch.Config(tmp_path / "disk" / "data", stores, create_directory=False)
        with pytest.raises(ConfigError, match=r"disk/data, is not there.*not mounted looks just like that: mount it"):
            anabranch.open(configuration)
        assert list(tmp_path.iterdir()) == []
        configuration.directory.mkdir(parents=True)
        with anabranch.open(configuration) as router:
            router.queue("a").send(b"1")

    @pytest.mark.parametrize("kind", ["journal", "sql", "memory"])
    def test_a_stores_own(self, tmp_path: Path, kind: str) -> None:
        own = tmp_path / "disk" / "a"
        options: dict[str, Any] = {kind: {}}
        stores = [
            anabranch.StoreConfig("a", ["a"], directory=own, create_directory=False, **options),
            anabranch.StoreConfig("b", ["b"], directory=tmp_path / "disk2" / "b"),
        ]
        configuration = anabranch.Config(tmp_path / "data", stores)
        with pytest.raises(ConfigError, match=r"the directory of store 'a', .*disk/a, is not there"):
            anabranch.open(configuration)
        assert list(tmp_path.iterdir()) == []
        own.mkdir(parents=True)
        with anabranch.open(configuration) as router:
            own.rmdir()  # unmounted since
            with pytest.raises(ConfigError, match=r"disk/a, is not there"):
                router.queue("a").send(b"1")
            assert list((tmp_path / "disk").iterdir()) == []
            own.mkdir()
            router.queue("a").send(b"1")
            router.queue("b").send(b"1")
        with anabranch.open(configuration) as router:
            assert router.queue("a").depth() == (0 if kind == "memory" else 1)

    def test_those_of_all_destinations(self, tmp_path: Path) -> None:
        stores = [anabranch.StoreConfig("a", [">"], directory=tmp_path / "disk", per_destination=True)]
        configuration = anabranch.Config(tmp_path / "data", stores, create_directory=False)
        (tmp_path / "data").mkdir()
        with pytest.raises(ConfigError, match=r"the directory of store 'a'"):
            anabranch.open(configuration)
        (tmp_path / "disk").mkdir()
        with anabranch.open(configuration) as router:
            router.queue("x").send(b"1")
            router.queue("y").send(b"1")

    def test_what_is_there_and_no_store_is_left_alone(self, tmp_path: Path) -> None:
        own = tmp_path / "disk"
        own.mkdir()
        (own / "mine").write_text("x")
        stores = [anabranch.StoreConfig("a", [">"], directory=own, create_directory=False)]
        with (
            anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router,
            pytest.raises(anabranch.PlacementError, match="exists and is no store"),
        ):
            router.queue("a").send(b"1")
        assert [path.name for path in own.iterdir()] == ["mine"]

    def test_the_file_says_it_and_is_written_back(self) -> None:
        text = "{directory: d, create_directory: false, file_mode: 0640, stores: [{name: a, match: [a], "
        text += "directory: e, create_directory: true, journal: {file_mode: 0660}}]}"
        configuration = loads(text, "/")
        assert (configuration.create_directory, configuration.file_mode) == (False, 0o640)
        assert configuration._may_create(configuration.stores[0])
        assert loads(anabranch.policies.config.dump_yaml(configuration), "/") == configuration
