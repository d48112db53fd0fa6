"""The command as a process of its own: how it starts, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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


def test_errors_show_no_traceback(tmp_path: Path) -> None:
    result = run(*ANABRANCH, "check", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"{tmp_path}: the file cannot be read: Is a directory\n"


def test_interrupted_it_says_so_and_exits_with_130(tmp_path: Path) -> None:
    path = tmp_path / "stores.yaml"
    os.mkfifo(path)
    process = subprocess.Popen([*ANABRANCH, "check", str(path)], stdout=-1, stderr=-1, text=True)
    with path.open("w"):  # opens once the command reads, and then it waits for what never comes
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "Interrupted.\n")


def test_a_reader_who_leaves_is_no_error() -> None:
    process = subprocess.Popen([*ANABRANCH, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(timeout=300)
