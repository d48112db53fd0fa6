"""The loops that run once for each message: compiled where there was a C compiler when Anabranch was installed, in
Python elsewhere. Both do the same, to the byte and to the error.

    @inner_loop
    def pack_rows(...): ...         # the loop in Python; compiled_loops.pyx has one of the same name and arguments

The compiled loop does what is common and hands all else, all that is wrong above all, to the one in Python. So a
change of the bytes is a change of both; tests/adapters/test_acceleration.py compares them.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

FORCE_PURE: Final = "ANABRANCH_PURE"
"""An environment variable: set, and not to 0, the loops run in Python even where they are compiled."""


def find_compiled(name: str, environment: Mapping[str, str] = os.environ) -> ModuleType | None:
    """Return a compiled module, by its full name; None if there is none that can be loaded, or the environment does not
    want it."""
    if environment.get(FORCE_PURE, "0") not in ("", "0"):
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None  # it was installed without a C compiler
    except ImportError as error:
        log.warning("%s cannot be loaded, what is in Python serves instead: %s", name, error)
        return None


_compiled = find_compiled(f"{__package__}.compiled_loops")

accelerated: Final[bool] = _compiled is not None
"""True if the compiled loops are used."""

PURE: Final[dict[str, Callable[..., Any]]] = {}
"""The loops in Python, by name."""


def inner_loop(loop: Callable[P, R]) -> Callable[P, R]:
    """Return the compiled loop of this one's name; this one itself where nothing is compiled."""
    PURE[loop.__name__] = loop
    return loop if _compiled is None else getattr(_compiled, loop.__name__)
