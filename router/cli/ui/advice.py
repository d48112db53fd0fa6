"""The advisor's report on the usage so far, made by `anabranch recommend` in a process of its own when asked."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from ....policies.config import Config

ERROR_MAX: Final = 2000
"""Characters of an error that are shown: its end."""


class Advice:
    """Makes one report at a time. Threads: all. Used with `with`, which ends what is being made, and removes all."""

    def __init__(self, config: Config) -> None:
        usage = config.usage.directory if config.usage is not None else None
        self._usage = usage or config.directory / "usage"
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._kept = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._out = Path()
        self._ticket = ""

    def __enter__(self) -> Advice:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._kept.close()

    def start(self) -> dict[str, Any]:
        """Begin a report, unless one is being made; returns as `state`."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._kept.close()
                scratch = self._kept.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-ui-"))
                self._out, self._ticket = Path(scratch) / "out", secrets.token_urlsafe(16)
                with (Path(scratch) / "errors").open("wb") as errors:
                    self._process = subprocess.Popen(
                        self.command(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
                    )
        return self.state()

    def command(self) -> Sequence[str]:
        """Return the command that makes the report."""
        return [sys.executable, "-m", "anabranch", "recommend", "--usage", str(self._usage), "--out", str(self._out)]

    def state(self) -> dict[str, Any]:
        """Return `state`: `none`, `running`, `failed` with an `error`, or `ready` with the `path` of the report."""
        with self._lock:
            code = None if self._process is None else self._process.poll()
            if self._process is None or code is None:
                return {"state": "none" if self._process is None else "running"}
            if (self._out / "report.html").exists():
                return {"state": "ready", "path": f"/report/{self._ticket}"}
            errors = (self._out.parent / "errors").read_text("utf-8", "replace").strip()
            return {"state": "failed", "error": errors[-ERROR_MAX:] or f"the command has ended with {code}"}

    def report(self, ticket: str) -> bytes | None:
        """Return the report of which `state` has told the path; None for any other ticket."""
        with self._lock:
            if not self._ticket or not secrets.compare_digest(ticket.encode(), self._ticket.encode()):
                return None
            path = self._out / "report.html"
            return path.read_bytes() if path.exists() else None
