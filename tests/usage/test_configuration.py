"""The configuration that a usage log was recorded under, and what the advisor does with it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import anabranch
from anabranch.adapters.system.clock import now_us
from anabranch.policies.config import Config, dump_yaml, load
from anabranch.router.cli.app import app
from anabranch.router.usage import log
from anabranch.router.usage.configuration import FILE, remembered
from anabranch.router.usage.reading import UsageTrace, usage_trace

from ..kernels import compiled  # noqa: F401  a fixture
from .conftest import config

pytestmark = pytest.mark.usefixtures("compiled")


def journals(directory: Path, sync: str = "never", size: str = "1MiB", **more: Any) -> Config:
    options = anabranch.JournalOptions(sync=sync, segment_size=size)  # type: ignore[arg-type]
    return Config(directory, [anabranch.StoreConfig("all", [">"], journal=options)], usage={}, **more)


def recorded(config: Config, *sizes: int) -> None:
    with anabranch.open(config) as router:
        for size in sizes:
            router.queue("a").send(bytes(size))


def read(*directories: Path) -> UsageTrace:
    trace = usage_trace(directories)
    assert list(trace)
    return trace


def recommend(tmp_path: Path, *arguments: Any) -> Result:
    out = ["--out", tmp_path / "advice", "--force", "--json", "--engine", "local", "--clock", "seq"]
    return CliRunner().invoke(app, ["recommend", *map(str, [*arguments, *out])])


def test_it_is_what_the_advice_goes_by(tmp_path: Path) -> None:
    """Sync policy and size of files, which the command line said nothing of, and the store's name."""
    recorded(journals(tmp_path / "data"), 1, 2)
    result = recommend(tmp_path, "--usage", tmp_path / "data")
    assert result.exit_code == 0
    assert result.stderr == (
        f"In force: {tmp_path}/data/usage/configuration.yaml, under which this was recorded; --current FILE says "
        "otherwise.\n"
    )
    found = json.loads(result.stdout)
    assert [(s["name"], s["sync"]) for s in found["recommended"]["stores"]] == [("all", "never")]
    assert found["parameters"]["segment_bytes"] == 1 << 20
    assert "current" in [candidate["name"] for candidate in found["candidates"]]
    written = load(tmp_path / "advice" / "stores.yaml")
    assert (written.directory, written.stores) == (tmp_path / "data", journals(tmp_path).stores)
    other = tmp_path / "other.yaml"
    other.write_text(dump_yaml(journals(tmp_path / "data", "periodic", "2MiB")))
    result = recommend(tmp_path, "--usage", tmp_path / "data", "--current", other)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert [s["sync"] for s in found["recommended"]["stores"]] == ["periodic"]
    assert found["parameters"]["segment_bytes"] == 2 << 20
    result = recommend(tmp_path, "--usage", tmp_path / "data", "--segment-size", "64KiB")
    assert json.loads(result.stdout)["parameters"]["segment_bytes"] == 64 << 10


def test_each_kind_of_store_is_remembered_and_no_secret(tmp_path: Path) -> None:
    given = config(tmp_path / "data")
    options = anabranch.SqlOptions(url="postgresql+psycopg://me@db/x", password="hunter2")
    secret = given.model_copy(update={"stores": [*given.stores[:1], anabranch.StoreConfig("sql", [">"], sql=options)]})
    from anabranch.router.usage.configuration import remember

    for one in (given, secret):
        (tmp_path / "data" / "usage").mkdir(parents=True, exist_ok=True)
        remember(tmp_path / "data" / "usage", one, 1_700_000_000_000_000, 0o640)
        path = tmp_path / "data" / "usage" / FILE
        assert "hunter2" not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o640
        found = remembered(tmp_path / "data" / "usage")
        assert found is not None
        assert (found.since, found.day) == (1_700_000_000.0, "2023-11-14 22:13:20 UTC")
        assert [store.kind for store in found.config.stores] == [store.kind for store in one.stores]
    assert found is not None
    assert found.config.stores[0] == secret.stores[0]


def test_a_data_directory_that_is_moved_remembers_where_it_is(tmp_path: Path) -> None:
    recorded(journals(tmp_path / "data"), 1, 2)
    shutil.move(tmp_path / "data", tmp_path / "moved")
    found = read(tmp_path / "moved").remembered
    assert found is not None
    assert found.config.directory == tmp_path / "moved"


def test_only_a_change_is_written(tmp_path: Path) -> None:
    recorded(journals(tmp_path / "data"), 1, 2)
    path = tmp_path / "data" / "usage" / FILE
    before = path.stat().st_ino, path.read_text()
    recorded(journals(tmp_path / "data"), 2)
    assert (path.stat().st_ino, path.read_text()) == before
    path.write_bytes(b"\xff damaged")
    recorded(journals(tmp_path / "data"), 3)
    assert path.read_text().partition("\n")[2] == before[1].partition("\n")[2]


def test_of_a_log_that_spans_a_change_the_latest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(journals(tmp_path / "data"), 1, 2)
    later = [now_us() + 3_600_000_000]
    monkeypatch.setattr(log, "now_us", lambda: later[0])
    recorded(journals(tmp_path / "data", "periodic"), 2)
    trace = read(tmp_path / "data")
    assert trace.remembered is not None
    assert trace.remembered.config.stores == journals(tmp_path, "periodic").stores
    assert trace.notes == (
        f"{tmp_path}/data/usage was recorded under more than one configuration; the latest counts, in force since "
        f"{trace.remembered.day}",
    )
    result = recommend(tmp_path, "--usage", tmp_path / "data")
    assert result.stderr.startswith(f"Note: {trace.notes[0]}.\nIn force: ")
    assert json.loads(result.stdout)["recommended"]["stores"][0]["sync"] == "periodic"


def test_a_router_in_use_that_is_repartitioned_tells_of_it(tmp_path: Path) -> None:
    before, journal = journals(tmp_path / "data"), anabranch.JournalOptions(sync=anabranch.Sync.NEVER)
    after = before.model_copy(update={"stores": [*before.stores, anabranch.StoreConfig("b", ["b"], journal=journal)]})
    with anabranch.open(before) as router:
        router.queue("b").send(b"1")
        router.repartition(after)
        assert router._usage.log is not None
        router._usage.log.flush()
        found = remembered(tmp_path / "data" / "usage")
        assert found is not None
        assert [store.name for store in found.config.stores] == ["all", "b"]


def test_several_logs_have_to_agree(tmp_path: Path) -> None:
    for name in ("one", "two"):
        recorded(journals(tmp_path / name), 1)
    trace = read(tmp_path / "one", tmp_path / "two")
    assert trace.remembered is not None and trace.notes == ()
    recorded(journals(tmp_path / "two", "periodic"), 1)
    trace = read(tmp_path / "one", tmp_path / "two")
    assert trace.remembered is None
    assert trace.notes == (
        f"{tmp_path}/one/usage/configuration.yaml and {tmp_path}/two/usage/configuration.yaml differ; so nothing is "
        "taken to be in force: give that by --current",
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "/usage does not say under which configuration it was recorded; so nothing is taken to be in force"),
        (b"\xff", "configuration.yaml: the configuration of the usage log cannot be read: 'utf-8' codec"),
        (b"stores: []\n", "configuration.yaml: the configuration of the usage log cannot be read: time data"),
    ],
)
def test_one_that_cannot_be_read_is_done_without(tmp_path: Path, content: bytes | None, says: str) -> None:
    recorded(journals(tmp_path / "data"), 1, 2)
    path = tmp_path / "data" / "usage" / FILE
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    result = recommend(tmp_path, "--usage", tmp_path / "data")
    assert result.exit_code == 0
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert json.loads(result.stdout)["recommended"]["stores"][0]["sync"] == "always"


def test_a_destination_that_it_does_not_route_is_named(tmp_path: Path) -> None:
    recorded(journals(tmp_path / "data"), 1, 2)
    path = tmp_path / "data" / "usage" / FILE
    path.write_text(path.read_text().replace("'>'", "other.>"))
    result = recommend(tmp_path, "--usage", tmp_path / "data")
    assert result.exit_code == 2
    assert f"{path} routes queue://a nowhere; add a pattern for it, in a --current" in result.stderr


@pytest.mark.parametrize("at", ["open", "rename"])
def test_a_disk_that_is_full_keeps_nobody_from_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    recorded(journals(tmp_path / "data"), 1, 2)
    real_open, real_rename = os.open, Path.rename

    def opening(path: Any, *arguments: Any, **more: Any) -> int:
        if at == "open" and f"{FILE}.tmp" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real_open(path, *arguments, **more)

    def renaming(path: Path, target: Path) -> Path:
        if at == "rename" and FILE in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real_rename(path, target)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(Path, "rename", renaming)
    recorded(journals(tmp_path / "data", "periodic"), 2)
    assert "nothing is recorded: the usage log" in caplog.text
    monkeypatch.undo()
    trace = read(tmp_path / "data")
    assert trace.remembered is not None
    assert trace.remembered.config.stores == journals(tmp_path).stores
    recorded(journals(tmp_path / "data", "periodic"), 3)
    assert [event.body_size for event in read(tmp_path / "data")] == [1, 2, 3]
