"""The journal as commands, and how each of its transactions ended.

A transaction's operations count only if it was committed, and the commit comes later than they do. So a journal is
read twice: once for the outcomes (and for the clock of the sends, which acks have none of), once for the operations.
"""

from __future__ import annotations

import enum
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from .commands import (
    AddMessage,
    Command,
    CommandError,
    Commit,
    Prepare,
    RemoveMessage,
    RewrittenDataFile,
    Rollback,
    Trace,
    TransactionId,
    decode,
)
from .files import Damage, StoreFiles
from .journal import FileSummary, Journal, Record, Report
from .openwire import MessageInfo, OpenWireError, read_message


class Entry(NamedTuple):
    """A record and its command."""

    record: Record
    command: Command
    source: int | None
    """The number of the file that the record is a copy from, if it lies in one that ack compaction made."""
    repeated: bool
    """True if that other file is still there, so that the copy must not count."""

    @property
    def rewritten(self) -> bool:
        return self.source is not None

    @property
    def place(self) -> tuple[int, int]:
        """Return what orders it among the others."""
        return self.record.file if self.source is None else self.source, self.record.offset


def read_entries(journal: Journal, report: Report, summaries: dict[int, FileSummary] | None = None) -> Iterator[Entry]:
    """Yield every record with its command. A record whose command cannot be decoded is reported and left out."""
    numbers = {file.number for file in journal.files.files}
    paths = {file.number: str(file.path) for file in journal.files.files}
    current, source, repeated = 0, None, False
    for record in journal.records(report, summaries):
        try:
            command = decode(record.payload)
        except CommandError as error:
            reason = f"a record of {record.length} bytes is left out: {error}"
            report(Damage(paths[record.file], record.offset, reason, "damaged", record.length))
            continue
        if record.file != current:
            current, source, repeated = record.file, None, False
        if isinstance(command, RewrittenDataFile):
            source = command.source_file
            repeated = command.skip_if_source_exists and command.source_file in numbers
        yield Entry(record, command, source, repeated)


def decided(store: StoreFiles | None, report: Report) -> frozenset[str]:
    """Return the ids of decided transactions: mKahaDB's own journal, if there is one, holds a Prepare for each."""
    entries = () if store is None else read_entries(Journal(store), report)
    return frozenset(e.command.transaction.text for e in entries if isinstance(e.command, Prepare))


class Outcome(enum.Enum):
    """The state of a transaction where the journal ends."""

    OPEN = "open"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    DISCARDED = "discarded by a restart"


class Transaction:
    """One transaction: which records it has, and how it ended. Filled while the outcomes are read."""

    __slots__ = (
        "bytes",
        "ended",
        "files",
        "first",
        "id",
        "last",
        "only_copies",
        "operations",
        "outcome",
        "outcome_bytes",
        "previous",
    )

    def __init__(self, transaction_id: TransactionId, first: tuple[int, int], previous: Transaction | None) -> None:
        self.id: TransactionId = transaction_id
        self.outcome: Outcome = Outcome.OPEN
        self.operations: int = 0
        self.bytes: int = 0
        self.outcome_bytes: int = 0
        """Bytes of its Prepare, Commit or Rollback records."""
        self.first: tuple[int, int] = first
        self.last: tuple[int, int] = first
        self.ended: tuple[int, int] | None = None
        """The place of its Commit or Rollback record, if that is there."""
        self.files: tuple[int, ...] = ()
        """The files that hold its operations."""
        self.only_copies: bool = True
        """All its operations lie in files that ack compaction made."""
        self.previous: Final = previous
        """An earlier one under the same id: XA ids may be used again."""

    def add(self, entry: Entry) -> None:
        self.operations += 1
        self.bytes += entry.record.length
        self.last = max(self.last, entry.place)
        self.only_copies = self.only_copies and entry.rewritten
        if entry.record.file not in self.files:
            self.files += (entry.record.file,)


class Outcomes:
    """The first reading: transactions, and the times at which messages came in."""

    def __init__(self) -> None:
        self._transactions: dict[str, Transaction] = {}
        self._unfinished: dict[str, Transaction] = {}
        self.records = 0
        self.clock_times: Final = array("d")
        """Seconds: the broker's clock at each AddMessage record that has one."""
        self.clock_runs: Final = array("L")
        """How many RemoveMessage records lie before each of them; one more for those after the last."""

    @classmethod
    def read(cls, journal: Journal, report: Report, decided: frozenset[str] = frozenset()) -> Outcomes:
        """Read the whole journal. A prepared transaction whose id is in `decided` counts as committed."""
        outcomes = cls()
        removes = 0
        for entry in read_entries(journal, report):
            outcomes.records += 1
            if entry.repeated:
                continue
            if isinstance(entry.command, RemoveMessage):
                removes += 1
            elif isinstance(entry.command, AddMessage):
                time = broker_time(message_info(entry.command))
                if time is not None:
                    outcomes.clock_times.append(time)
                    outcomes.clock_runs.append(removes)
                    removes = 0
            outcomes._apply(entry)
        outcomes.clock_runs.append(removes)
        outcomes._finish(decided)
        return outcomes

    def find(self, transaction_id: TransactionId, place: tuple[int, int]) -> Transaction | None:
        """Return the transaction of that id to which a record at `place` belongs."""
        found = self._transactions.get(transaction_id.text)
        while found is not None and found.previous is not None and place < found.first:
            found = found.previous
        return found

    def is_committed(self, entry: Entry, transaction_id: TransactionId | None) -> bool:
        """Return whether the operation in `entry` took effect."""
        if transaction_id is None:
            return True
        found = self.find(transaction_id, entry.place)
        return found is not None and found.outcome is Outcome.COMMITTED

    def place_of(self, entry: Entry, transaction_id: TransactionId | None) -> tuple[int, int]:
        """Return where the record lies that made the committed operation in `entry` take effect."""
        found = None if transaction_id is None else self.find(transaction_id, entry.place)
        return entry.place if found is None or found.ended is None else found.ended

    def count(self) -> Counter[Outcome]:
        """Return how many transactions ended how."""
        counts: Counter[Outcome] = Counter()
        for latest in self._transactions.values():
            transaction: Transaction | None = latest
            while transaction is not None:
                counts[transaction.outcome] += 1
                transaction = transaction.previous
        return counts

    def unfinished(self) -> tuple[Transaction, ...]:
        """Return the transactions that are open or prepared where the journal ends."""
        return tuple(self._unfinished.values())

    def _apply(self, entry: Entry) -> None:
        command = entry.command
        if isinstance(command, AddMessage | RemoveMessage):
            if command.transaction is not None:
                self._operation(entry, command.transaction)
        elif isinstance(command, Commit | Rollback | Prepare):
            self._outcome(entry, command)
        elif isinstance(command, Trace) and (command.message or "").startswith("LOADED"):
            self._restart()

    def _operation(self, entry: Entry, transaction_id: TransactionId) -> None:
        found = self._transactions.get(transaction_id.text)
        if found is None or not self._takes(found, entry):
            found = Transaction(transaction_id, entry.place, found)
            self._transactions[transaction_id.text] = self._unfinished[transaction_id.text] = found
        found.add(entry)

    @staticmethod
    def _takes(transaction: Transaction, entry: Entry) -> bool:
        # A copied ack may come, by file number, after the outcome of its transaction: the copy keeps that outcome.
        return transaction.outcome in (Outcome.OPEN, Outcome.PREPARED) or entry.rewritten

    def _outcome(self, entry: Entry, command: Commit | Rollback | Prepare) -> None:
        found = self._transactions.get(command.transaction.text)
        if found is None:
            return  # it held nothing persistent, or its operations are in files that are gone
        waiting = found.outcome in (Outcome.OPEN, Outcome.PREPARED)
        # A copied commit counts too: it may lie behind a restart that came after the original.
        late = entry.rewritten and found.outcome is Outcome.DISCARDED and isinstance(command, Commit)
        if not waiting and not late:
            return
        found.outcome_bytes += entry.record.length + entry.record.share
        if isinstance(command, Prepare):
            found.outcome = Outcome.PREPARED
            return
        found.outcome = Outcome.COMMITTED if isinstance(command, Commit) else Outcome.ROLLED_BACK
        if not entry.rewritten:  # a copy lies elsewhere
            found.ended = entry.place
        self._unfinished.pop(command.transaction.text, None)

    def _restart(self) -> None:
        """Discard what was not prepared, as a broker that starts does."""
        for text, transaction in list(self._unfinished.items()):
            if transaction.outcome is Outcome.OPEN:
                transaction.outcome = Outcome.DISCARDED
                del self._unfinished[text]

    def _finish(self, decided: frozenset[str]) -> None:
        for text, transaction in list(self._unfinished.items()):
            if transaction.outcome is Outcome.PREPARED and text in decided:
                transaction.outcome = Outcome.COMMITTED
            elif transaction.only_copies:
                # Compaction copies acks, not rollbacks, and never touches an open transaction: this one ended long ago.
                transaction.outcome = Outcome.DISCARDED
            else:
                continue
            del self._unfinished[text]


def broker_time(info: MessageInfo | None) -> float | None:
    """Return the seconds since the epoch at which the broker took the message; the client's clock where it has none."""
    if info is None:
        return None
    milliseconds = info.broker_in_time or info.timestamp
    return milliseconds / 1000 if milliseconds else None


def message_info(command: AddMessage) -> MessageInfo | None:
    """Return what the stored message says; None if it cannot be read."""
    try:
        return read_message(command.message)
    except OpenWireError:
        return None
