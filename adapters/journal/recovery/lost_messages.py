"""Messages that are found damaged while their store is open, and salvages (`on_corruption: salvage`): each is written
down in a report of the same form as that of an opening (salvage.py), and its damaged bytes are kept beside it, before
it is acked.

    loss-<time>.json       in the store's directory
    damaged-<time>/        a file of each: that of the journal in which it was, and the offset there
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from ....policies.errors import CorruptionError
from ...core.record.place import OWN, SEQ, Place
from ...system.files import make_directory, open_to_read, replace_file
from ...wal import format as w
from .salvage import LossReport, LostMessage, LostRecords, write_report

log: logging.Logger = logging.getLogger(__name__)

MESSAGES_MAX: Final = 1000
"""In one report, which is written anew with each."""


class LostMessages:
    """The messages lost during one opening of a store. Threads: all. The constructor touches nothing."""

    def __init__(self, name: str, directory: Path, file_mode: int) -> None:
        self._name, self._directory, self._file_mode = name, directory, file_mode
        self._lock = threading.Lock()
        """Guards what follows."""
        self._report: LossReport | None = None
        self._reported: set[tuple[str, int]] = set()

    def add(self, destination: str, place: Place, message_id: str | None, error: CorruptionError) -> None:
        """Add a lost message to the report. Durable on return. A message that was told of before, by another
        subscription, say, is not told again. Raises OSError."""
        seq, (lsn, offset, length) = place[SEQ], place[OWN]
        with self._lock:
            if (destination, seq) in self._reported:
                return
            report = self._report
            if report is None or len(report.messages) >= MESSAGES_MAX:
                report = self._begin()
            path = Path(error.path)
            file = path.name if path.parent == self._directory else f"{path.parent.name}/{path.name}"
            record = LostRecords(
                file, offset, length, 1, lsn, lsn, error.reason, "message", destination, seq, message_id
            )
            longer = msgspec.structs.replace(
                report,
                lost=[*report.lost, record],
                messages=[*report.messages, LostMessage(destination, seq, message_id)],
            )
            if path.is_file() and report.damaged_files is not None:
                self._keep(path, offset, length, self._directory / report.damaged_files)
            where = self._directory / f"loss-{report.at}.json"
            write_report(where, longer, self._file_mode)
            self._report = longer
            self._reported.add((destination, seq))
        named = f", id {message_id}" if message_id is not None else ""
        log.error("store %s: message %d of %s%s is damaged, and lost: %s", self._name, seq, destination, named, where)

    def _begin(self) -> LossReport:
        at = now = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
        number = 1
        while (self._directory / f"loss-{at}.json").exists() or (self._directory / f"damaged-{at}").exists():
            number += 1
            at = f"{now}-{number}"
        # The index knows all that the journal says: nothing else can have been lost.
        self._reported.clear()
        return LossReport(self._name, at, f"damaged-{at}", [], since_record=w.COPIES)

    def _keep(self, path: Path, offset: int, length: int, aside: Path) -> None:
        """Keep the bytes, as they read now."""
        make_directory(aside, self._file_mode, is_ours=True)
        with open_to_read(path) as file:
            data = os.pread(file.fileno(), length, offset)
        replace_file(aside / f"{path.name}-{offset}", data, self._file_mode)
