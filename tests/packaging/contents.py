"""Does a wheel hold exactly our packages, and an sdist all that a wheel is built of? Run by CI:
`python tests/packaging/contents.py dist/*`, and with `--pure` for wheels that were built without a C compiler."""

from __future__ import annotations

import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def problems(built: Path, pure: bool) -> list[str]:
    """What is wrong with a wheel or an sdist, a sentence each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return of_wheel(built, project, pure) if built.suffix == ".whl" else of_sdist(built, project)


def of_sdist(sdist: Path, project: dict[str, Any]) -> list[str]:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    setup = project["tool"]["setuptools"]
    wanted = {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"}
    wanted.update(name for one in setup["ext-modules"] for name in (*one["sources"], *one["depends"]))
    for package in setup["packages"]:
        folder = source_folder(project, package.replace(".", "/"))
        patterns = ["*.py", *setup["package-data"].get(package, [])]
        wanted.update(str(path.relative_to(ROOT)) for pattern in patterns for path in folder.glob(pattern))
    # What a distributor builds the pages of, and tests with.
    for top, pattern in (("docs", "*.*"), ("examples", "*"), ("tests", "*.*"), (".ci", "*")):
        files = (path for path in (ROOT / top).rglob(pattern) if path.is_file() and "__pycache__" not in path.parts)
        wanted.update(str(path.relative_to(ROOT)) for path in files if path.suffix not in (".so", ".nbi", ".nbc"))
    translated = {str(Path(name).with_suffix(".c")) for name in wanted if name.endswith(".pyx")}
    made = {name for name in names if name.endswith(".so")} | translated & names
    return [f"misses {name}" for name in sorted(wanted - names)] + [f"holds {name}" for name in sorted(made)]


def of_wheel(wheel: Path, project: dict[str, Any], pure: bool) -> list[str]:
    expected = {package.replace(".", "/") for package in project["tool"]["setuptools"]["packages"]}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        metadata = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        entry_points = archive.read(f"{metadata}/entry_points.txt").decode()
    modules = [PurePosixPath(name) for name in names if not name.startswith(f"{metadata}/")]
    packages = {str(name.parent) for name in modules if name.name == "__init__.py"}
    strangers = {str(name) for name in modules if str(name.parent) not in expected}
    wrong = [f"misses the package {package}" for package in sorted(expected - packages)]
    wrong += [f"holds {name}, which is in no package of ours" for name in sorted(strangers)]
    declared = project["tool"]["setuptools"]["package-data"]
    data = {f"{package.replace('.', '/')}/{name}" for package, files in declared.items() for name in files}
    wrong += [f"misses {name}" for name in sorted({*data, f"{metadata}/licenses/LICENSE"}) if name not in names]
    for package in sorted(expected & packages):
        source = source_folder(project, package)
        missing = {path.name for path in source.glob("*.py")} - {
            name.name for name in modules if str(name.parent) == package
        }
        wrong += [f"misses {package}/{name}" for name in sorted(missing)]
    compiled = {extension["name"].replace(".", "/") for extension in project["tool"]["setuptools"]["ext-modules"]}
    libraries = {str(name).partition(".")[0] for name in modules if name.suffix == ".so"}
    if libraries != (set() if pure else compiled):
        wrong.append(f"has compiled {sorted(libraries) or 'nothing'}")
    if libraries and wheel.name.endswith("-linux_x86_64.whl"):
        wrong.append("has no manylinux tag, without which no index takes it")
    wrong += [f"holds {name}" for name in modules if name.suffix not in (".py", ".so") and str(name) not in data]
    if "anabranch = anabranch.router.cli:main" not in entry_points:
        wrong.append("has no command `anabranch`")
    return wrong


def source_folder(project: dict[str, Any], package: str) -> Path:
    """Where a package's modules are in the tree."""
    folders: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    parent = max((name for name in folders if f"{package}/".startswith(name.replace(".", "/") + "/")), key=len)
    return ROOT / folders[parent] / package[len(parent) :].lstrip("/")


def main(arguments: list[str]) -> int:
    pure, built = "--pure" in arguments, [name for name in arguments if name != "--pure"]
    found = [f"{one}: {problem}" for one in built for problem in problems(Path(one), pure)]
    print("\n".join(found) or f"{' '.join(built)}: every package, nothing else")
    return 1 if found or not built else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
