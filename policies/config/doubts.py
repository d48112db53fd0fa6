"""Entries of a file that are allowed, and probably not what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..names.destination import wildcard_in
from .fields import given, variables_of
from .models import StoreConfig
from .problems import Located


def doubts(stores: Sequence[StoreConfig]) -> Iterator[Located]:
    """Yield each pattern and each name of a dead-letter queue that probably means something else."""
    for place, store in enumerate(stores):
        for index, text in enumerate(store.match):
            if "#" in text.rpartition("://")[2].split("."):
                yield Located(
                    ("stores", place, "match", index),
                    f"pattern {text!r}: # is no wildcard here, it matches a segment of that name. A last segment > "
                    "matches all the rest, as in 'orders.>', and * one segment; write [#] if # is meant",
                )
        queue = given(store.options).get("dead_letter")
        doubt = _of_queue(queue) if isinstance(queue, str) and "dead_letter" not in variables_of(store.options) else ""
        if doubt:
            yield Located(("stores", place, store.kind, "dead_letter"), f"{queue!r} is {doubt}")


def _of_queue(queue: str) -> str:
    if (wildcard := wildcard_in(queue)) is not None:
        return (
            f"the name of a queue, in which {wildcard} is no wildcard; {{name}} stands for the destination that a "
            "message comes from"
        )
    if set("{}") & set(queue.replace("{name}", "")):
        return "the name of a queue with braces in it; only {name} stands for the destination that a message comes from"
    if queue.rpartition("://")[2] == "{name}":
        return (
            "the queue itself that a message comes from: there it stays, and is delivered again and again; give "
            "another name, such as `dlq.{name}`"
        )
    return ""
