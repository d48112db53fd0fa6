"""What users write types with: all that a public signature names is exported from `anabranch`, and what is mistyped is
an error of the type checker, which `make lint` runs over this module too."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import anabranch
from anabranch import Config, ConfigError, StoreConfig

MADE_FOR_USERS = {
    "Connection", "EventListener", "LargeBody", "Listener", "Map", "Match", "Message", "Pattern", "Queue", "Router",
    "Savepoint", "Subscriber", "Topic", "Transaction",
}  # fmt: skip
"""The library makes these: their constructors are its own affair."""


def names_in(annotation: object) -> set[str]:
    """The names that an annotation is written with."""
    annotation = getattr(annotation, "__forward_arg__", annotation)
    if isinstance(annotation, str):
        return set(_names(ast.parse(annotation, mode="eval").body))
    return {getattr(annotation, "__name__", str(annotation))}


def _names(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Annotated":
        assert isinstance(node.slice, ast.Tuple)
        yield from _names(node.slice.elts[0])  # what else it says is for pydantic
    elif isinstance(node, ast.Name):
        yield node.id
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _names(child)


def is_known(name: str, module: types.ModuleType) -> bool:
    """Whether a user can import it: from us, or from elsewhere."""
    if hasattr(anabranch, name) or hasattr(builtins, name) or name in {*typing.__all__, *collections.abc.__all__}:
        return True
    found = getattr(module, name, None)
    if typing.get_origin(found) is typing.Annotated:
        found = typing.get_args(found)[0]
    if isinstance(found, typing.TypeVar):
        return True
    return isinstance(found, type) and not found.__module__.startswith("anabranch")


def ours(cls: type) -> Iterator[type]:
    """A class and those of its bases that are ours."""
    return (base for base in cls.__mro__ if base.__module__.startswith("anabranch"))


def signatures() -> Iterator[tuple[str, set[str], types.ModuleType]]:
    """What is public, the names that its signature is written with, and the module that it is in."""
    for name in ("open", *anabranch.__all__):
        thing = getattr(anabranch, name)
        if inspect.isfunction(thing):
            yield from of_function(name, thing)
        elif isinstance(thing, type):
            for cls in ours(thing):
                yield from of_class(name, cls)


def of_class(name: str, cls: type) -> Iterator[tuple[str, set[str], types.ModuleType]]:
    module = sys.modules[cls.__module__]
    for field, annotation in inspect.get_annotations(cls).items():
        if not field.startswith("_"):
            yield f"{name}.{field}", names_in(annotation) - {"ClassVar"}, module
    for attribute, value in vars(cls).items():
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if not inspect.isfunction(function) or function.__module__ != cls.__module__:
            continue
        if not attribute.startswith("_") or (attribute == "__init__" and name not in MADE_FOR_USERS):
            yield from of_function(f"{name}.{attribute}", function)


def of_function(name: str, function: types.FunctionType) -> Iterator[tuple[str, set[str], types.ModuleType]]:
    names: set[str] = set().union(*map(names_in, function.__annotations__.values()))
    yield name, names, sys.modules[function.__module__]


def test_all_that_a_public_signature_names_is_exported() -> None:
    found = list(signatures())
    assert len(found) > 200
    missing = {(name, where) for where, names, module in found for name in names if not is_known(name, module)}
    assert not missing


def test_every_name_that_is_exported_is_there() -> None:
    assert sorted(anabranch.__all__) == sorted(set(anabranch.__all__))
    for name in anabranch.__all__:
        assert getattr(anabranch, name) is not None
    with pytest.raises(AttributeError):
        anabranch.nothing_of_this_name  # type: ignore[attr-defined]  # noqa: B018


def test_all_that_is_public_is_typed_and_documented() -> None:
    for name in anabranch.__all__:
        thing = getattr(anabranch, name)
        if isinstance(thing, type) or inspect.isfunction(thing):
            assert thing.__doc__, name
        for attribute, value in vars(thing).items() if isinstance(thing, type) else ():
            if inspect.isfunction(value) and not attribute.startswith("_") and value.__module__ == thing.__module__:
                assert value.__doc__, f"{name}.{attribute}"
                untyped = set(inspect.signature(value).parameters) - set(value.__annotations__) - {"self", "cls"}
                assert not untyped, f"{name}.{attribute}"
                assert "return" in value.__annotations__, f"{name}.{attribute}"


def test_a_mistyped_keyword_is_an_error() -> None:
    """Of the type checker, which would tell if one of these could be left out; and when it is run."""
    with pytest.raises(ConfigError, match="jurnal"):
        StoreConfig("a", ["a"], jurnal={})  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="per_destinaton"):
        StoreConfig("a", ["a"], per_destinaton=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="memory"):
        StoreConfig("a", ["a"], memory=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sotres"):
        Config("d", sotres=[])  # type: ignore[call-arg]


def test_states_and_outcomes_are_enumerated() -> None:
    """For the type checker too."""

    def takes(state: anabranch.TransactionState, outcome: anabranch.Outcome, how: anabranch.Settlement) -> Any:
        return state, outcome, how

    takes("committed", "commit", anabranch.Settlement.ACK)
    takes("commited", "commit", anabranch.Settlement.ACK)  # type: ignore[arg-type]
    takes("committed", "comit", anabranch.Settlement.ACK)  # type: ignore[arg-type]
    takes("committed", "commit", "ack")  # type: ignore[arg-type]
    assert set(typing.get_args(anabranch.Outcome)) == {"commit", "rollback"}
