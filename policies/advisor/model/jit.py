"""numba's compiler with a type: a decorated function keeps its signature under `mypy --strict`.

Compiled code is cached beside the source (or in the user's cache directory where that is read-only), so only the first
run on a machine pays for the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def njit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile to machine code without Python objects, releasing the GIL while it runs."""
    return cast(Callable[P, R], numba.njit(cache=True, nogil=True)(function))
