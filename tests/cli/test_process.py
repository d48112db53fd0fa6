"""The command as a process of its own: how it starts, how it ends."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.router import cli

LOGGER = "anabranch.router.placement.on_disk.in_force"
ANABRANCH = [sys.executable, "-m", "anabranch"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_module_and_the_script_are_one() -> None:
    module = run(*ANABRANCH, "--version")
    script = run(str(Path(sys.executable).with_name("anabranch")), "--version")
    assert module.stdout == script.stdout
    assert module.stdout.startswith("anabranch ")
    assert (module.returncode, script.returncode) == (0, 0)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['anabranch', '--help']; from anabranch.router.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'pyspark', 'pandas', 'numpy', 'numba', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr


def test_without_the_extra_there_is_one_clear_line() -> None:
    for module in ("click", "rich"):
        code = f"import sys; sys.modules[{module!r}] = None; sys.argv = ['anabranch', 'explain', '/nowhere']; "
        result = run(sys.executable, "-c", code + "from anabranch.router.cli import main; main()")
        assert result.returncode == 1
        assert result.stderr == "The command line is not installed; install it with: pip install 'anabranch[cli]'\n"


def test_the_version_needs_no_extra() -> None:
    hidden = "import sys; sys.modules['click'] = None; sys.argv = ['anabranch', '--version']; "
    shown = run(sys.executable, "-c", hidden + "from anabranch.router.cli import main; main()")
    assert (shown.stdout, shown.returncode) == (run(*ANABRANCH, "--version").stdout, 0)


def test_errors_show_no_traceback(tmp_path: Path) -> None:
    result = run(*ANABRANCH, "check", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"{tmp_path}: the file cannot be read: Is a directory\n"


def test_a_warning_is_shown_once(tmp_path: Path) -> None:
    """By Python itself in a program that has not set up logging, by that once it has, and by commands that show it."""
    file, data = tmp_path / "stores.yaml", tmp_path / "data"
    file.write_text("directory: data\nstores: [{name: all, match: ['>'], journal: {sync: never}}]\n")
    with anabranch.open(file):
        pass
    (data / "in-force.yaml").unlink()
    (data / "in-force.yaml").symlink_to(file)
    program = f"import anabranch; anabranch.open({str(file)!r}).close()"
    told = f"the configuration in force is not written to {data / 'in-force.yaml'}: "
    for command, says in (
        ([sys.executable, "-c", program], told),
        ([sys.executable, "-c", f"import logging; logging.basicConfig(); {program}"], f"WARNING:{LOGGER}:{told}"),
        ([*ANABRANCH, "queues", "-c", str(file)], f"Warning: {told}"),
    ):
        lines = run(*command).stderr.splitlines()
        assert [line.startswith(says) for line in lines].count(True) == 1
        assert len(lines) == len(set(lines)) == 2  # it is not read, nor written
    assert run(*ANABRANCH, "transactions", "-c", str(file)).stderr == ""
    silent = "import logging; logging.getLogger('anabranch').setLevel('ERROR'); "
    assert run(sys.executable, "-c", silent + program).stderr == ""


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGINT, 130, "Interrupted.\n"),
        (signal.SIGTERM, 143, "Terminated.\n"),
        (signal.SIGHUP, 129, "Hung up.\n"),
    ],
)
def test_interrupted_it_says_so_and_exits_with_130(tmp_path: Path, number: int, code: int, says: str) -> None:
    """And terminated or hung up likewise, with their own codes."""
    path = tmp_path / "stores.yaml"
    os.mkfifo(path)
    process = subprocess.Popen(
        [*ANABRANCH, "check", str(path)], stdout=-1, stderr=-1, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup it would be ignored
    )  # fmt: skip
    with path.open("w"):  # opens once the command reads, and then it waits for what never comes
        process.send_signal(number)
    # The end of the file comes after the signal: a command that the signal met between two looks at the flag and its
    # call of read() would sleep on there for ever, and only then sees to what was sent.
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (code, "", says)


def test_told_twice_to_end_it_still_cleans_up(tmp_path: Path) -> None:
    """As `timeout` tells it: the process, then the process group."""
    code = (
        "import os, signal, sys, anabranch.router.cli as cli, anabranch.router.cli.configuration as check\n"
        "def load(path):\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        print('cleaned up')\n"
        "check.load = load; sys.argv = ['anabranch', 'check', 'x']; cli.main()"
    )
    result = run(sys.executable, "-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (143, "cleaned up\n", "Terminated.\n")


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    code = (
        "import os, signal, sys, anabranch.router.cli as cli, anabranch.router.cli.configuration as init\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "init.write_new_file = lambda path, text: os.kill(os.getpid(), signal.SIGHUP)\n"
        "sys.argv = ['anabranch', 'init', 'x']; cli.main()"
    )
    result = run(sys.executable, "-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        "Wrote x. Look through it, then: anabranch check x\n",
        "",
    )


_ONCE_COPIED = """
import os, signal, sys
import anabranch.router.cli as cli
from anabranch.policies.advisor.advice import opening
write_trace = opening.write_trace

def end(table, path):  # Spark runs, and is about to read it
    write_trace(table, path)
    print(*sorted(path.name for root in os.scandir(os.environ["TMPDIR"]) for path in os.scandir(root)), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

opening.write_trace = end
if sys.argv.pop() == "no Java":
    opening.spark_session = lambda master: None
cli.main()
"""


@pytest.mark.parametrize("spark", ["no Java", pytest.param("Spark", marks=pytest.mark.campaign)])
def test_terminated_at_work_it_leaves_no_copy_of_the_trace(tmp_path: Path, spark: str) -> None:
    """Nor does one stay that a run left which was killed outright. All but Java, which takes many seconds to start, is
    there each time."""
    (tmp_path / "t.csv").write_text("seq,ts,op,destination,message_id,size\n0,1,send,a,1,9\n1,2,ack,a,1,9\n")
    scratch = tmp_path / "scratch"
    (scratch / ".anabranch.0123456789abcdef.tmp").mkdir(parents=True)
    (scratch / ".anabranch.0123456789abcdef.tmp" / "trace.parquet").touch()
    result = subprocess.run(
        [
            sys.executable, "-c", _ONCE_COPIED,
            "recommend", "--trace", "t.csv", "--out", "advice", "--engine", "spark", spark,
        ],
        cwd=tmp_path, env=os.environ | {"TMPDIR": str(scratch)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (143, "Terminated.\n")
    assert result.stdout.split().count("trace.parquet") == 1  # its own; the other is gone already
    assert not [path for path in scratch.iterdir() if "anabranch" in path.name]
    assert not (tmp_path / "advice").exists()


def test_a_reader_who_leaves_is_no_error() -> None:
    process = subprocess.Popen([*ANABRANCH, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(timeout=300)


def test_interrupted_as_it_loads_what_it_needs_it_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def interrupted(name: str, *given: Any) -> Any:
        if name.endswith("system.acceleration"):
            raise KeyboardInterrupt
        return load(name, *given)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    monkeypatch.undo()
    assert ended.value.code == 130
