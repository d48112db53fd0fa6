"""The writing end of a log: batches that are framed already, written in order and synced for many callers at once.

Compiled (appender.c, compiled_appender.pyx) where there was a C compiler when Anabranch was installed: callers wait
without the interpreter. In Python elsewhere (python_appender.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...system.acceleration import compiled_part
from .python_appender import PythonAppender

__all__ = ["Appender"]

if TYPE_CHECKING:
    Appender = PythonAppender
else:
    _compiled = compiled_part(__name__, "appender")
    Appender = PythonAppender if _compiled is None else _compiled.Appender
