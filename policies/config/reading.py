"""Reading a configuration: YAML in, models out, with every error of the file at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, Problem
from . import yaml_lines
from .checks import Outline, disagreements, doubts
from .fields import Base, from_home
from .kinds import DEFAULT_KIND, known_kinds
from .models import Config, validated_options
from .problems import Located, describe_value, did_you_mean, explain
from .yaml_lines import Document

_EMPTY = "the file says nothing; the least is a directory and one store, and `anabranch init` writes an example"


def load(path: str | Path, *, names_suffice: bool = False) -> Config:
    """The configuration in a file. Relative directories start from the file's. With `names_suffice` the name of an
    environment variable that is not set stands for what it would hold: for who opens no store. Raises ConfigError."""
    if not isinstance(path, str | PathLike):
        kind = type(path).__name__
        raise TypeError(f"a configuration is the path of a file, or an anabranch.Config, not {kind}: {path!r}")
    path = from_home(path)
    config = _loads(_read(path), Base(path.parent.absolute(), names_suffice), str(path))
    config._remember_file(path)
    return config


def warnings(path: str | Path) -> list[Problem]:
    """What is right in a file, and probably not what was meant, in the order of its lines; of one that `load` takes.
    Raises ConfigError if it cannot be read."""
    path = from_home(path)
    document = yaml_lines.parse(_read(path))
    defaults = _defaults(document, [], Base(path.parent.absolute()))
    data = _with_defaults(document.data, defaults)
    found = doubts(_outlines(data, path.parent.absolute())[1])
    return sorted((Problem(p.describe(data), document.line(p.path)) for p in found), key=lambda problem: problem.line)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(["no such file; `anabranch init` writes one"], str(path)) from None
    except OSError as error:
        raise ConfigError([f"the file cannot be read: {error.strerror}"], str(path)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem("not UTF-8; save the file as UTF-8", line)], str(path)) from None


def as_plain_data(path: str | Path) -> dict[str, Any]:
    """What a file says that `load` takes: `defaults` in each store, directories absolute, secrets as the names of their
    environment variables, which need not be set. Raises ConfigError."""
    path = from_home(path)
    config, document = load(path, names_suffice=True), yaml_lines.parse(_read(path))
    data: dict[str, Any] = _with_defaults(document.data, _defaults(document, [], Base(path.parent.absolute())))
    stores = []
    for given, store in zip(data["stores"], config.stores, strict=True):
        options = {store.kind: _absolute(given[store.kind], store.options)} if given.get(store.kind) else {}
        stores.append({**_absolute(given, store), **options})
    plain = {**_absolute(data, config), "stores": stores}
    if config.usage is not None:
        plain["usage"] = _absolute(data["usage"], config.usage)
    return plain


def _absolute(data: Mapping[str, Any], model: BaseModel) -> dict[str, Any]:
    """What the model has as paths, as the model has it."""
    return {key: str(value) if isinstance(value := getattr(model, key, None), Path) else data[key] for key in data}


def loads(text: str, base: str | Path, *, names_suffice: bool = False) -> Config:
    """The configuration in a text. Relative directories start from `base`; the rest as `load`. Raises ConfigError."""
    return _loads(text, Base(Path(base).absolute(), names_suffice), None)


def _loads(text: str, base: Base, name: str | None) -> Config:
    document = yaml_lines.parse(text)
    if document.data is None:
        raise ConfigError(document.problems or [Problem(_EMPTY)], name)
    found: list[Located] = []
    config = None
    defaults = _defaults(document, found, base)
    data = _with_defaults(document.data, defaults)
    try:
        config = Config.model_validate(data, context=base)
    except ValidationError as error:
        found += [problem for problem in explain(error, Config) if not _is_of_defaults(problem.path, document)]
    found += disagreements(*_outlines(data, base.directory), lambda path: f" (line {document.line(path)})")
    problems = document.problems + [Problem(p.describe(data), document.line(p.path)) for p in found]
    if config is None or problems:
        problems.sort(key=lambda problem: problem.line)
        raise ConfigError(problems, name)
    config._remember_lines(document.line(("stores", place)) for place in range(len(config.stores)))
    return config


# Store defaults ------------------------------------------------------------------------------------------------------


def _defaults(document: Document, found: list[Located], base: Base) -> Mapping[str, Any]:
    """What `defaults:` says, by kind; what is wrong in it joins `found`, whether or not a store uses it."""
    if not isinstance(document.data, dict) or document.data.get("defaults") is None:
        return {}
    defaults = document.data["defaults"]
    if not isinstance(defaults, dict):
        text = f"expected a mapping of kinds of stores; found {describe_value(defaults)}"
        found.append(Located(("defaults",), text))
        return {}
    for kind, options in defaults.items():
        if kind not in known_kinds():
            found.append(Located(("defaults", kind), f"unknown kind of store; {did_you_mean(kind, known_kinds())}"))
            continue
        for problem in validated_options(kind, options, base)[1]:
            path = ("defaults", *problem.path)
            if path in document.lines:  # else it is an option that is missing here and may stand in each store
                found.append(Located(path, problem.text))
    return defaults


def _with_defaults(data: Any, defaults: Mapping[str, Any]) -> Any:
    """The data without its section `defaults`, each store with the options that it does not give itself."""
    if not isinstance(data, dict):
        return data
    data = {key: value for key, value in data.items() if key != "defaults"}
    if isinstance(data.get("stores"), list):
        data["stores"] = [_store_with_defaults(store, defaults) for store in data["stores"]]
    return data


def _store_with_defaults(store: Any, defaults: Mapping[str, Any]) -> Any:
    if not isinstance(store, dict):
        return store
    kind = _kind(store)
    general, own = defaults.get(kind), store.get(kind)
    if not isinstance(general, dict) or not (own is None or isinstance(own, dict)):
        return store
    own = own or {}
    replaced = {key.removesuffix("_env") for key in own} | {f"{key}_env" for key in own}
    return {**store, kind: {**{key: value for key, value in general.items() if key not in replaced}, **own}}


def _kind(store: dict[Any, Any]) -> str:
    return next((kind for kind in known_kinds() if kind in store), DEFAULT_KIND)


def _is_of_defaults(path: yaml_lines.Path, document: Document) -> bool:
    """Whether a problem in a store lies in a value that came from `defaults`, where it is reported once."""
    option = path[:4]
    return len(option) == 4 and option not in document.lines and ("defaults", *option[2:]) in document.lines


# What stores look like even where something in them is wrong ---------------------------------------------------------


def _outlines(data: Any, base: Path) -> tuple[Path | None, list[Outline]]:
    if not isinstance(data, dict):
        return None, []
    stores = data.get("stores")
    return _path(data.get("directory"), base), list(_each_outline(stores if isinstance(stores, list) else [], base))


def _each_outline(stores: list[Any], base: Path) -> Iterator[Outline]:
    for place, store in enumerate(stores):
        if isinstance(store, dict):
            name, match = store.get("name"), store.get("match")
            kind = _kind(store)
            options = store.get(kind)
            yield Outline(
                place,
                name if isinstance(name, str) else None,
                match if isinstance(match, list) else (),
                _path(store.get("directory"), base),
                _path(store.get("index_directory"), base),
                kind,
                options.get("dead_letter") if isinstance(options, dict) else None,
                options if isinstance(options, dict) else {},
            )


def _path(value: object, base: Path) -> Path | None:
    return base / from_home(value) if isinstance(value, str) and value else None
