"""Pydantic's errors in the words of the file: what was found, what is allowed, which key was probably meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from .yaml_lines import Path

FOLDED = "located"
"""The type of an error that carries problems already located, to be put at its own place."""

KIND_ALIAS, OPTIONS_ALIAS = "__kind__", "__options__"
"""The names of StoreConfig.kind and .options in pydantic's errors. The file has no such keys: the kind is the key."""

_FOUND_MAX = 60


class Hidden(str):
    """A text that is not to be shown in an error: it was a secret, or came from the environment."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Located:
    """Something wrong at a path of the configuration."""

    path: Path
    text: str
    of_variable: bool = False
    """The value came from the environment."""

    def describe(self, data: Any) -> str:
        """Return the message with its place before it: `store 'audit': journal.sync: expected ...`."""
        path, words = self.path, []
        if path[:1] == ("stores",) and len(path) > 1 and isinstance(path[1], int):
            words.append(f"store {_store_name(data, path[1])}")
            path = path[2:]
        if path:
            words.append("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip("."))
        return ": ".join([*words, self.text])


def fold(problems: Iterable[Located]) -> PydanticCustomError:
    """Return one error that carries many, for a validator to raise."""
    return PydanticCustomError(FOLDED, "several problems", {"located": list(problems)})


def explain(error: ValidationError, model: type[BaseModel]) -> list[Located]:
    """Return every problem of a failed validation, in the words of the file."""
    return [problem for details in error.errors() for problem in _explain_one(details, model)]


def did_you_mean(key: str, allowed: list[str]) -> str:
    """Return `did you mean 'sync'?`, or all that is allowed where nothing is near."""
    near = difflib.get_close_matches(key.lower(), allowed, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed) or 'nothing'}"


def describe_value(value: object) -> str:
    """Return a short description of what was found, in YAML's words."""
    if isinstance(value, Hidden):
        return "a value that is not shown"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= _FOUND_MAX else value[:_FOUND_MAX] + "...")
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return f"{value} (a {type(value).__name__})"


def _explain_one(details: ErrorDetails, model: type[BaseModel]) -> Iterator[Located]:
    path = tuple(part for part in details["loc"] if part not in (KIND_ALIAS, OPTIONS_ALIAS))
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == FOLDED:
        for inner in context["located"]:
            yield replace(inner, path=path + inner.path)
    elif kind == "missing":
        yield Located(path, "is missing, and is required")
    elif kind == "extra_forbidden":
        yield Located(path, _unknown_key(str(path[-1]), _model_at(model, path[:-1])))
    else:
        text = _expectation(kind, details["msg"], context)
        if isinstance(value, Hidden) and str(value):
            text = text.replace(str(value), "...")
        if kind == "value_error" and isinstance(value, Mapping):  # its own words name what of it is wrong
            yield Located(path, text)
            return
        bare = kind == "string_type" and not isinstance(value, list | tuple | Mapping | NoneType)
        quotes = "; put it in quotes if it is meant as text" if bare else ""
        if kind in _LISTS and path[-1:] == ("match",) and isinstance(value, str):  # of `match: >` YAML makes ''
            quotes = f"; write [{json.dumps(value or '>', ensure_ascii=False)}]"
        if kind in _LISTS and path[-1:] == ("stores",) and isinstance(value, Mapping):
            quotes = f"; begin each store with `- name: {next(iter(value), 'NAME')}`"
        if isinstance(value, bool) and kind in _WORD:
            quotes = f", as YAML reads {'`yes` and `on`' if value else '`no` and `off`'} without quotes{quotes}"
        yield Located(path, f"{text}; found {describe_value(value)}{quotes}")


_LISTS: Final = frozenset(("tuple_type", "list_type"))
_WORD: Final = frozenset(("enum", "literal_error", "string_type"))


_WORDS: Final = (
    ("Input should be", "expected"),
    ("Value should", "expected to"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("a valid number", "a number"),
)
"""Words of pydantic's, and those of Size and Duration for the same."""


def _expectation(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind in {"value_error", "assertion_error"}:
        return str(context["error"])
    if kind in {"model_type", "model_attributes_type", "dict_type", "mapping_type"}:
        return "expected a mapping of keys and values"
    if kind in _LISTS:
        return "expected a list"
    if kind == "string_type":
        return "expected text"
    if kind in {"path_type", "is_instance_of"}:
        return "expected a path"
    if kind in {"bool_type", "bool_parsing"}:
        return "expected true or false"
    if kind in {"int_type", "int_parsing", "int_from_float"}:
        return "expected a whole number"
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    return message


def _unknown_key(key: str, model: type[BaseModel]) -> str:
    misplaced = getattr(model, "_misplaced", lambda _key: "")(key)
    if misplaced:
        return str(misplaced)
    keys = getattr(model, "_keys", lambda: list(model.model_fields))
    return f"{getattr(model, '_unknown_key', 'unknown key')}; {did_you_mean(key, keys())}"


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel]:
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _store_name(data: Any, place: int) -> str:
    try:
        store = data["stores"][place]
        name = store["name"] if isinstance(store, Mapping) else getattr(store, "name", None)
    except (KeyError, TypeError, IndexError):
        name = None
    return repr(name) if isinstance(name, str) else f"number {place + 1}"
