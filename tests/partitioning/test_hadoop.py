"""Results in a file system of Hadoop's: whole or not at all, and never over what is somebody's.

Hadoop's view file system shows a directory of this machine under a URL of its own: the way is that of `hdfs://`.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from anabranch.policies.advisor import RecommendOptions, Workload, generate, recommend
from anabranch.policies.advisor.spark.hadoop import file_system
from anabranch.policies.advisor.workload.files import write_workload
from anabranch.policies.errors import ConfigError, SparkError

from .conftest import run

TEXTS = {"one": "1\n", "two": "ü" * 3000, "three": ""}
WORKLOAD = """
name: shop
seed: 3
duration: 20m
destinations:
  - {name: queue://ticks, arrival: {rate: 4/s}, size: 200, consumer: {lag: 1s}}
  - {name: queue://orders, arrival: {rate: 1/s}, size: 400, consumer: {lag: {min: 2m, max: 9m}}}
"""


@pytest.fixture
def url(spark: Any, tmp_path: Path) -> str:
    """Of another file system, which shows `tmp_path`."""
    name = f"c{secrets.token_hex(4)}"  # Hadoop keeps the file systems that it has opened
    spark.sparkContext._jsc.hadoopConfiguration().set(
        f"fs.viewfs.mounttable.{name}.link./data", (tmp_path / "there").as_uri()
    )
    (tmp_path / "there").mkdir()
    return f"viewfs://{name}/data"


def files(directory: Path) -> dict[str, str]:
    """By name; but not the checksums that Hadoop puts beside what it writes on this machine."""
    return {p.name: p.read_text() for p in directory.iterdir() if not p.name.endswith(".crc")}


def test_files_appear_in_a_new_directory_and_in_one_that_is_there(url: str, tmp_path: Path) -> None:
    with file_system(url) as there:
        assert there.write_files(f"{url}/a/new/", TEXTS, overwrite=False) == [f"{url}/a/new/{name}" for name in TEXTS]
        assert files(tmp_path / "there/a/new") == TEXTS
        (tmp_path / "there/mine").mkdir()
        (tmp_path / "there/mine/own").touch()
        there.write_files(f"{url}/mine", TEXTS, overwrite=False)
        assert files(tmp_path / "there/mine") == TEXTS | {"own": ""}
        with pytest.raises(ConfigError, match=f"^{url}/mine/one exists already and was left as it is"):
            there.write_files(f"{url}/mine", {"more": "", "one": "2"}, overwrite=False)
        assert files(tmp_path / "there/mine") == TEXTS | {"own": ""}
        there.write_files(f"{url}/mine", {"more": "", "one": "2"}, overwrite=True)
    assert files(tmp_path / "there/mine") == TEXTS | {"own": "", "more": "", "one": "2"}


def test_what_is_in_the_way_is_told(url: str, tmp_path: Path) -> None:
    (tmp_path / "there/file").touch()
    (tmp_path / "there/d/one").mkdir(parents=True)
    with file_system(url) as there:
        with pytest.raises(ConfigError, match=r"data/file is in the way: a directory is needed there"):
            there.check_files(f"{url}/file/deep/er", ["one"], overwrite=True)
        with pytest.raises(ConfigError, match=r"data/d/one is in the way: a file of that name is to be written"):
            there.check_files(f"{url}/d", ["one"], overwrite=True)
        root = url.removesuffix("/data")
        for given in (root, f"{root}/"):
            with pytest.raises(ConfigError, match="is the root of its file system; give a directory in it"):
                there.write_directory(given, lambda _: None, overwrite=True)


def test_a_directory_takes_the_place_of_a_trace_alone(url: str, tmp_path: Path) -> None:
    place = tmp_path / "there/t"

    def write(made: str) -> None:
        (tmp_path / "there" / made.partition("/data/")[2]).mkdir()
        (tmp_path / "there" / made.partition("/data/")[2] / "new.parquet").touch()

    def fail(made: str) -> None:
        write(made)
        raise ValueError("disk on fire")

    def be_late(made: str) -> None:
        write(made)
        place.mkdir()

    with file_system(url) as there:
        with pytest.raises(ConfigError, match="data/t exists already"):
            there.write_directory(f"{url}/t", be_late, overwrite=False)
        assert not files(place)
        (place / "old.parquet").touch()
        with pytest.raises(ConfigError, match="data/t exists already"):
            there.write_directory(f"{url}/t", write, overwrite=False)
        with pytest.raises(ValueError, match="disk on fire"):
            there.write_directory(f"{url}/t", fail, overwrite=True)
        assert [*files(place)] == ["old.parquet"]
        there.write_directory(f"{url}/t", write, overwrite=True)
        assert [*files(place)] == ["new.parquet"]
        (place / "letters.txt").touch()
        with pytest.raises(ConfigError, match=r"data/t holds letters\.txt, which is no trace, and was left as it is"):
            there.write_directory(f"{url}/t", write, overwrite=True)
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["t"]


@pytest.mark.campaign  # what they call is tested above
def test_the_commands_write_there(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shop.yaml").write_text(WORKLOAD)
    common = ("--segment-size", "64KiB", "--engine", "local")
    made = run("trace", "--workload", "shop.yaml", "--out", f"{url}/made", "--engine", "spark", "--json")
    assert (made.exit_code, made.stderr) == (0, "")
    table = generate(Workload.load("shop.yaml"))
    told = json.loads(made.stdout)
    assert told == {"written": f"{url}/made", "operations": table.num_rows, "warnings": []}
    options = RecommendOptions(segment_bytes=64 << 10, engine="local")
    assert recommend(tmp_path / "there/made", options).candidates == recommend(table, options).candidates
    again = run("trace", "--workload", "shop.yaml", "--out", f"{url}/made", "--engine", "spark")
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr.startswith(f"Error: {url}/made exists already")
    copied = run("trace", "--workload", "shop.yaml", "--out", f"{url}/t.csv")
    assert (copied.exit_code, copied.stderr) == (0, "")
    for out in (f"{url}/advice", "advice"):
        result = run("recommend", "--trace", "there/t.csv", "--out", out, *common)
        assert (result.exit_code, result.stderr) == (0, "")
        assert f"{out}/stores.yaml" in result.stdout
    there = {name: data.replace(f"{url}/advice", "advice") for name, data in files(tmp_path / "there/advice").items()}
    assert there == files(tmp_path / "advice")  # but for the next command, which names the place
    assert sorted(p.name for p in (tmp_path / "there").iterdir() if p.suffix != ".crc") == ["advice", "made", "t.csv"]
    result = run("recommend", "--trace", "no such", "--out", f"{url}/advice", *common)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {url}/advice/recommendation.json exists already")


def test_a_directory_of_this_machine(spark: Any, tmp_path: Path) -> None:
    workload = Workload.parse(WORKLOAD)
    for overwrite in (False, True):
        assert write_workload(workload, tmp_path / "t.parquet", overwrite=overwrite) == generate(workload).num_rows
    with pytest.raises(ConfigError, match=r"t\.parquet exists already"):
        write_workload(workload, tmp_path / "t.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_a_file_system_that_is_not_there(spark: Any) -> None:
    with (
        pytest.raises(SparkError, match=r'^nosuch://h/x cannot be written: .*No FileSystem for scheme "nosuch"; check'),
        file_system("nosuch://h/x") as there,
    ):
        there.check_files("nosuch://h/x", ["one"], overwrite=False)
    result = run("recommend", "--workload", "w", "--out", "nosuch://h/x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: nosuch://h/x cannot be written: ")
    assert result.stderr.count("\n") == 1
