"""`anabranch top`: what a directory holds and what happens there, on one screen that is drawn again and again."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

from ...adapters.system.durations import Durations
from ...policies.config import Config
from ...policies.text import count_of, human_age, printable, table
from ..router import Router, inspection_of
from .directory import on_directory, opened
from .output import Seconds, shortened

INTERVAL: Final = 2.0
"""Seconds between two looks, unless an interval is given."""
WORDS: Final = 60
"""Characters of a process's command line that are shown in JSON."""
NAME_ROOM: Final = 20
"""Columns that the name of a store may take before figures are left out for it."""
LEFT_OUT: Final = ("kind", "waiting", "sync", "syncs/s", "delayed", "p99 ms", "acks/s", "dead", "sync ms", "leased")
"""The figures that a narrow terminal has no room for, the least important first."""
_CLEAR_LINE, _CLEAR_BELOW, _HOME = "\x1b[K", "\x1b[J", "\x1b[H"
_SCREEN, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Another screen without a cursor, and back to the one before."""


@dataclass(frozen=True, slots=True)
class Look:
    """The figures of one moment."""

    at: float
    """Monotonic."""
    owner_pid: int
    """The process that has the directory open."""
    stores: list[dict[str, Any]]
    sessions: list[dict[str, Any]]

    def rate(self, before: Look | None, name: str, counter: str) -> float | None:
        """Return how many a second there were in a store since the look before; None if there was none, or the store
        was opened since."""
        if before is None or self.at <= before.at:
            return None
        now, then = self._of(name), before._of(name)
        if now is None or then is None or now[counter] < then[counter]:
            return None
        return float(now[counter] - then[counter]) / (self.at - before.at)

    def sync_p99(self, before: Look | None, name: str) -> float | None:
        """Return within how many seconds 99 of 100 waits of a store for the disk ended since the look before, or since
        the store was opened. None: there were none."""
        now, then = self._of(name), before._of(name) if before is not None else None
        if now is None:
            return None
        counts, total = now["sync_counts"], now["sync_total_seconds"]
        if then is not None and sum(then["sync_counts"]) <= sum(counts):
            counts = [max(0, one - two) for one, two in zip(counts, then["sync_counts"], strict=True)]
            total -= then["sync_total_seconds"]
        found = Durations(tuple(counts)).quantile(0.99)
        return None if found is None else min(found, total)  # the bound of a bucket says little of a few

    def _of(self, name: str) -> dict[str, Any] | None:
        return next((store for store in self.stores if store["store"] == name), None)


@click.command()
@on_directory()
@click.option("--interval", "-i", type=Seconds(min=0.1), default=INTERVAL, show_default=True, metavar="SECONDS",
              help="Look so often. A number, or 500ms, 2m.")  # fmt: skip
@click.option("--once", is_flag=True, help="Look twice, an interval apart, print what was seen then, and end.")
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON object for each look, on a line of its own. Errors stay text.")  # fmt: skip
def top_command(config: Config, interval: float, once: bool, as_json: bool) -> None:
    """Show what happens in a directory, until Ctrl-C.

    For each store: sends, acks and waits for the disk a second, when a journal waits for it (`sync`), how long such a
    wait takes lately (`sync ms`), and how long 99 of 100 took at most since the last look (`p99 ms`). Then messages by
    what they wait for. `dead` counts those in dead-letter queues. `oldest` is how long ago the oldest message was sent
    that is received next, dead letters aside; a store's 200 fullest queues and subscriptions are asked for it. Below
    are the processes that are connected, with the messages that each holds, its listeners, receives that wait, and
    requests without an answer.

    Where no program has the directory open, it is held while this runs.

    \b
    Example:
      anabranch top data
      anabranch top data --interval 500ms
      anabranch top data --once --json
    """
    is_screen = sys.stdout.isatty() and not once and not as_json
    with opened(config) as router:
        look = look_at(router)
        try:
            if is_screen:
                click.echo(_SCREEN, nl=False)
                _draw(config.directory, look, None)
            while True:
                time.sleep(interval)
                before, look = look, look_at(router)
                if is_screen:
                    _draw(config.directory, look, before)
                elif as_json:
                    click.echo(json.dumps(_plain(config.directory, look, before), ensure_ascii=False))
                else:
                    click.echo("\n".join(_lines(config.directory, look, before)))
                if once:
                    break
        finally:
            if is_screen:
                click.echo(_BACK, nl=False)


def look_at(router: Router) -> Look:
    """Look at a router."""
    inspection = inspection_of(router)
    stores, sessions = inspection.stores(), inspection.sessions()
    stores = [{**store, "sync": router.config._sync_of(store["store"])} for store in stores]
    return Look(time.monotonic(), inspection.owner_pid, stores, sessions)


def _draw(directory: Path, look: Look, before: Look | None) -> None:
    """Draw the screen anew: each line over the one that is there, so that nothing flickers."""
    columns, rows = shutil.get_terminal_size()
    lines = _lines(directory, look, before, columns)
    if len(lines) > rows:
        lines = [*lines[: rows - 1], f"... and {count_of(len(lines) - rows + 1, 'more line')}"]
    lines = [line if len(line) <= columns else f"{line[: columns - 1]}…" for line in lines]
    click.echo(_HOME + f"{_CLEAR_LINE}\n".join(lines) + _CLEAR_LINE + _CLEAR_BELOW, nl=False)


def _lines(directory: Path, look: Look, before: Look | None, columns: int | None = None) -> list[str]:
    """Return what there is to show as lines; figures are left out that are beyond so many columns."""
    owner = "this command" if look.owner_pid == os.getpid() else f"process {look.owner_pid}: {_words(look.owner_pid)}"
    lines = [f"{datetime.now():%H:%M:%S}  {printable(str(directory))}, open in {owner}", ""]
    lines += _of_stores(look, before, columns) if look.stores else ["no stores yet"]
    lines += [
        f"store {printable(store['store'])} cannot be used: {printable(store['failed'])}"
        for store in look.stores
        if store["failed"] is not None
    ]
    lines.append("")
    return lines + (_of_sessions(look.sessions) if look.sessions else ["nobody else is connected"])


def _of_stores(look: Look, before: Look | None, columns: int | None) -> list[str]:
    rows = rows_of_stores(look, before)
    if columns is not None:
        rows = _fitting(rows, columns)
    return _columns(rows, left=1 + sum(head in rows[0] for head in ("kind", "sync")))


def rows_of_stores(look: Look, before: Look | None) -> list[tuple[str, ...]]:
    """Return the figures of stores as text, a row each; the first row is the heads."""
    heads = (
        "store", "kind", "sync", "sends/s", "acks/s", "syncs/s", "sync ms", "p99 ms", "ready", "leased", "delayed",
        "dead", "oldest", "waiting",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [heads]
    for store in look.stores:
        name, age = store["store"], store["oldest_ready_seconds"]
        rates = (_shown(look.rate(before, name, counter)) for counter in ("sends", "acks", "syncs"))
        counts = (f"{store[key]:,}" for key in ("ready", "leased", "delayed", "dead"))
        oldest = "-" if age is None else human_age(age)
        syncs = (f"{took * 1000:.2f}" if took else "-" for took in (store["sync_seconds"], look.sync_p99(before, name)))
        rows.append(
            (printable(name), store["kind"], store["sync"], *rates, *syncs, *counts, oldest, f"{store['waiting']:,}")
        )
    return rows


def _fitting(rows: Sequence[tuple[str, ...]], columns: int) -> list[tuple[str, ...]]:
    """Leave figures out, and shorten names, until rows fit into a terminal."""
    names, *others = zip(*rows, strict=True)
    figures = {column[0]: column for column in others}

    def room() -> int:
        return columns - sum(2 + max(map(len, column)) for column in figures.values())

    for head in LEFT_OUT:
        if room() >= min(max(map(len, names)), NAME_ROOM):
            break
        del figures[head]
    return list(zip([shortened(name, max(room(), 5)) for name in names], *figures.values(), strict=True))


def _of_sessions(sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    rows: list[tuple[str, ...]] = [("pid", "holds", "listeners", "waiting", "unanswered", "process")]
    for one in sorted(sessions, key=lambda one: (-one["held"], one["pid"])):
        numbers = (f"{one[key]:,}" for key in ("held", "listeners", "waiting", "unanswered"))
        rows.append((str(one["pid"]), *numbers, _words(one["pid"])))
    lines = _columns([row[:-1] for row in rows], left=1)
    return [f"{line}  {row[-1]}" for line, row in zip(lines, rows, strict=True)]


def _columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    return list(table(rows, range(left, len(rows[0])), ruled=False))


def _shown(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 10 or not rate else f"{rate:.1f}"


def _words(pid: int) -> str:
    """Return how a process was started; empty where that is not to be known."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    program, end, more = words.partition(b"\0")
    words = program.rpartition(b"/")[2] + end + more  # its directory says less than what comes behind it
    return printable(words.replace(b"\0", b" ").decode(errors="replace").strip())


def _plain(directory: Path, look: Look, before: Look | None) -> dict[str, Any]:
    hidden = ("sync_counts", "sync_total_seconds", "waiting_longest")
    stores = [
        {key: value for key, value in store.items() if key not in hidden}
        | {f"{name}_per_second": look.rate(before, store["store"], name) for name in ("sends", "acks", "syncs")}
        | {"sync_p99_seconds": look.sync_p99(before, store["store"])}
        for store in look.stores
    ]
    clients = [session | {"process": _words(session["pid"])[:WORDS]} for session in look.sessions]
    at = datetime.now().astimezone().isoformat(timespec="milliseconds")
    return {
        "directory": str(directory), "at": at, "owner_pid": look.owner_pid, "stores": stores, "clients": clients,
    }  # fmt: skip
