"""The demo: what it prints, and what it leaves alone."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from examples.demo.__main__ import MARKER, _unpack
from examples.demo.loop import run_loop

from anabranch import Config, JournalOptions, StoreConfig, Sync
from anabranch.policies.advisor import UsageEvent
from anabranch.policies.errors import ConfigError


def archive(path: Path, *names: str) -> Path:
    """A tar of empty files."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


@pytest.mark.campaign  # the whole of it, with Spark
def test_it_prints_a_screen_and_a_half(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines[:-3])) <= 80, "all but paths"
    assert "every figure is equal." in " ".join(done.stdout.split())
    assert [line.split()[1] for line in lines[-2:]] == ["explain", "recommend"]


@pytest.mark.parametrize("kept", ["broker", "replayed"])
def test_what_it_did_not_make_it_does_not_delete(tmp_path: Path, kept: str) -> None:
    mine = tmp_path / "out" / kept / "precious.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=f"{kept} exists and was not made by this demo.*--out") as caught:
        _unpack(archive(tmp_path / "a.tar", "kaha/db-1.log"), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert mine.read_text() == "mine"


def test_the_loop_takes_less_disk_and_loses_nothing(tmp_path: Path) -> None:
    """Among what is quick, one of `slow` each 40: in one store they keep every file."""
    events = [
        UsageEvent(seq, float(seq), op, f"queue://{name}", f"{name}{number}", 0, None, 1, None, 2000)
        for seq, (op, name, number) in enumerate(
            (op, name, number)
            for number in range(4000)
            for op, name in (("send", "quick"), ("ack", "quick"), ("send", "slow"))
            if name == "quick" or number % 40 == 0
        )
    ]
    options = JournalOptions(sync=Sync.NEVER, segment_size=512 << 10, pool_files=0, compact_live_percent=0)
    config = Config(tmp_path / "data", [StoreConfig("all", [">"], journal=options)], usage={})
    loop = run_loop(config, tmp_path / "advice", events)
    assert (loop.pending, loop.expected) == (100, 100)
    assert (loop.moved_destinations, loop.moved_messages) == (1, 50)
    assert loop.moved[1] < loop.before[1] / 2
    assert sum(loop.operations) == len(events)
    assert "100 messages of 100 that were not acked" in loop.sentences()[-1]


def test_a_bad_archive_costs_nothing(tmp_path: Path) -> None:
    journal = _unpack(archive(tmp_path / "a.tar", "kaha/db-1.log", "kaha/archive/db-0.log"), tmp_path / "out")
    assert journal == tmp_path / "out" / "broker" / "kaha"
    (tmp_path / "bad.tar.xz").write_bytes(b"no archive")
    for bad in (tmp_path / "bad.tar.xz", tmp_path / "missing.tar", archive(tmp_path / "empty.tar", "readme")):
        with pytest.raises(ConfigError) as caught:
            _unpack(bad, tmp_path / "out")
        assert str(bad) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert (journal / "db-1.log").exists()


def test_what_it_made_it_makes_anew(tmp_path: Path) -> None:
    for _ in range(2):
        _unpack(archive(tmp_path / "a.tar", "db-1.log"), tmp_path)
        (tmp_path / "broker" / "old.txt").touch()
        (tmp_path / "replayed" / "together").mkdir()
    _unpack(archive(tmp_path / "a.tar", "db-1.log"), tmp_path)
    assert sorted(path.name for path in (tmp_path / "broker").iterdir()) == sorted([MARKER, "db-1.log"])
    assert [path.name for path in (tmp_path / "replayed").iterdir()] == [MARKER]
