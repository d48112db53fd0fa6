"""A configuration as the text of a file, which loads back as the same one, and holds no secret.

    text = dump_yaml(config)                      # loads(text, anywhere) == config
    text = dump_yaml(config, config.directory)    # its paths start from there: the directory can be moved

A value that was taken from the environment is written as `x_env: NAME`, as it was given. A secret that was given
literally is written as `x_env: ANABRANCH_<STORE>_<X>` below a comment that says so: who loads the text either sets that
variable, or is told that it is missing. An object of Python's is replaced by a comment, or by a name that leads
nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticSerializationError

from ..paths import URL_SCHEME
from .adapters import DEFAULT_KIND
from .fields import Options, octal, takes_text, variables_of
from .models import Config, StoreConfig

NOWHERE: Final = "given_from_python:not_written"
"""The text that stands for a function without a name."""

Notes = Sequence[str]


def dump_yaml(config: Config, base: Path | None = None) -> str:
    """Return the text of a file that says the same. Paths in `base` start from there, and the text is to be loaded from
    there. Without `base` all paths are absolute."""
    return document(_top(config, base), [_store(store, base) for store in config.stores])


def plain_data(config: Config, base: Path | None = None) -> dict[str, Any]:
    """Return the data that `dump_yaml` writes, without its comments."""
    return {**_top(config, base), "stores": [_store(store, base)[0] for store in config.stores]}


def document(top: Mapping[str, Any], stores: Iterable[tuple[Mapping[str, Any], Notes]], head: Notes = ()) -> str:
    """Return the text of a file: comments, the entries beside `stores`, and each store under its notes."""
    lines = [f"# {line}" for line in head]
    lines += [dump(top).rstrip(), "stores:"]
    for data, notes in stores:
        lines += [f"  # {note}" for note in notes]
        lines += [f"  {line}" for line in dump([data]).rstrip("\n").split("\n")]
    return "\n".join(lines) + "\n"


def dump(data: object) -> str:
    """Return plain data as YAML, as people write it."""
    written = _as_written(data)
    try:
        return _text(written, _FAST)
    except UnicodeEncodeError:  # of a path that is no UTF-8
        return _text(written, _Dumper)


def _text(data: object, dumper: Any) -> str:
    text: str = yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


class _Dumper(yaml.SafeDumper):
    """PyYAML's own, which would break a line where a text has U+0085."""


def _text_node(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _text_node)
_FAST: Final = getattr(yaml, "CSafeDumper", _Dumper)


def _as_written(data: object) -> object:
    """Return the data with each `file_mode` in octal."""
    if isinstance(data, Mapping):
        return {
            key: octal(value) if key == "file_mode" and isinstance(value, int) else _as_written(value)
            for key, value in data.items()
        }
    return [_as_written(item) for item in data] if isinstance(data, list | tuple) else data


def _top(config: Config, base: Path | None) -> dict[str, Any]:
    """Return all that stands beside `stores`."""
    return _fields(config, base, {"stores"})


def _store(store: StoreConfig, base: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Return a store as the file has it, and notes on what of it is not written."""
    notes: list[str] = []
    data = _fields(store, base, {"kind", "options"})
    options = _options(store.options, base, store.name, notes)
    if options or store.kind != DEFAULT_KIND:
        data[store.kind] = options
    return data, notes


def _fields(model: BaseModel, base: Path | None, apart: set[str]) -> dict[str, Any]:
    """Return the fields that say more than their defaults, in the model's order. Fields that are written `apart` are
    left out."""
    data: dict[str, Any] = {}
    for key, info in type(model).model_fields.items():
        value = getattr(model, key)
        if key in apart:
            continue
        if isinstance(value, BaseModel):
            options = _options(value, base)
            if options or value != info.default:
                data[key] = options
        elif value != info.default:
            data[key] = _path(value, base) if isinstance(value, Path) else _plain(model, key)
    return data


def _plain(model: BaseModel, key: str) -> Any:
    return model.model_dump(mode="json", exclude_unset=True, include={key})[key]


def _options(options: BaseModel, base: Path | None, store: str = "", notes: list[str] | None = None) -> dict[str, Any]:
    """Return the options that were given. Words on those that cannot be written join `notes`."""
    data: dict[str, Any] = {}
    told: list[str] = [] if notes is None else notes
    variables, fields = variables_of(options), type(options).model_fields
    for key in (key for key in fields if key in options.model_fields_set):
        value = getattr(options, key)
        if key in variables:
            data[f"{key}_env"] = variables[key]
        elif value is None and fields[key].default is None:
            continue
        elif isinstance(value, Path):
            data[key] = _path(value, base)
        elif isinstance(value, SecretStr) and not (isinstance(options, Options) and options.may_be_shown(key)):
            variable = "_".join(["ANABRANCH", *re.findall("[A-Z0-9]+", f"{store}_{key}".upper())])
            told.append(f"{key} was given literally, which is not written here; set {variable}, or give it anew")
            if takes_text(fields[key]):
                data[f"{key}_env"] = variable
        else:
            secret = value.get_secret_value() if isinstance(value, SecretStr) else None
            try:
                data[key] = secret or _plain(options, key)
            except PydanticSerializationError:
                told.append(f"{key} is an object of Python's, which is not written here; give it anew")
                if key == "creator":  # without it the url alone would name another database
                    data[key] = NOWHERE
    return data


def _path(path: Path, base: Path | None) -> str:
    """Return a path that starts from `base`, if it lies there and reads as a path in a file."""
    text = str(path)
    if base is not None and path.is_relative_to(base):
        inside = str(path.relative_to(base))
        if inside.strip() and inside[0] != "~" and not URL_SCHEME.match(inside):
            return inside
    return text
