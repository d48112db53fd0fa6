"""What `anabranch.open` takes, and the configuration in force, which lies in the data directory."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import anabranch
from anabranch import Config, JournalOptions, StoreConfig, Sync
from anabranch.policies.config import load
from anabranch.policies.errors import ConfigError, PlacementError, StoreLockedError
from anabranch.router.cli.app import app
from anabranch.router.placement.on_disk.in_force import KEPT, NAME, configuration_of, read_in_force
from anabranch.router.upkeep.salvage import salvage

from ..router.disk import Faults

ALL = StoreConfig("all", [">"], journal=JournalOptions(sync=Sync.ALWAYS))
TWO = """
directory: {}
stores:
- {{name: a, match: ['a.>'], journal: {{sync: never}}}}
- {{name: b, match: ['>'], sql: {{}}}}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def bodies(source: Any, queue: str = "jobs") -> list[bytes]:
    with anabranch.open(source) as router:
        return [message.body for message in router.queue(queue).browse()]


# Directories ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [str, Path, lambda name: Path(name).absolute(), lambda name: f"./x/../{name}/"])
def test_a_directory_is_all_that_is_needed(make: Any) -> None:
    with anabranch.open(make("data")) as router:
        router.queue("jobs").send(b"...")
        assert router.config == Config("data", [ALL])
    assert bodies("data") == [b"..."]
    assert [path.name for path in Path().iterdir()] == ["data"]


def test_a_directory_that_is_empty_or_a_new_disk_s() -> None:
    for number, names in enumerate(([], ["lost+found"], [".hidden"])):
        for name in names:
            (Path(f"data{number}") / name).mkdir(parents=True)
        with anabranch.open(f"data{number}") as router:
            router.queue("jobs").send(b"1")


def test_a_directory_is_opened_as_it_was_last() -> None:
    Path("stores.yaml").write_text(TWO.format("data"))
    with anabranch.open("stores.yaml") as router:
        router.queue("a.x").send(b"1")
        router.queue("jobs").send(b"2")
    assert configuration_of("data") == load("stores.yaml") == read_in_force(Path("data").absolute())
    Path("stores.yaml").unlink()
    with anabranch.open("data") as router:
        assert {name: store.kind for name, store in router.stats().stores.items()} == {"a": "journal", "b": "sql"}
        assert router.queue("jobs").depth() == 1


def test_a_file_in_the_directory_comes_first() -> None:
    assert bodies("data") == []
    Path("data/stores.yaml").write_text(TWO.format("."))
    with anabranch.open("data") as router:
        assert [store.name for store in router.config.stores] == ["a", "b"]
    Path("data/stores.yaml").unlink()
    assert [store.name for store in configuration_of("data").stores] == ["a", "b"]


def test_a_directory_that_was_moved_or_copied() -> None:
    config = Config("data", [StoreConfig("x", ["x.>"], directory="data/own"), StoreConfig("rest", [">"])], usage={})
    with anabranch.open(config) as router:
        router.queue("x.y").send(b"1")
    Path("data").rename("moved")
    shutil.copytree("moved", "deep/copy")
    for name in ("moved", "deep/copy"):
        assert bodies(name, "x.y") == [b"1"]
        assert configuration_of(name).stores[0].directory == Path(name).absolute() / "own"
    assert not Path("data").exists()


def test_a_directory_named_as_a_file_would_be() -> None:
    Path("odd.yaml").mkdir()
    assert bodies("odd.yaml") == []
    Path("settings").write_text(TWO.format("data"))  # and the other way round
    assert configuration_of("settings").directory == Path("data").absolute()


def test_a_file_that_is_no_configuration() -> None:
    Path("jobs.txt").write_text("hi\n")
    with pytest.raises(ConfigError) as refused:
        anabranch.open("jobs.txt")
    step = "jobs.txt: it is a file, and was read as a configuration: give a data directory, or the file of a"
    assert step in str(refused.value).splitlines()[-1]


def test_a_place_where_nothing_can_be_made() -> None:
    with pytest.raises(ConfigError, match=r"/proc/x cannot be used: .*; choose one that this user may write in"):
        anabranch.open("/proc/x")


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell, and `directory:` of a file, take it: by whatever names the path."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given: list[str | Path | Config] = ["~/data", Path("~/data"), Config("~/data", [ALL])]
    for number, source in enumerate(given):
        with anabranch.open(source) as router:
            assert router.queue("jobs").send(b"1").seq == number + 1
    run = CliRunner().invoke(app, ["send", "~/data", "jobs", "4"])
    assert run.exit_code == 0 and run.output == "queue://jobs: sent, number 4\n"
    salvage("~/data", "~/salvaged")
    assert bodies("~/salvaged") == [b"1", b"1", b"1", b"4"]
    Path("home/stores.yaml").write_text(TWO.format("~/other"))
    sources: list[str | Config] = ["~/stores.yaml", load("~/stores.yaml")]
    for source in sources:
        assert bodies(source) == []
    assert anabranch.policies.config.warnings("~/stores.yaml") == []
    assert {path.name for path in Path("home").iterdir()} == {"data", "salvaged", "stores.yaml", "other"}
    assert [path.name for path in Path().iterdir()] == ["home"]


def test_the_home_of_nobody_is_a_name_as_a_shell_takes_it() -> None:
    assert bodies("~no-such-user") == bodies(Config("~nobody-else", [ALL])) == []
    assert {path.name for path in Path().iterdir()} == {"~no-such-user", "~nobody-else"}


SLIPS = ["stores.ymal", "stores.yalm", "x/stores.yamll", "stores.yam", "stores.JSON", "stores.toml", "stores.yaml.bak"]


@pytest.mark.parametrize("name", [*SLIPS, "stores.yml~", "stores.yaml.2026-11-26", "stores.conf", "stores.ini"])
def test_a_slip_in_a_file_s_name_makes_no_directory(name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not exist, and is named as a configuration file, which ends in"):
        anabranch.open(name)
    assert list(Path().iterdir()) == []
    Path(name).mkdir(parents=True)
    assert bodies(name) == []


@pytest.mark.parametrize("name", ["data.eu", "orders.2026", ".data", "data.mail", "data.ml", "a.b.c", "shop.html"])
def test_other_directories_have_dots_in_their_names(name: str) -> None:
    assert bodies(name) == []


def test_one_of_an_older_version() -> None:
    """It does not say what it was opened under: of stores of other names nothing is guessed."""
    with anabranch.open(load_of("data")) as router:
        router.queue("a.x").send(b"1")
    Path("data", NAME).unlink()
    with pytest.raises(ConfigError, match=r"data has stores a, and no in-force\.yaml .* Give the file that it is used"):
        anabranch.open("data")
    assert bodies("stores.yaml", "a.x") == [b"1"]
    assert bodies("data", "a.x") == [b"1"]


def test_a_crash_before_it_was_written_costs_nothing() -> None:
    with anabranch.open("data") as router:
        router.queue("jobs").send(b"1")
    Path("data", NAME).unlink()
    assert bodies("data") == [b"1"]


def load_of(directory: str) -> Config:
    Path("stores.yaml").write_text(TWO.format(directory))
    return load("stores.yaml")


# What is none --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, b"data", 5, ["data"], Path])
def test_what_names_nothing(source: Any) -> None:
    ways = r'anabranch\.open\("data"\) .* anabranch\.open\("stores\.yaml"\) .* anabranch\.open\(anabranch\.Config'
    with pytest.raises(TypeError, match=ways):
        anabranch.open(source)
    with pytest.raises(TypeError, match=ways):
        anabranch.open()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", r"'' is no path; anabranch\.open"),
        ("  ", "is no path"),
        ("a\0b", "is no path"),
        ("missing.yml", "missing.yml: no such file; `anabranch init` writes one"),
        (Path("missing.YAML"), "no such file"),
        ("x" * 300, "cannot be opened: File name too long"),
        ("text", "text:2: not YAML"),
        ("text/data", "text/data .*cannot be (opened|used)"),
        (
            "other",
            r"other holds a\.txt, b\.txt, c\.txt and 1 more, and no data of a router: it is in use for",
        ),
        ("data/stores/all", "data/stores/all holds .* is one store's; give the data directory that it is in"),
        ("project", r"project/stores\.yaml is in the directory .* says .*/project/data\. Give the file"),
        ("broken", r"in-force\.yaml:\d+: .*may be damaged: give the file"),
    ],
)
def test_bad_input(source: Any, says: str) -> None:
    """One error that names it, and nothing is made."""
    Path("text").write_text("just: [a, text\n")
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        Path("other").mkdir(exist_ok=True)
        Path("other", name).touch()
    Path("project").mkdir()
    Path("project/stores.yaml").write_text(TWO.format("data"))
    for name in ("data", "broken"):
        with anabranch.open(name) as router:
            router.queue("q").send(b"1")
    Path("broken", NAME).write_text("stores: [")
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        anabranch.open(source)
    assert sorted(Path().rglob("*")) == before


def test_a_text_that_speaks_of_variables_is_not_taken_for_one() -> None:
    anabranch.open("data").close()
    journal = 'journal: {sync: "the environment\'s variable"}'
    Path("data", NAME).write_text(f"directory: .\nstores:\n- {{name: a, match: ['>'], {journal}}}\n")
    with pytest.raises(ConfigError, match=r"(?s)the environment's variable.*may be damaged: give the file") as refused:
        anabranch.open("data")
    assert [one.of_variable for one in refused.value.problems] == [False, False]


def test_a_variable_with_a_wrong_value_is_named_and_no_file_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("data").mkdir()
    Path("data", NAME).write_text("directory: .\nstores:\n- {name: a, match: ['>'], sql: {url_env: SHOP_DATABASE}}\n")
    monkeypatch.setenv("SHOP_DATABASE", "mysql://x")
    with pytest.raises(ConfigError, match="'SHOP_DATABASE'") as refused:
        anabranch.open("data")
    assert [one.of_variable for one in refused.value.problems] == [True]
    assert "damaged" not in str(refused.value)


def test_what_this_user_may_not_enter_or_read(tmp_path: Path) -> None:
    """A directory that is closed to others, what lies in one, and a data directory whose owner has opened it to them,
    but not what is in it."""
    for name in ("data", "shut/data"):
        with anabranch.open(name) as router:
            router.queue("jobs").send(b"1")
    Path("data").chmod(0o755)
    Path("shut").chmod(0o700)
    Path("shut/stores.yaml").write_text(TWO.format("data"))
    for directory in (tmp_path, *tmp_path.parents):
        mode = stat.S_IMODE(directory.stat().st_mode)
        if os.getuid() == 0 and mode & 0o055 != 0o055:
            directory.chmod(mode | 0o055)  # pytest's own, which root keeps to itself
    program = (
        "import os, sys, anabranch\n"
        "anabranch.Config  # is imported while this user may still read what pydantic needs\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    try: anabranch.open(path)\n"
        "    except anabranch.ConfigError as error: print(error)\n"
    )
    if os.getuid() != 0:
        for name in ("data/stores", "shut"):
            Path(name).chmod(0)
    paths = ["data", "shut", "shut/data", "shut/new", "shut/stores.yaml"]
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, check=True)
    for name in ("data/stores", "shut"):
        Path(name).chmod(0o700)
    for path, said in zip(paths, done.stdout.splitlines(), strict=True):
        assert said.startswith(f"{path} cannot be opened")
        assert "Permission denied" in said


def test_one_that_is_open_already() -> None:
    with anabranch.open("data"), pytest.raises(StoreLockedError):
        anabranch.open("data")


# What is written -----------------------------------------------------------------------------------------------------


def test_it_says_who_writes_it() -> None:
    anabranch.open("data").close()
    lines = Path("data", NAME).read_text().splitlines()
    assert lines[0].startswith("# Written by Anabranch") and lines[1].startswith("# Not to be edited")
    assert lines[2] == "directory: ."


def test_it_is_written_where_it_changes() -> None:
    anabranch.open("data").close()
    first = Path("data", NAME).stat()
    anabranch.open("data").close()
    assert Path("data", NAME).stat().st_ino == first.st_ino
    Path("data", NAME).write_text("# edited by hand\n" + Path("data", NAME).read_text())
    anabranch.open("data").close()
    assert Path("data", NAME).read_text().startswith("# Written by")
    anabranch.open(Config("data", [ALL], file_mode=0o640)).close()
    assert stat.S_IMODE(Path("data", NAME).stat().st_mode) == 0o640
    assert "file_mode: '0640'" in Path("data", NAME).read_text()


def test_a_refused_configuration_is_not_in_force() -> None:
    with anabranch.open("data") as router:
        router.queue("jobs").send(b"1")
    before = Path("data", NAME).read_bytes()
    for store in (StoreConfig("all", ["a"]), StoreConfig("all", [">"], sql={})):
        with pytest.raises(PlacementError):
            anabranch.open(Config("data", [store]))
        assert Path("data", NAME).read_bytes() == before


def test_no_secret_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, Any] = {"url": "postgresql+psycopg://app:hunter2@h/d"}
    anabranch.open(Config("data", [StoreConfig("db", [">"], sql=store)])).close()
    assert b"hunter2" not in Path("data", NAME).read_bytes()
    with pytest.raises(
        ConfigError, match=r"(?s)no variable 'ANABRANCH_DB_URL'.*give the file that .*data is used with"
    ):
        anabranch.open("data")
    monkeypatch.setenv("ANABRANCH_DB_URL", store["url"])
    assert configuration_of("data").stores[0].options == anabranch.SqlOptions(**store)


def test_a_link_is_told_of_and_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    """Neither read nor replaced, as any link in a data directory."""
    Path("elsewhere").write_text(TWO.format("data"))
    anabranch.open("data").close()
    Path("data", NAME).unlink()
    Path("data", NAME).symlink_to(Path("elsewhere").absolute())
    with pytest.raises(ConfigError, match="Put its target there, or delete the link"):
        anabranch.open("data")
    with anabranch.open(Config("data", [ALL])) as router:
        router.queue("q").send(b"1")
    assert Path("data", NAME).is_symlink() and Path("elsewhere").read_text() == TWO.format("data")
    assert "is not written to" in caplog.text and "Put its target there, or delete the link" in caplog.text


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_has_no_room_for_it_stops_no_open(
    faults: Faults, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    with anabranch.open("data") as router:
        router.queue("jobs").send(b"1")
    before = Path("data", NAME).read_bytes()
    faults.fail("pwrite", NAME, error)
    with anabranch.open(Config("data", [ALL], transactions={"max_open": 7})) as router:
        assert router.queue("jobs").depth() == 1
    assert "the configuration in force is not written to" in caplog.text
    assert Path("data", NAME).read_bytes() == before and not Path("data", f"{NAME}.tmp").exists()
    faults.mend()
    anabranch.open(Config("data", [ALL], transactions={"max_open": 7})).close()
    assert configuration_of("data").transactions.max_open == 7


def test_a_repartition_puts_its_configuration_in_force() -> None:
    with anabranch.open("data") as router:
        router.queue("a.x").send(b"1")
        router.repartition(load_of("data"))
        assert configuration_of("data") == load("stores.yaml")
    assert bodies("data", "a.x") == [b"1"]


def test_a_salvaged_directory_says_it_too() -> None:
    from anabranch.router.upkeep.salvage import salvage

    with anabranch.open(load_of("data")) as router:
        router.queue("a.x").send(b"1")
    salvage("data", "saved")
    assert bodies("saved", "a.x") == [b"1"]


# What changed --------------------------------------------------------------------------------------------------------


def test_changes_that_leave_something_as_it_was_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def config(**options: Any) -> Config:
        return Config("data", [StoreConfig("a", [">"], journal=options)], usage={})

    anabranch.open(config(segment_size="1MiB")).close()
    caplog.set_level(logging.INFO)
    anabranch.open(config(segment_size="64KiB", large_message_size="2KiB", sync="never", max_messages=5)).close()
    (line,) = [record.getMessage() for record in caplog.records if "changed since" in record.getMessage()]
    assert "store 'a': segment_size was 1048576, and is 65536 (files that are there keep theirs)" in line
    assert "large_message_size" in line and "sync" not in line and "max_messages" not in line
    caplog.clear()
    anabranch.open(config(segment_size="64KiB", large_message_size="2KiB")).close()
    assert "changed since" not in caplog.text
    assert set(KEPT) >= {"segment_size", "file_mode", "index_directory"}


def test_one_that_cannot_be_read_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is not taken for missing: else the directory would be opened by the default, and that be written down."""
    Path("stores.yaml").write_text(TWO.format("data").replace("name: b", "name: all"))
    with anabranch.open("stores.yaml") as router:
        router.queue("jobs").send(b"1")
    before = Path("data", NAME).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("anabranch.router.placement.on_disk.in_force.read_file", _fails)
        with pytest.raises(ConfigError, match="cannot be opened: Input/output error"):
            anabranch.open("data")
        with anabranch.open("stores.yaml") as router:  # who has the file needs it not
            assert router.queue("jobs").depth() == 1
    assert "cannot be read" in caplog.text
    assert Path("data", NAME).read_bytes() == before


def _fails(path: Path) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
