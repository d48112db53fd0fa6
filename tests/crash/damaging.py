"""The loop of all campaigns that damage files: a copy of a directory for each trial, one file of it changed, and a look
at the copy in another process, since a damaged file may well kill the process or make it hang."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

HANGS_AFTER: Final = 180.0
"""Seconds without an answer."""
BATCH: Final = 40
"""Trials that one process does, where none of them kills it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done to one file."""

    victim: Path
    """Its place in the directory."""
    what: str
    change: Callable[[bytes], bytes | None]
    """What becomes of its bytes; None: it is removed."""

    def __str__(self) -> str:
        return f"{self.victim}, {self.what}"

    def apply(self, directory: Path) -> None:
        path = directory / self.victim
        changed = self.change(path.read_bytes())
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)


Look = Callable[[Path, Trial], tuple[str, str]]
"""The outcome of a trial whose directory this is, and a few words about it; to be called in a process of its own."""


def outcomes(
    source: Path, place: Path, trials: Iterable[Trial], look: Look, seconds: float = HANGS_AFTER
) -> Iterator[tuple[Trial, str, str]]:
    """Each trial in a copy of `source`, made at `place`: what `look` says of it; or the name of the signal that ended
    the process, `ends` if it ended otherwise, `hangs` if it did not answer for so many seconds."""
    waiting = iter(trials)
    while batch := list(islice(waiting, BATCH)):
        jobs = [partial(_tried, source, place, trial, look) for trial in batch]
        for trial, (ended, answer) in zip(batch, answers(jobs, seconds), strict=True):
            outcome, text = (ended, "") if ended else answer
            yield trial, outcome, text
    shutil.rmtree(place, ignore_errors=True)


def _tried(source: Path, place: Path, trial: Trial, look: Look) -> tuple[str, str]:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    trial.apply(place)
    return look(place, trial)


def answers(jobs: Sequence[Callable[[], object]], seconds: float = HANGS_AFTER) -> Iterator[tuple[str, Any]]:
    """What each job returns, as JSON has it, beside an empty text; or how it ended its process, beside None."""
    done = 0
    while done < len(jobs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _answer(jobs[done:], writer)
        os.close(writer)
        ended = False
        try:
            for line in _lines(reader, seconds):
                done += 1
                yield "", json.loads(line)
            ended = True
        except TimeoutError:
            pass
        finally:
            os.close(reader)
            if not ended:
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if done < len(jobs):
            done += 1
            yield "hangs" if not ended else signal.Signals(-code).name if code < 0 else "ends", None


def _answer(jobs: Sequence[Callable[[], object]], writer: int) -> None:
    """The child: it does not return."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB says what it aborts for
        for job in jobs:
            try:
                line = json.dumps(job())
            except BaseException:
                line = json.dumps(["foreign", traceback.format_exc()[-1000:]])
            os.write(writer, f"{line}\n".encode())
    finally:
        os._exit(0)


def _lines(reader: int, seconds: float) -> Iterator[bytes]:
    """Until the other end is closed. Raises TimeoutError."""
    rest = b""
    while True:
        if not select.select([reader], [], [], seconds)[0]:
            raise TimeoutError
        data = os.read(reader, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
