"""The explanation of a directory: for each journal file why ActiveMQ keeps it, and what each destination pins.

This is what users of ActiveMQ otherwise learn from TRACE logging alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...policies.errors import TraceError
from ...policies.text import count_of, human_bytes
from .files import Damage, StoreFiles, find_stores
from .journal import FileSummary, Report
from .openwire import OpenWireError, read_subscription
from .replay import Replay, replayed
from .retention import ACKS, PENDING, Reason, Retention, waiting_for


@dataclass(frozen=True, slots=True)
class FileExplanation:
    """One live journal file."""

    number: int
    bytes: int
    """Its size on disk; `used_bytes` of them hold records."""
    used_bytes: int
    records: int
    reasons: tuple[Reason, ...]
    """None: the next clean-up removes it."""
    chain: tuple[int, ...] = ()
    """For a file kept by acks alone: this file, the one that its acks need, and so on to one kept for itself."""
    root: tuple[str, ...] = ()
    """Why the last file of the chain is kept: destinations with pending messages, else another reason."""

    @property
    def kept(self) -> bool:
        return bool(self.reasons)

    @property
    def only_acks(self) -> bool:
        return bool(self.reasons) and all(reason.kind == ACKS for reason in self.reasons)


@dataclass(frozen=True, slots=True)
class PendingDestination:
    """The cost of a destination's pending messages."""

    destination: str
    messages: int
    bytes: int
    oldest_message_id: str
    oldest_file: int
    files: int
    """Files that hold its pending messages."""
    kept_files: int
    """Files that they keep, directly or by chains of acks. Others may keep the same files."""
    kept_bytes: int
    freed_bytes: int
    """Bytes that clean-up could remove if this destination alone were emptied."""


@dataclass(frozen=True, slots=True)
class SubscriptionPosition:
    """A durable subscription: how far behind it is, and the file that its own record keeps."""

    destination: str
    key: str
    selector: str | None
    file: int
    pending_messages: int
    oldest_file: int | None


@dataclass(frozen=True, slots=True)
class UnfinishedTransaction:
    id: str
    state: str
    """`open` or `prepared`."""
    operations: int
    bytes: int
    files: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreExplanation:
    """One KahaDB store."""

    name: str
    files: tuple[FileExplanation, ...]
    pending: tuple[PendingDestination, ...]
    """The one that keeps most first."""
    subscriptions: tuple[SubscriptionPosition, ...]
    transactions: tuple[UnfinishedTransaction, ...]
    archived_files: int

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def summary(self) -> str:
        """Return who keeps what, in one sentence."""
        files = self.files
        only_acks = sum(file.only_acks for file in files)
        free = [file for file in files if not file.kept]
        parts = []
        if only_acks:
            parts.append(f"{only_acks} of {len(files)} journal files are kept only by acks")
        else:
            parts.append(f"{count_of(len(files), 'file')}, {human_bytes(self.bytes)}")
        if self.pending:
            top = self.pending[0]
            parts.append(
                f"{top.destination} with {count_of(top.messages, 'pending message')} of {human_bytes(top.bytes)} "
                f"pins {count_of(top.kept_files, 'file')}, {human_bytes(top.kept_bytes)}"
                + (f" ({human_bytes(top.freed_bytes)} could go if it were emptied)" if top.freed_bytes else "")
            )
        else:
            parts.append("no message is pending")
        if free:
            size = human_bytes(sum(file.bytes for file in free))
            parts.append(f"nothing keeps {count_of(len(free), 'file')} ({size}), which the next clean-up removes")
        if self.archived_files:
            parts.append(f"{count_of(self.archived_files, 'file')} in the archive are history")
        return "; ".join(parts) + "."


@dataclass(frozen=True, slots=True)
class Explanation:
    """A KahaDB directory, or an mKahaDB one with several stores."""

    directory: str
    stores: tuple[StoreExplanation, ...]
    damages: tuple[Damage, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers."""
        found: dict[str, Any] = asdict(self)
        for store, plain in zip(self.stores, found["stores"], strict=True):
            plain.update(summary=store.summary, bytes=store.bytes)
            for file, plain_file in zip(store.files, plain["files"], strict=True):
                plain_file.update(kept=file.kept, only_acks=file.only_acks)
        return found


def explain(directory: str | Path, progress: Callable[[int, int], None] | None = None) -> Explanation:
    """Return why ActiveMQ keeps each file of a KahaDB or mKahaDB directory, from the journal alone (db.data is not
    read).

    Files in an archive are history: counted, not explained. `progress` is called with (bytes read, bytes in all) as
    each of two readings goes on. Raises TraceError where there is no live journal. Nothing is written.
    """
    found = find_stores(directory)
    damages: dict[Damage, None] = {}
    every = [*found.stores, *([found.transaction_store] if found.transaction_store is not None else [])]
    stores = [_explain_store(files, damages.setdefault, progress) for files in every]
    return Explanation(str(found.directory), tuple(stores), tuple(damages))


def _explain_store(files: StoreFiles, note: Report, progress: Callable[[int, int], None] | None) -> StoreExplanation:
    live = files.live
    if not live.files:
        raise TraceError(f"{files.directory} holds archived files only; there is no live journal to explain")
    summaries: dict[int, FileSummary] = {}
    journal, outcomes, replay = replayed(live, note, progress, summaries=summaries)
    unfinished = outcomes.unfinished()
    retention = Retention(live, replay, unfinished, journal.write_file())
    return StoreExplanation(
        files.name,
        tuple(_explain_file(file.number, file.bytes, summaries, retention) for file in live.files),
        _pending_destinations(replay, retention, live),
        _subscriptions(replay),
        tuple(UnfinishedTransaction(t.id.text, t.outcome.value, t.operations, t.bytes, t.files) for t in unfinished),
        len(files.files) - len(live.files),
    )


def _explain_file(number: int, size: int, summaries: dict[int, FileSummary], retention: Retention) -> FileExplanation:
    summary = summaries.get(number, FileSummary(number, 0, 0))
    reasons = tuple(retention.direct.get(number, ()))
    needed = tuple(n for n in retention.references.get(number, ()) if n in retention.kept)
    chain: tuple[int, ...] = ()
    root: tuple[str, ...] = ()
    if number in retention.kept and needed:
        acks = sum(retention.ack_counts[number][n] for n in needed) if number in retention.ack_counts else 0
        what = count_of(acks, "ack") if acks else "acks or transaction outcomes"
        names = ", ".join(f"db-{n}.log" for n in needed)
        acks_reason = Reason(ACKS, f"holds {what} for {names}", messages=acks, files=needed)
        if not reasons:
            chain = retention.chain(number)
            root = retention.root(chain[-1])
        reasons += (acks_reason,)
    return FileExplanation(number, size, summary.used_bytes, summary.records, reasons, chain, root)


def _pending_destinations(replay: Replay, retention: Retention, files: StoreFiles) -> tuple[PendingDestination, ...]:
    sizes = {file.number: file.bytes for file in files.files}
    found = []
    for destination, state in replay.destinations.items():
        if not state.messages:
            continue
        name = str(destination)
        oldest = next(iter(state.messages.values()))
        kept = retention.reaching(retention.roots(name))
        without = {
            number: rest
            for number, reasons in retention.direct.items()
            if (rest := [r for r in reasons if r.kind != PENDING or r.destination != name])
        }
        freed = retention.kept - retention.sweep(without)
        found.append(
            PendingDestination(
                name,
                len(state.messages),
                sum(message.bytes for message in state.messages.values()),
                oldest.id,
                oldest.file,
                len({message.file for message in state.messages.values()}),
                len(kept),
                sum(sizes[number] for number in kept),
                sum(sizes[number] for number in freed),
            )
        )
    return tuple(sorted(found, key=lambda p: (-p.kept_bytes, -p.freed_bytes, -p.bytes, p.destination)))


def _subscriptions(replay: Replay) -> tuple[SubscriptionPosition, ...]:
    found = []
    for destination, state in replay.destinations.items():
        for key, subscription in sorted(state.subscriptions.items()):
            waiting = waiting_for(state, key)
            oldest = waiting[0].file if waiting else None
            selector = _selector(subscription.info)
            found.append(SubscriptionPosition(str(destination), key, selector, subscription.file, len(waiting), oldest))
    return tuple(found)


def _selector(info: bytes | None) -> str | None:
    try:
        return read_subscription(info).selector if info else None
    except OpenWireError:
        return None
