"""Stores that the configuration gives another kind than the one that they have, or that lie where another is to be.

A store's directory is of one kind. If the file says another one, nothing of what the directory holds may be ignored: an
open refuses it by name. A repartition puts the directory aside, under `<name>~<kind>` (no store of a file may be called
so), makes the new store in its place, and moves what the old one holds. A store that keeps nothing when it is closed, a
memory store, changes by itself (reconcile.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...adapters.core import Store
from ...policies.config.adapters import load_adapter
from ...policies.errors import PlacementError, shown_held
from ...policies.text import count_of
from .on_disk.directories import StoreDirectories
from .record import StoreRow

if TYPE_CHECKING:
    from ...policies.config import Config, StoreConfig

SHOWN_MAX: Final = 20


class Displaced(NamedTuple):
    """A recorded store, and the configured one whose place it takes."""

    row: StoreRow
    config: StoreConfig


def displaced(directories: StoreDirectories, rows: Iterable[StoreRow]) -> list[Displaced]:
    """Return the recorded stores whose place a configured store of another kind takes."""
    at: dict[Path, StoreRow] = {directories.path(row): row for row in rows}
    below: dict[Path, list[StoreRow]] = {}
    for path, row in sorted(at.items()):
        if ":" in row.name:
            below.setdefault(path.parent, []).append(row)
    found = []
    for config in directories.config.stores:
        directory = directories.config.directory_of(config)
        there, of_one = at.get(directory), below.get(directory, [])
        if config.per_destination:
            taken = [row for row in of_one if row.kind != config.kind]
            if there is not None and not of_one and there.kind != config.kind:  # it was one for all of them
                taken = [there]
        elif there is not None:
            taken = [there] if there.kind != config.kind else []
        else:  # it was a store for each destination
            taken = of_one
        found += [Displaced(row, config) for row in taken]
    return found


def aside(directories: StoreDirectories, item: Displaced) -> Path:
    """Return a free place for the directory of a store that is in the way."""
    directory, path = directories.config.directory_of(item.config), directories.path(item.row)
    for number in count(1):
        put = directory.with_name(f"{directory.name}~{item.row.kind}{number if number > 1 else ''}")
        if path != directory:
            put /= path.name
        if not put.exists():
            return put
    raise AssertionError


def refusal(
    directories: StoreDirectories, found: Sequence[Displaced], held: Callable[[StoreRow], str]
) -> PlacementError:
    """Return the error of an open. `held` returns what a store holds, in words, and an empty text for an empty
    store."""
    config = directories.config
    lines, movable = [], len(found) > SHOWN_MAX
    for item in found[:SHOWN_MAX]:
        holds = held(item.row)
        keeps = not load_adapter(item.config.kind).backend_type.volatile
        movable |= keeps or not holds
        was, said = f"`{item.row.kind}:`", f"`{item.config.kind}:`"
        if (":" in item.row.name) != item.config.per_destination:
            said += ", one for each destination" if item.config.per_destination else ", one for all destinations"
        line = f"  store {item.row.name!r} in {directories.path(item.row)} is {was} and holds "
        line += f"{holds or 'no message'}; the file says {said}"
        lines.append(line if keeps or not holds else f"{line}, which keeps nothing: empty it first")
    if len(found) > SHOWN_MAX:
        lines.append(f"  and {len(found) - SHOWN_MAX} more")
    ways = [f"run `{command(config)}`, which moves what is there"] if movable else []
    ways += ["let the file say what the directory has", "give the store of the file another name"]
    first = f"the configuration changes the kind of {count_of(len(found), 'store')}; nothing was changed. "
    way = ", or ".join(ways)
    first += f"{way[0].upper()}{way[1:]}:"
    return PlacementError("\n".join([first, *lines]))


def held_by(store: Store) -> str:
    """Return what a store holds, in words; empty for nothing."""
    held = {str(destination): count for destination in store.destinations() if (count := store.depth(destination))}
    messages, subscriptions, prepared = sum(held.values()), len(store.subscriptions()), len(store.recover_prepared())
    if not messages and not subscriptions and not prepared:
        return ""
    words = in_words(messages, subscriptions, prepared)
    return f"{words} ({shown_held(held, 'it')})" if held else words


def in_words(messages: int, subscriptions: int, prepared: int) -> str:
    """Return these numbers in words, for a refusal."""
    held = count_of(messages, "message")
    held += f", {count_of(subscriptions, 'durable subscription')}" if subscriptions else ""
    return held + (f" and {count_of(prepared, 'prepared transaction')}" if prepared else "")


def command(config: Config) -> str:
    """Return the command that moves what a directory holds to where this configuration routes it."""
    file = shlex.quote(str(config.file)) if config.file is not None else "FILE"
    return f"anabranch repartition --config {file} {shlex.quote(str(config.directory))}"
