"""Writes an explanation of a data directory as plain text: what each store takes and why, then the tables behind it."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from ...adapters.journal.explanation import (
    MESSAGES,
    TRANSACTION,
    Files,
    Pinning,
    Reason,
    SegmentExplanation,
    StoreExplanation,
)
from ...adapters.journal.snapshot import WORTH
from ...policies.text import count_of, human_age, human_bytes, table, wrapped
from .explanation import DirectoryExplanation, OtherStore

SHARES_MAX = 3
"""The number of subscriptions that are named for one segment."""
HOLDERS_MAX = 5
"""The number of destinations that are named for one segment, those with the most bytes in it."""
ROWS_MAX = 50
"""The number of destinations and subscriptions that are listed, those that pin most."""
SEGMENT_HEADS = ("segments", "bytes", "live", "why they are kept")
_ID_SHOWN = 16
"""Digits at the end of a transaction's id, which tell it from others of the same router."""
_ID_FITS = 100
"""Columns of a terminal on which a row with all of an id has room."""


def render_text(explanation: DirectoryExplanation, width: int = 120) -> str:
    """Return the whole explanation for a terminal of `width` columns, kept to unless names are longer; ends in a
    newline."""
    lines: list[str] = []
    for note in explanation.notes:
        lines += [*wrapped(note, width), ""]
    several = len(explanation.stores) + len(explanation.others) + len(explanation.unreadable) > 1
    for store in explanation.stores:
        if several:
            lines.append(f"== {store.name}")
        copy = explanation.copy
        unfinished = copy.destination if copy is not None and copy.store == store.name else None
        lines += _store(store, explanation.at_ms, width, unfinished)
    for other in explanation.others:
        lines += wrapped(other_text(other), width)
    for broken in explanation.unreadable:
        lines += wrapped(f"{broken.name}: cannot be explained: {broken.error}", width)
    for name, files, command in (
        ("decision log", explanation.decisions, "`anabranch transactions` lists what waits"),
        ("usage log", explanation.usage, "`anabranch recommend` reads it"),
    ):
        if files is not None:
            lines.append(f"{name}: {count_of(files.count, 'segment')}, {human_bytes(files.bytes)}; {command}")
    if not lines:
        lines.append(f"{explanation.directory} holds no stores yet.")
    return "\n".join(lines).rstrip() + "\n"


def other_text(store: OtherStore) -> str:
    """Return a sentence on a store without segments."""
    held = ", ".join(store.destinations[:SHARES_MAX])
    more = len(store.destinations) - SHARES_MAX
    held += f" and {more} more" if more > 0 else ""
    what = {
        "memory": "in memory, and gone once it is closed",
        "sql": "in a database, which has no segments",
    }.get(store.kind, "which has no segments")
    files = f"; {count_of(store.files.count, 'file')} of {human_bytes(store.files.bytes)}"
    return (
        f"{store.name} ({store.kind}): {what}; holds {held or 'no destination'}{files}. "
        "`anabranch stats` counts its messages"
    )


def summary(store: StoreExplanation) -> str:
    """Return one sentence that says which destination keeps what."""
    copies = sum(bool(segment.generation) for segment in store.segments)
    files = count_of(len(store.segments) - copies, "segment")
    if copies:
        files += f" and {count_of(copies, 'file')} of copies"
    parts = [f"{files}, {human_bytes(store.bytes)}"]
    if store.pinning:
        top = store.pinning[0]
        parts.append(
            f"{top.destination} with {count_of(top.messages, 'message')} of {human_bytes(top.bytes)} "
            f"pins {count_of(top.segments, 'segment')}, {human_bytes(top.kept_bytes)}"
            + (f" ({human_bytes(top.freed_bytes)} could go if it were emptied)" if top.freed_bytes else "")
        )
    else:
        parts.append("no message is pending")
    if store.unneeded:
        size = sum(segment.bytes for segment in store.unneeded)
        waits = (
            "the next reclaiming frees them"
            if store.snapshot_bytes * WORTH <= size
            else f"they go once they are {WORTH} times what the snapshot takes that lets them go, "
            f"about {human_bytes(store.snapshot_bytes)}"
        )
        parts.append(f"nothing in {count_of(len(store.unneeded), 'segment')} ({human_bytes(size)}) is needed: {waits}")
    return "; ".join(parts) + "."


def _store(store: StoreExplanation, at_ms: int, width: int, unfinished: str | None) -> list[str]:
    """Return the lines of a store. `unfinished`: the destination whose copy here does not count."""
    lines = [*wrapped(summary(store), width), ""]
    if store.pinning:
        rows = [["destination", "messages", "bytes", "oldest", "segments", "pins", "frees"]]
        rows += [
            [f"{one.destination}{' (unfinished copy)' * (one.destination == unfinished)}", *_figures(one, at_ms)]
            for one in store.pinning[:ROWS_MAX]
        ]
        note = (
            "oldest: age of the oldest message; segments: those that its messages lie in; frees: what could go if it "
            "were emptied."
        )
        if len(store.pinning) > ROWS_MAX:
            note = f"{len(store.pinning) - ROWS_MAX:,} more destinations, in --json. {note}"
        lines += [*table(rows, right=range(1, 7)), *wrapped(note, width), ""]
    if store.subscriptions:
        rows = [["durable subscription", "topic", "messages", "bytes", "oldest", "segments", "pins", "frees"]]
        for one in store.subscriptions[:ROWS_MAX]:
            client, name = one.subscription or ("", "")
            rows.append([_subscription(client, name), one.destination, *_figures(one, at_ms)])
        lines += table(rows, right=range(2, 8))
        if len(store.subscriptions) > ROWS_MAX:
            lines.append(f"{len(store.subscriptions) - ROWS_MAX:,} more subscriptions, in --json.")
        lines.append("")
    if store.transactions:
        rows = [["prepared transaction", "sends", "acks", "bytes", "segment"]]
        rows += [
            [_shortened(t.id, width), f"{t.sends:,}", f"{t.acks:,}", human_bytes(t.bytes), str(t.segment)]
            for t in store.transactions
        ]
        lines += [*table(rows, right=range(1, 5)), ""]
    lines += [*_segments(store, at_ms, width), *wrapped(_beside(store), width), ""]
    if store.damages:
        lines += ["Damage:", *(f"  {damage}" for damage in store.damages), ""]
    return lines


def _shortened(transaction: str, width: int) -> str:
    """Return a transaction's id, or the end of it where the table would be too wide; `anabranch transactions` lists all
    of it."""
    return transaction if width >= _ID_FITS else f"...{transaction[-_ID_SHOWN:]}"


def _figures(pinning: Pinning, at_ms: int) -> list[str]:
    return [
        f"{pinning.messages:,}",
        human_bytes(pinning.bytes),
        _age(pinning.oldest_sent_at_ms, at_ms),
        f"{pinning.segments:,}",
        human_bytes(pinning.kept_bytes),
        human_bytes(pinning.freed_bytes),
    ]


def _age(sent_at_ms: int | None, at_ms: int) -> str:
    return "-" if sent_at_ms is None else human_age((at_ms - sent_at_ms) / 1000)


def _subscription(client: str, name: str) -> str:
    return f"{client}:{name}" if client else name


def _beside(store: StoreExplanation) -> str:
    """Return a sentence on the files beside the segments."""

    def said(files: Files | None, what: str) -> list[str]:
        return (
            [f"{what} {count_of(files.count, 'file')} of {human_bytes(files.bytes)}"] if files and files.count else []
        )

    parts = [
        *said(store.pool, "pool, to become segments again:"),
        *said(store.reserve, "reserve, for acks on a full disk:"),
        *said(store.index, "index:"),
        *said(store.large, "large bodies:"),
        *said(store.leftovers, "left by a crash, removed by the next opening:"),
        *said(store.archive, "archive, history:"),
    ]
    text = f"Beside the segments: {'; '.join(parts)}." if parts else ""
    if store.index_rebuilt:
        text += " The index cannot be used: the next opening makes it anew from the journal."
    return text.strip()


def _segments(store: StoreExplanation, at_ms: int, width: int) -> list[str]:
    """Return a row for each run of neighbours that are kept for the same reasons."""
    rows, cells = [list(SEGMENT_HEADS)], segment_rows(store, at_ms)
    taken = sum(max(len(row[column]) for row in [rows[0], *cells]) + 2 for column in range(3))
    for name, size, live_bytes, why in cells:
        first, *more = textwrap.wrap(why, max(30, width - taken), break_long_words=False, break_on_hyphens=False)
        rows += [[name, size, live_bytes, first], *(["", "", "", line] for line in more)]
    return [*table(rows, right=(1, 2)), ""]


def segment_rows(store: StoreExplanation, at_ms: int) -> list[list[str]]:
    """Return a row of text for each run of neighbours, as SEGMENT_HEADS says. `at_ms`: when they were read."""
    cells = []
    for run in (list(run) for _, run in itertools.groupby(store.segments, _holders)):
        name = str(run[0].number) if len(run) == 1 else f"{run[0].number} to {run[-1].number}"
        if run[0].generation:
            name = f"copies {name}"
        live = sum(segment.live_bytes for segment in run)
        cells.append([name, human_bytes(sum(segment.bytes for segment in run)), human_bytes(live), _why(run, at_ms)])
    return cells


def _holders(segment: SegmentExplanation) -> tuple[bool, frozenset[tuple[str, str | None, str | None]]]:
    """Return the reasons that keep a segment, and whether it is a file of copies."""
    reasons = frozenset((reason.kind, reason.destination, reason.transaction) for reason in segment.reasons)
    return bool(segment.generation), reasons


def _why(run: Sequence[SegmentExplanation], at_ms: int) -> str:
    if not run[0].kept:
        return "nothing in it is needed" if len(run) == 1 else "nothing in them is needed"
    held: dict[tuple[str, str | None, str | None], list[Reason]] = {}
    for segment in run:
        for reason in segment.reasons:
            held.setdefault((reason.kind, reason.destination, reason.transaction), []).append(reason)
    messages = [reasons for reasons in held.values() if reasons[0].kind == MESSAGES]
    messages.sort(key=lambda reasons: -sum(reason.bytes for reason in reasons))
    texts = [_reasons(reasons, at_ms) for reasons in messages[:HOLDERS_MAX]]
    if len(messages) > HOLDERS_MAX:
        rest = sum(reason.messages for reasons in messages[HOLDERS_MAX:] for reason in reasons)
        others = count_of(len(messages) - HOLDERS_MAX, "more destination")
        texts.append(f"{count_of(rest, 'message')} of {others}")
    texts += [_reasons(reasons, at_ms) for reasons in held.values() if reasons[0].kind != MESSAGES]
    return "; ".join(texts)


def _reasons(reasons: Sequence[Reason], at_ms: int) -> str:
    """Return the text of one reason that neighbouring segments share."""
    first = reasons[0]
    if first.kind == TRANSACTION:
        return f"prepared transaction {(first.transaction or '')[-_ID_SHOWN:]}"
    if first.kind != MESSAGES:
        return "it is being written"
    messages = sum(reason.messages for reason in reasons)
    sent = [reason.oldest_sent_at_ms for reason in reasons if reason.oldest_sent_at_ms is not None]
    text = f"{count_of(messages, 'message')} of {first.destination}"
    details = [f"oldest {_age(min(sent), at_ms)}"] if sent else []
    expired, claimed = sum(reason.expired for reason in reasons), sum(reason.claimed for reason in reasons)
    details += [f"{expired:,} expired"] if expired else []
    details += [f"{claimed:,} acked by a prepared transaction"] if claimed else []
    shares: dict[str, int] = {}
    for reason in reasons:
        for share in reason.subscriptions:
            name = _subscription(share.client, share.name)
            shares[name] = shares.get(name, 0) + share.messages
    shown = [f"{count:,} for {name}" for name, count in list(shares.items())[:SHARES_MAX]]
    shown += [f"{len(shares) - SHARES_MAX:,} more subscriptions"] if len(shares) > SHARES_MAX else []
    return f"{text} ({', '.join(details + shown)})" if details or shown else text
