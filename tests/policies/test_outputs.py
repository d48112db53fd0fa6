"""Files for users: on this machine, whole or not at all, and never over what is theirs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.policies.errors import ConfigError
from anabranch.policies.outputs import (
    check_file,
    local_path,
    scratch_directory,
    write_file,
    write_files,
    write_new_file,
)

TEXTS = {"one": "1\n", "two": "ü" * 3000, "three": ""}


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("advice", "advice"),
        ("./s3a:/advice", "s3a:/advice"),
        ("C:/advice", "C:/advice"),
        ("file:///srv/an%20advice", "/srv/an advice"),
        ("file:/srv/advice", "/srv/advice"),
        ("file://localhost/srv", "/srv"),
    ],
)
def test_paths_of_this_machine(given: str, path: str) -> None:
    assert local_path(given, "--out") == Path(path)


@pytest.mark.parametrize("given", ["s3a://bucket/x", "hdfs://nn:8020/x", "abfss:/x", "HTTPS://host", "file://other/x"])
def test_paths_of_others(given: str) -> None:
    with pytest.raises(ConfigError, match=f"--out {given}: files are read and written on this machine alone"):
        local_path(given, "--out")


def test_files_appear_in_a_new_directory_and_in_one_that_is_there(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        for out in (tmp_path / "a" / "new", tmp_path):
            assert write_files(out, TEXTS, overwrite=False) == [out / name for name in TEXTS]
            assert {path.name for path in out.iterdir()} - {"a"} == set(TEXTS)
            assert [(out / name).read_text(encoding="utf-8") for name in TEXTS] == list(TEXTS.values())
            assert (out / "one").stat().st_mode & 0o777 == 0o640
        assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(umask)


def test_what_is_there_is_left_as_it_is_unless_it_may_go(tmp_path: Path) -> None:
    for there in ("one", "three"):
        out = tmp_path / there
        out.mkdir()
        (out / there).write_text("mine")
        with pytest.raises(ConfigError, match=f"{there} exists already and was left as it is"):
            write_files(out, TEXTS, overwrite=False)
        assert contents(out) == {there: "mine"}
        write_files(out, TEXTS, overwrite=True)
        assert contents(out) == TEXTS
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "two").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="two exists already"):
        write_files(tmp_path / "dangling", TEXTS, overwrite=False)


def test_one_file_that_cannot_be_written_asks_for_another_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "directory").mkdir()
    for path, overwrite, says in (
        (tmp_path / "there", False, "there exists already and was left as it is; give another file, or replace it"),
        (tmp_path / "directory", True, "directory is in the way: a file of that name is to be written; give another f"),
        (tmp_path / "there" / "out", True, "there is in the way: a directory is needed there; give another file"),
    ):
        attempts: list[Callable[[], object]] = [
            lambda: check_file(path, overwrite=overwrite),  # noqa: B023  called here
            lambda: write_file(path, lambda written: written.write_text("ours"), overwrite=overwrite),  # noqa: B023
        ]
        for attempt in attempts:
            with pytest.raises(ConfigError, match=re.escape(says)):
                attempt()
    new = tmp_path / "new"
    with pytest.raises(ConfigError, match=r"new exists already .* give another file"):  # it has come meanwhile
        write_file(new, lambda written: written.write_text("ours") and new.write_text("there"), overwrite=False)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "directory", "new"}
    assert [(tmp_path / name).read_text() for name in ("there", "new")] == ["mine", "there"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_in_the_way_leaves_nothing_behind(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "three").mkdir()
    with pytest.raises(ConfigError, match="three is in the way"):
        write_files(tmp_path, TEXTS, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["three"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is in the way: a directory is needed there"):
        write_files(tmp_path / "file" / "out", TEXTS, overwrite=overwrite)


_LIMITED = """
import resource, sys
from pathlib import Path
from anabranch.policies.outputs import write_files, write_new_file
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
out = Path(sys.argv[1])
for write in (
    lambda: write_files(out, {"small": "x", "large": "x" * 5000}, overwrite=True),
    lambda: write_files(out / "new", {"small": "x", "large": "x" * 5000}, overwrite=False),
    lambda: write_new_file(out / "file", "x" * 5000),
):
    try:
        write()
    except OSError as error:
        print(error.strerror)
"""


def test_where_it_does_not_fit_nothing_appears_and_what_was_there_stays(tmp_path: Path) -> None:
    write_files(tmp_path, {"small": "old", "large": "old"}, overwrite=False)
    command = [sys.executable, "-c", _LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n" * 3
    assert contents(tmp_path) == {"small": "old", "large": "old"}


def test_a_new_file_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "made" / "stores.yaml"
    write_new_file(path, "mine")
    for taken in (path, path.parent, path / "inside"):
        with pytest.raises(FileExistsError) as caught:
            write_new_file(taken, "other")
        assert caught.value.filename == str(path if taken == path / "inside" else taken)
    assert path.read_text() == "mine"
    assert [entry.name for entry in (*tmp_path.iterdir(), *path.parent.iterdir())] == ["made", "stores.yaml"]


_HOLD = """
import sys
from pathlib import Path
from anabranch.policies.outputs import scratch_directory
with scratch_directory(Path(sys.argv[1]), "anabranch") as path:
    (path / "trace.parquet").write_bytes(b"x")
    print(path, flush=True)
    sys.stdin.read()
"""


def test_scratch_of_killed_processes_goes_and_that_of_others_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    alive, killed = (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    assert alive.stdout is not None and killed.stdout is not None
    held, left = Path(alive.stdout.readline().strip()), Path(killed.stdout.readline().strip())
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    lookalikes = {tmp_path / ".anabranch.tmp", tmp_path / ".other.0123456789abcdef.tmp"}
    for path in lookalikes:
        path.mkdir()
    assert (left / "trace.parquet").exists()
    with scratch_directory(tmp_path, "anabranch") as mine:
        assert mine.stat().st_mode & 0o777 == 0o700
        assert set(tmp_path.iterdir()) == lookalikes | {held, mine}
    alive.communicate("")
    assert alive.returncode == 0
    assert set(tmp_path.iterdir()) == lookalikes
