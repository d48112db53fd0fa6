"""Twins of calls that wait: they return a Future, and are made on a thread of the library."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...adapters.system.background import shared

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def in_background(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Future[R]]:
    """Return the twin of a method, which does not wait. It calls the method by its name, as its users do."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, /, *given: P.args, **options: P.kwargs) -> Future[R]:
        return shared().call(partial(getattr(self, name), *given, **options))

    call.__name__ = f"{name}_nowait"
    call.__qualname__ = f"{method.__qualname__}_nowait"
    call.__doc__ = (
        f"Do as `{name}`, on a thread of ours, on which the future resolves; it raises what that raises. Of calls that "
        "are under way at once any may take effect first."
    )
    return call
