"""Reading a configuration: YAML in, models out, with every error of the file at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, Problem
from ..names.destination import wildcard_in
from ..paths import from_home
from . import yaml_lines
from .adapters import kind_in, known_kinds
from .fields import Base, given, variables_of
from .models import Config, validated_options
from .options import is_shared, refused_to_clients
from .problems import Located, describe_value, did_you_mean, explain
from .yaml_lines import Document

_EMPTY = "the file says nothing; the least is a directory and one store, and `anabranch init` writes an example"


def load(path: str | Path, *, names_suffice: bool = False) -> Config:
    """Load the configuration in a file. Relative directories start from the file's.

    With `names_suffice` the name of an environment variable that is not set stands for its value. That is for callers
    that open no store. Raises ConfigError.
    """
    if not isinstance(path, str | PathLike):
        kind = type(path).__name__
        raise TypeError(f"a configuration is the path of a file, or an anabranch.Config, not {kind}: {path!r}")
    path = from_home(path)
    config = _loads(_read(path), Base(path.parent.absolute(), names_suffice), str(path))
    config._remember_file(path)
    return config


def warnings(path: str | Path) -> list[Problem]:
    """Return what is allowed in a file and probably not meant, in the order of its lines. Variables of the environment
    need not be set. Raises ConfigError for a file that is wrong."""
    path = from_home(path)
    config, document = load(path, names_suffice=True), yaml_lines.parse(_read(path))
    found = [Problem(p.describe(document.data), document.line(p.path)) for p in _doubts(config)]
    return sorted(found, key=lambda problem: problem.line)


def _doubts(config: Config) -> Iterator[Located]:
    """Yield each pattern and each name of a dead-letter queue that probably means something else, and each shared store
    of a shared directory."""
    for place, store in enumerate(config.stores):
        if config.shared and is_shared(store.options):
            yield Located(("stores", place, store.kind, "shared"), refused_to_clients(store.name))
        for index, text in enumerate(store.match):
            segments = text.rpartition("://")[2].split(".")
            if "#" in segments:
                yield Located(
                    ("stores", place, "match", index),
                    f"pattern {text!r}: # is no wildcard here, it matches a segment of that name. A last segment > "
                    "matches all the rest, as in 'orders.>', and * one segment; write [#] if # is meant",
                )
            if any(segment != ">" and ">" in re.sub(r"\[.*?\]", "", segment) for segment in segments):
                yield Located(
                    ("stores", place, "match", index),
                    f"pattern {text!r}: > is a wildcard as a whole last segment alone, behind a dot, as in 'orders.>'; "
                    "write [>] if > is meant",
                )
        queue = given(store.options).get("dead_letter")
        doubt = _of_queue(queue) if isinstance(queue, str) and "dead_letter" not in variables_of(store.options) else ""
        if doubt:
            yield Located(("stores", place, store.kind, "dead_letter"), f"{queue!r} is {doubt}")


def _of_queue(queue: str) -> str:
    if (wildcard := wildcard_in(queue)) is not None:
        return (
            f"the name of a queue, in which {wildcard} is no wildcard; {{name}} stands for the destination that a "
            "message comes from"
        )
    if set("{}") & set(queue.replace("{name}", "")):
        return "the name of a queue with braces in it; only {name} stands for the destination that a message comes from"
    if queue.rpartition("://")[2] == "{name}":
        return (
            "the queue itself that a message comes from: there it stays, and is delivered again and again; give "
            "another name, such as `dlq.{name}`"
        )
    return ""


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
    """Return the data of a file, with `defaults` in each store and absolute directories. Secrets are the names of their
    environment variables, which need not be set. Raises ConfigError."""
    path = from_home(path)
    config, document = load(path, names_suffice=True), yaml_lines.parse(_read(path))
    data: dict[str, Any] = _with_defaults(document.data, _defaults(document, Base(path.parent.absolute()))[0])
    stores = []
    for said, store in zip(data["stores"], config.stores, strict=True):
        options = {store.kind: _absolute(said[store.kind], store.options)} if said.get(store.kind) else {}
        stores.append({**_absolute(said, store), **options})
    plain = {**_absolute(data, config), "stores": stores}
    if config.usage is not None:
        plain["usage"] = _absolute(data["usage"], config.usage)
    return plain


def _absolute(data: Mapping[str, Any], model: BaseModel) -> dict[str, Any]:
    """Return the data with the paths that the model made of it."""
    return {key: str(value) if isinstance(value := getattr(model, key, None), Path) else data[key] for key in data}


def loads(text: str, base: str | Path, *, names_suffice: bool = False) -> Config:
    """Load the configuration in a text. Relative directories start from `base`; `names_suffice` is that of `load`.
    Raises ConfigError."""
    return _loads(text, Base(Path(base).absolute(), names_suffice), None)


def _loads(text: str, base: Base, name: str | None) -> Config:
    document = yaml_lines.parse(text)
    if document.data is None:
        raise ConfigError(document.problems or [Problem(_EMPTY)], name)
    base = replace(base, where=lambda path: f" (line {document.line(path)})")
    config = None
    defaults, found = _defaults(document, base)
    try:
        config = Config.model_validate(_with_defaults(document.data, defaults), context=base)
    except ValidationError as error:
        told = frozenset(found)
        found += [problem for problem in explain(error, Config) if _in_defaults(problem, document) not in told]
    problems = list(document.problems)
    problems += [Problem(p.describe(document.data), document.line(p.path), p.of_variable) for p in found]
    if config is None or problems:
        problems.sort(key=lambda problem: problem.line)
        raise ConfigError(problems, name)
    config._remember_lines(document.line(("stores", place)) for place in range(len(config.stores)))
    return config


# Store defaults ------------------------------------------------------------------------------------------------------


def _defaults(document: Document, base: Base) -> tuple[Mapping[str, Any], list[Located]]:
    """Return the section `defaults`, by kind, and its problems, whether or not a store uses it."""
    defaults = given(document.data).get("defaults")
    if not isinstance(defaults, dict):
        text = f"expected a mapping of kinds of stores; found {describe_value(defaults)}"
        return {}, [] if defaults is None else [Located(("defaults",), text)]
    found: list[Located] = []
    for kind, options in defaults.items():
        if kind not in known_kinds():
            found.append(Located(("defaults", kind), f"unknown kind of store; {did_you_mean(kind, known_kinds())}"))
            continue
        for problem in validated_options(kind, options, base)[1]:
            path = ("defaults", *problem.path)
            # Else it is about an option that is missing here and may stand in each store.
            if path in document.lines and not problem.of_variable:
                found.append(Located(path, problem.text))
    return defaults, found


def _with_defaults(data: Any, defaults: Mapping[str, Any]) -> Any:
    """Return the data without its section `defaults`, each store with the options that it does not give itself."""
    if not isinstance(data, dict):
        return data
    data = {key: value for key, value in data.items() if key != "defaults"}
    if isinstance(data.get("stores"), list):
        data["stores"] = [_store_with_defaults(store, defaults) for store in data["stores"]]
    return data


def _store_with_defaults(store: Any, defaults: Mapping[str, Any]) -> Any:
    if not isinstance(store, dict):
        return store
    kind = kind_in(store)
    general, own = defaults.get(kind), store.get(kind)
    if not isinstance(general, dict) or not (own is None or isinstance(own, dict)):
        return store
    own = own or {}
    replaced = {key.removesuffix("_env") for key in own} | {f"{key}_env" for key in own}
    return {**store, kind: {**{key: value for key, value in general.items() if key not in replaced}, **own}}


def _in_defaults(problem: Located, document: Document) -> Located | None:
    """Return a store's problem as one of `defaults`, if the value came from there."""
    option = problem.path[:4]
    return replace(problem, path=("defaults", *problem.path[2:])) if option not in document.lines else None
