"""An explanation as plain text: one sentence that says it, then the tables behind it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ...policies.text import human_bytes, printable, table, wrapped
from .explanation import Explanation, FileExplanation, StoreExplanation

_CHAIN_MAX = 6


def render_text(explanation: Explanation, width: int = 120) -> str:
    """Return the whole explanation for a terminal of `width` columns, kept to unless names are longer; ends in a
    newline."""
    lines: list[str] = []
    for store in explanation.stores:
        if len(explanation.stores) > 1:
            lines += [f"== {store.name}"]
        lines += [*wrapped(store.summary, width), ""]
        lines += _pending(store, width) + _subscriptions(store) + _transactions(store) + _files(store, width)
    if explanation.damages:
        lines += ["Damage:"] + [f"  {printable(str(damage))}" for damage in explanation.damages]
    return "\n".join(lines).rstrip() + "\n"


def _pending(store: StoreExplanation, width: int) -> list[str]:
    if not store.pending:
        return []
    rows = [["destination", "pending", "bytes", "files", "pins files", "pins", "frees"]]
    rows += [
        [
            p.destination,
            f"{p.messages:,}",
            human_bytes(p.bytes),
            str(p.files),
            str(p.kept_files),
            human_bytes(p.kept_bytes),
            human_bytes(p.freed_bytes),
        ]
        for p in store.pending
    ]
    note = "files: those that its pending messages lie in; frees: what could go if it were emptied."
    oldest = [["oldest pending message", "file", "of"]]
    oldest += [[p.oldest_message_id, f"db-{p.oldest_file}.log", p.destination] for p in store.pending]
    return [*table(rows, right=range(1, 7)), *wrapped(note, width), "", *table(oldest), ""]


def _subscriptions(store: StoreExplanation) -> list[str]:
    if not store.subscriptions:
        return []
    rows = [["durable subscription", "topic", "pending", "oldest in", "record in"]]
    for s in store.subscriptions:
        oldest = "-" if s.oldest_file is None else f"db-{s.oldest_file}.log"
        rows.append([s.key, s.destination, f"{s.pending_messages:,}", oldest, f"db-{s.file}.log"])
    return [*table(rows, right=(2,)), ""]


def _transactions(store: StoreExplanation) -> list[str]:
    if not store.transactions:
        return []
    rows = [["unfinished transaction", "state", "operations", "files"]]
    rows += [[t.id, t.state, str(t.operations), ", ".join(f"db-{n}.log" for n in t.files)] for t in store.transactions]
    return [*table(rows, right=(2,)), ""]


def _files(store: StoreExplanation, width: int) -> list[str]:
    rows = [["file", "bytes", "why it is kept"]]
    name_width = max(len(f"db-{file.number}.log") for file in store.files)
    size_width = max(len(human_bytes(file.bytes)) for file in store.files)
    for file in store.files:
        first, *more = textwrap.wrap(_why(file), max(30, width - name_width - size_width - 4), break_on_hyphens=False)
        rows.append([f"db-{file.number}.log", human_bytes(file.bytes), first])
        rows += [["", "", line] for line in more]
    return [*table(rows, right=(1,)), ""]


def _why(file: FileExplanation) -> str:
    if not file.kept:
        return "nothing keeps it: the next clean-up removes it"
    text = "; ".join(reason.text for reason in file.reasons)
    if file.chain:
        text += f"; chain {_chain(file.chain)}, kept by {', '.join(file.root)}"
    return text


def _chain(numbers: Sequence[int]) -> str:
    names = [f"db-{number}" for number in numbers]
    if len(names) > _CHAIN_MAX:
        left_out = len(names) - _CHAIN_MAX
        names = [*names[: _CHAIN_MAX - 1], f"({left_out} more)", names[-1]]
    return " > ".join(names)
