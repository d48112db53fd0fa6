"""Does a wheel hold exactly our packages? Run by CI: `python tests/packaging/wheel_contents.py dist/*.whl`, and with
`--pure` for one that was built without a C compiler."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]


def problems(wheel: Path, pure: bool) -> list[str]:
    """What is wrong with a wheel, a sentence each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    expected = {package.replace(".", "/") for package in project["tool"]["setuptools"]["packages"]}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
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
    wrong += [f"holds {name}" for name in modules if name.suffix not in (".py", ".so") and str(name) not in data]
    if "anabranch = anabranch.router.cli:main" not in entry_points:
        wrong.append("has no command `anabranch`")
    return wrong


def source_folder(project: dict[str, object], package: str) -> Path:
    """Where a package's modules are in the tree."""
    folders: dict[str, str] = project["tool"]["setuptools"]["package-dir"]  # type: ignore[index]
    parent = max((name for name in folders if f"{package}/".startswith(name.replace(".", "/") + "/")), key=len)
    return ROOT / folders[parent] / package[len(parent) :].lstrip("/")


def main(arguments: list[str]) -> int:
    pure, wheels = "--pure" in arguments, [name for name in arguments if name != "--pure"]
    found = [f"{wheel}: {problem}" for wheel in wheels for problem in problems(Path(wheel), pure)]
    print("\n".join(found) or f"{' '.join(wheels)}: every package, nothing else")
    return 1 if found or not wheels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
