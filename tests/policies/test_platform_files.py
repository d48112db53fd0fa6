"""How a file is made durable on each platform, and which platforms will do (invariant 1)."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.policies import platform_files
from anabranch.policies.platform_files import sync_data, sync_directory, sync_file

from ..shares import Share

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = [path for folder in ("adapters", "policies", "router", "src") for path in (ROOT / folder).rglob("*.py")]
SYNCS = re.compile(r"\bos\.(f|fdata)?sync\b|fcntl\.F_(FULL|BARRIER)FSYNC|\bO_D?SYNC\b")

MISSING_ON_MACOS = {
    "os": [
        "fdatasync", "posix_fallocate", "posix_fadvise", "copy_file_range", "splice", "memfd_create", "eventfd",
        "pipe2", "getrandom", "sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "getresuid",
        "getresgid", "getxattr", "setxattr", "listxattr", "removexattr", "pidfd_open", "setns", "unshare", "O_DIRECT",
        "O_LARGEFILE", "O_NOATIME", "O_PATH", "O_RSYNC", "O_TMPFILE", "RWF_DSYNC", "RWF_SYNC", "RWF_APPEND",
    ],
    "resource": ["prlimit", "RUSAGE_THREAD"],
    "select": ["epoll"],
    "signal": ["sigtimedwait", "sigwaitinfo"],
    "socket": ["SOCK_CLOEXEC", "SOCK_NONBLOCK"],
    "time": ["CLOCK_BOOTTIME", "CLOCK_TAI"],
}  # fmt: skip
"""Names that Python has on Linux and not on macOS: "Availability" in its documentation of each module."""
REMOVE = f"""
import importlib, sys
for module, names in {MISSING_ON_MACOS!r}.items():
    for name in names:
        vars(importlib.import_module(module)).pop(name, None)
"""
GUARDED = {
    ("adapters/sql/database/lease.py", "time.CLOCK_BOOTTIME"),
    ("adapters/system/files.py", "os.posix_fallocate"),
    ("policies/platform_files.py", "os.fdatasync"),
    ("router/sharing/owner/control.py", "select.epoll"),
}
"""Where a module names some all the same, behind a question whether there is one."""
CONTRACT = f"""{REMOVE}
import os, pytest
assert not hasattr(os, "fdatasync")

class Share:
    def pytest_collection_modifyitems(self, items):
        items[:] = items[::int(sys.argv[1])]

options = ["-q", "-p", "no:cacheprovider", "--no-header"]
sys.exit(pytest.main([*options, *sys.argv[2:]], plugins=[Share()]))
"""
WINDOWS = """
import os, sys
del os.register_at_fork
sys.modules["fcntl"] = sys.modules["resource"] = None
sys.platform = "win32"
import anabranch
"""


def child(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"})


def test_one_module_says_how_a_file_is_made_durable() -> None:
    elsewhere = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in PRODUCT
        if path.resolve() != Path(platform_files.__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SYNCS.search(line)
    }
    assert not elsewhere, "ask policies/platform_files.py"


def test_the_compiled_loops_sync_where_that_module_says_so_alone() -> None:
    sources = [*ROOT.glob("adapters/**/*.pyx"), ROOT / "adapters/wal/appending/appender.c"]
    lines = [line.strip() for path in sources for line in path.read_text().splitlines()]
    calls = [line for line in lines if re.search(r"\bf(data)?sync\(\w", line)]
    assert calls == ["static int system_sync(int fd) { return fdatasync(fd) ? -errno : 0; }"]
    text = (ROOT / "adapters/wal/appending/compiled_appender.pyx").read_text()
    assert "cdef bint by_fdatasync = BY_FDATASYNC" in text
    changed = text[text.index("cdef bint changed = (") : text.index("if changed is not calls_python")]
    assert "or not by_fdatasync" in changed  # then it is sync_data that is called


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls that sync, in order; they do nothing."""
    made: list[str] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd, name=name: made.append(name))
    return made


def as_macos(monkeypatch: pytest.MonkeyPatch, calls: list[str], error: int = 0) -> None:
    """Make a platform with F_FULLFSYNC and without fdatasync, on a disk or a file system that answers with an error."""

    def full_sync(fd: int, command: int) -> int:
        assert command == 51
        calls.append("F_FULLFSYNC")
        if error:
            raise OSError(error, os.strerror(error))
        return 0

    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(platform_files, "FULL_SYNC", 51)
    monkeypatch.setattr(platform_files, "BY_FDATASYNC", False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)


def test_linux(calls: list[str], tmp_path: Path) -> None:
    for sync in (sync_data, sync_file):
        sync(0)
    sync_directory(tmp_path)
    assert calls == ["fdatasync", "fsync", "fsync"]


def test_macos(calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_macos(monkeypatch, calls)
    for sync in (sync_data, sync_file):
        sync(0)
    sync_directory(tmp_path)
    assert calls == ["F_FULLFSYNC"] * 3


@pytest.mark.parametrize("error", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_of_macos_that_knows_no_full_sync(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    as_macos(monkeypatch, calls, error)
    sync_data(0)
    assert calls == ["F_FULLFSYNC", "fsync"]


def test_an_error_of_the_disk_is_not_tried_again(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    as_macos(monkeypatch, calls, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_data(0)
    assert calls == ["F_FULLFSYNC"]


def test_a_platform_with_neither(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_files, "BY_FDATASYNC", False)
    sync_data(0)
    assert calls == ["fsync"]


def test_no_module_names_what_macos_lacks_unasked() -> None:
    named = {
        (str(path.relative_to(ROOT)), f"{node.value.id}.{node.attr}")
        for path in PRODUCT
        if any(name in (text := path.read_text()) for names in MISSING_ON_MACOS.values() for name in names)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.attr in MISSING_ON_MACOS.get(node.value.id, ())
    }
    assert named == GUARDED
    lines = [line for path in PRODUCT for line in path.read_text().splitlines()]
    imports = re.compile(rf"\s*from ({'|'.join(MISSING_ON_MACOS)}) import (.*)")
    taken = [(found[1], name) for line in lines if (found := imports.match(line)) for name in found[2].split(", ")]
    assert not [name for module, name in taken if name in MISSING_ON_MACOS[module]]


def test_the_contract_without_what_macos_lacks(share: Share) -> None:
    """Every fortieth test of it, in one process: what no module names is missed by none."""
    where = ("contract/test_journal.py::TestJournalAlways", "contract/test_memory.py", "router/test_router.py")
    done = child(CONTRACT, str(share.every(40)), *(f"tests/{one}" for one in where))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_windows_is_refused_in_one_sentence() -> None:
    done = child(WINDOWS)
    assert done.returncode == 1
    said = "ImportError: anabranch needs the files, locks and processes of POSIX: it runs on Linux and macOS, not on"
    assert done.stderr.splitlines()[-1] == f"{said} win32. On Windows use it inside WSL"
