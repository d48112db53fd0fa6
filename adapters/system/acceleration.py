"""The parts that are compiled where there was a C compiler when Anabranch was installed, and in Python elsewhere: the
loops that run once for each message, and the log's appender (adapters/wal/appending). Each does the same in both.

    @inner_loop
    def pack_rows(...): ...         # the loop in Python; compiled_loops.pyx has one of the same name and arguments

The compiled loop does what is common and hands all else, all that is wrong above all, to the one in Python. So a
change of the bytes is a change of both; tests/adapters/test_acceleration.py compares them.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, TypeVar

Loop = TypeVar("Loop", bound=Callable[..., Any])

log: logging.Logger = logging.getLogger(__name__)

FORCE_PURE: Final = "ANABRANCH_PURE"
"""An environment variable: set, and not to 0, all runs in Python even where it is compiled."""

_compiled_parts: Final[list[str]] = []
_python_parts: Final[list[str]] = []

accelerated: Final[Sequence[str]] = _compiled_parts
"""The parts that are compiled, and used so: "loops" and "appender"; empty if none is. It is whole once `anabranch` is
imported."""


def _is_unwanted(environment: Mapping[str, str]) -> bool:
    return environment.get(FORCE_PURE, "0") not in ("", "0")


def find_compiled(name: str, environment: Mapping[str, str] = os.environ) -> ModuleType | None:
    """Return a compiled module, by its full name; None if there is none that can be loaded, or the environment does not
    want it."""
    if _is_unwanted(environment):
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None  # it was installed without a C compiler
    except ImportError as error:
        log.warning("%s cannot be loaded, what is in Python serves instead: %s", name, error)
        return None


def compiled_part(package: str, part: str) -> ModuleType | None:
    """Return the compiled module of a part, as `find_compiled` does, and note whether it is used."""
    module = find_compiled(f"{package}.compiled_{part}")
    (_python_parts if module is None else _compiled_parts).append(part)
    return module


def describe_parts(environment: Mapping[str, str] = os.environ) -> str:
    """Return which parts are compiled, and of those that are not why, what follows, and what to do."""
    compiled = f"compiled: {', '.join(_compiled_parts)}" if _compiled_parts else "nothing is compiled"
    if not _python_parts:
        return compiled
    slower = f"{compiled}; in Python, which is slower: {', '.join(_python_parts)}"
    if _is_unwanted(environment):
        return f"{slower} ({FORCE_PURE} is set)"
    return (
        f"{slower}. That was not compiled when Anabranch was built; with a C compiler and Python's headers: "
        "pip install --force-reinstall --no-deps --no-cache-dir --no-binary anabranch anabranch"
    )


def describe_version() -> str:
    """Return which version is installed, and which parts are compiled: what `--version` says."""
    from importlib.metadata import version  # takes long

    return f"anabranch {version('anabranch')}\n{describe_parts()}"


def log_parts() -> None:
    """Log which parts are not compiled, if any are not."""
    if _python_parts:
        log.info("anabranch: %s", describe_parts())


_compiled = compiled_part(__package__, "loops")

PURE: Final[dict[str, Callable[..., Any]]] = {}
"""The loops in Python, by name."""


def inner_loop(loop: Loop) -> Loop:
    """Return the compiled loop of this one's name; this one itself where nothing is compiled."""
    PURE[loop.__name__] = loop
    return loop if _compiled is None else getattr(_compiled, loop.__name__)
