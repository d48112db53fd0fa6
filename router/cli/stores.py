"""Commands over stores and their files: `stats`, `compact`, `explain`, `salvage` and `repartition`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click

from ...adapters import kahadb
from ...adapters.core.store_types import StoreStats
from ...adapters.kahadb.files import find_stores
from ...adapters.system.durations import Durations
from ...policies.config import Config, load
from ...policies.errors import ConfigError, StoreLockedError, TraceError
from ...policies.text import count_of, human_bytes
from ..migration.plan import Move, plan_of
from ..offline.repartition import repartition
from ..placement.on_disk.in_force import known_configuration
from ..router import RouterStats, inspection_of
from ..upkeep.explanation import explain, is_ours
from ..upkeep.explanation_text import render_text
from ..upkeep.salvage import Salvaged, salvage
from .directory import on_directory, opened, running
from .output import (
    LocalPath,
    Work,
    config_file,
    echo_json,
    echo_result,
    echo_table,
    echo_warnings,
    json_option,
    warnings_shown,
    working,
)


@click.command()
@on_directory()
@json_option
@click.pass_context
def stats_command(ctx: click.Context, config: Config, as_json: bool) -> None:
    """Show what each store holds, and what it takes on disk.

    `sync` is how durable a journal is: when it forces its work to the disk. Delayed messages are scheduled ones: they
    wait for their time. Dropped messages are counted from when a store is opened. `journal` is what a journal's files
    take. `live` is what live messages take of it, with bodies that are kept apart. `pool` is files that are kept to be
    used again.

    A store that cannot be used is named in a warning, and the exit code is 1. Its latest figures are shown, if it gave
    any.

    Nothing is created.

    \b
    Example:
      anabranch stats data
      anabranch stats -c stores.yaml --json
    """
    with opened(config) as router:
        directory, stats = router.config.directory, router.stats()
        syncs = {name: router.config._sync_of(name) for name in stats.stores}
    failed = {name: store.failed for name, store in stats.stores.items() if store.failed is not None}
    if as_json:
        stores = {name: _plain(store) | {"sync": syncs[name]} for name, store in stats.stores.items()}
        echo_json({"directory": str(directory), "stores": stores, "unresponsive": list(stats.unresponsive)})
    elif stats.stores:
        _print_stats(stats, syncs)
    else:
        click.echo(f"{directory} holds no stores yet.")
    echo_warnings(f"store {name} cannot be used: {reason}" for name, reason in failed.items())
    if failed:
        ctx.exit(1)


def _print_stats(stats: RouterStats, syncs: Mapping[str, str]) -> None:
    rows = [("store", "kind", "sync", "messages", "delayed", "destinations", "files", "journal", "live", "pool")]
    for name, store in stats.stores.items():
        files = store.segments.get("active", 0) + store.segments.get("retained", 0) + store.segments.get("copies", 0)
        rows.append(
            (
                name, store.kind, syncs[name], f"{store.messages:,}", f"{store.delayed:,}",
                f"{len(store.destinations):,}", f"{files:,}", human_bytes(store.journal_bytes),
                human_bytes(store.live_bytes), human_bytes(store.pool_bytes),
            )
        )  # fmt: skip
    for name in stats.unresponsive:
        click.echo(f"Store {name} does not answer; its last figures are shown, if there are any.", err=True)
    echo_table(rows, left=(0, 1, 2))


def _plain(store: StoreStats) -> dict[str, Any]:
    """Return the statistics of a store as plain values."""
    took = store.sync_durations
    return {field.name: getattr(store, field.name) for field in fields(store)} | {
        "sync_durations": {"bounds": Durations.BOUNDS, "counts": took.counts, "seconds": took.seconds},
        "destinations": {str(d): n for d, n in store.destinations.items()},
        "subscriptions": [
            {"topic": s.topic.name, "client": s.client_id, "name": s.name, "messages": n}
            for s, n in store.subscriptions.items()
        ],
    }


@click.command()
@on_directory()
@click.option("--store", "-s", "names", multiple=True, metavar="NAME",
              help="Only this store; may be given more than once. Else all that are recorded.")  # fmt: skip
@json_option
def compact_command(config: Config, names: tuple[str, ...], as_json: bool) -> None:
    """Give back disk that holds no messages.

    The live messages in mostly dead segments of a journal are copied together, and the segments are released. A
    journal's index, and the file of an SQLite store, become as small as what is in them. There must be room for the
    copies. A program that has the directory open goes on meanwhile. Killed at any moment, the command loses nothing,
    and can be run again.

    \b
    Example:
      anabranch compact data
      anabranch compact -c stores.yaml --store orders
    """
    with opened(config) as router:
        directory = router.config.directory
        with working(f"Compacting {directory.name}") as progress:
            freed = inspection_of(router).compact(names, progress)
    lines = [
        f"{name}: {f'{human_bytes(size)} given' if size else 'nothing to give'} back" for name, size in freed.items()
    ]
    lines = lines or [f"{directory} holds no stores yet."]
    echo_result(as_json, {"directory": str(directory), "freed_bytes": freed}, *lines)


@click.command()
@click.argument("directory", type=LocalPath())
@config_file("Anabranch's configuration of DIRECTORY, where indexes or archives lie elsewhere.")
@json_option
@click.pass_context
def explain_command(ctx: click.Context, directory: Path, config_path: Path | None, as_json: bool) -> None:
    """Say why each journal file is kept.

    DIRECTORY is a data directory of Anabranch's, or one of its journal stores, or one of ActiveMQ's KahaDB. It is only
    read. A file is kept for the pending messages of a destination or a subscription, or for a prepared transaction. In
    KahaDB it is also kept for a chain of acks.

    Messages that an interrupted repartition has copied, and that do not count yet, are marked.

    The command reads as much of a store's journal as its next opening would. Where a program has the directory open,
    that is asked, and each of its stores waits while it answers. Nobody may have a store open whose own directory is
    given. The exit code is 1 also where a store cannot be read, or is damaged.

    \b
    Example:
      anabranch explain data
      anabranch explain --json data/stores/orders
      anabranch explain /var/lib/activemq/kahadb
    """
    with working(f"Reading {directory.absolute().name}") as progress:
        if is_ours(directory):
            text, found, is_whole = _ours(directory, config_path, progress)
        else:
            text, found, is_whole = _kahadb(directory, config_path, progress)
    if as_json:
        echo_json(found)
    else:
        click.echo(text, nl=False)
    if not is_whole:
        ctx.exit(1)


Explained = tuple[str, object, bool]
"""An explanation as text, as plain values, and whether all could be read."""


def _columns() -> int:
    return get_terminal_size((120, 24)).columns


def _ours(directory: Path, config_path: Path | None, progress: Work) -> Explained:
    config = load(config_path) if config_path is not None else known_configuration(directory.absolute())
    router = running(config) if config is not None and config.directory.resolve() == directory.resolve() else None
    if router is not None:
        with router:
            found = inspection_of(router).explain()
    else:
        found = explain(directory, config, lambda what, done, total: progress(done, total))
    is_whole = not found.unreadable and not any(store.damages for store in found.stores)
    return render_text(found, _columns()), found.to_json(), is_whole


def _kahadb(directory: Path, config_path: Path | None, progress: Work) -> Explained:
    try:
        find_stores(directory)
    except TraceError as error:
        if not directory.is_dir():
            raise
        what = "is empty" if not any(directory.iterdir()) else "holds no stores of Anabranch's and no KahaDB journal"
        raise TraceError(
            f"{directory} {what}; give a data directory of Anabranch's (with placement.records in it), one of its "
            "stores (store.id), or the directory that activemq.xml names in <kahaDB directory=...> (db-<number>.log)"
        ) from error
    if config_path is not None:
        raise ConfigError(
            [f"--config {config_path} says where our own stores keep files, and {directory} is a KahaDB; leave it out"]
        )
    found = kahadb.explain(directory, progress)
    return kahadb.render_text(found, _columns()), found.to_json(), True


SHOWN = 20
"""Lost messages that are printed of each store; the report has all."""


@click.command()
@click.argument("directory", type=LocalPath(), metavar="DIR")
@click.option("--to", "target", type=LocalPath(), required=True, metavar="NEW", help="The directory to make.")
@config_file("Anabranch's configuration of DIR, where indexes lie elsewhere.")
@json_option
def salvage_command(directory: Path, target: Path, config_path: Path | None, as_json: bool) -> None:
    """Make NEW of all that can be read of the damaged DIR.

    DIR is a data directory, or that of one journal store. Nothing is written to DIR, and no process may have it open.
    NEW takes as much room as DIR. It is there once it is whole. A damaged message costs that message alone.
    NEW/salvage.json, and the loss-*.json of each store, name what is lost: destination, seq and id. Look at them, then
    put NEW where DIR was, and open it as always.

    The exit code is 0 also where something is lost: the output says so.

    \b
    Example:
      anabranch salvage data --to data.new
      anabranch salvage data/stores/orders --to orders.new
    """
    if config_path is not None:
        config: Config | None = load(config_path, names_suffice=True)
    else:
        config = known_configuration(directory.absolute())
    with working(f"Reading {directory.absolute().name}"):
        found = salvage(directory, target, config)
    echo_result(as_json, asdict(found), *_salvaged(found))


def _salvaged(found: Salvaged) -> list[str]:
    lines = [f"{found.directory} holds all that can be read."]
    for store in found.stores:
        lines.append(f"  {store.directory}: {count_of(store.messages, 'message')}; {store.text}")
        lost = store.loss["messages"] if store.loss is not None else []
        for message in lost[:SHOWN]:
            named = f", id {message['message_id']}" if message["message_id"] is not None else ""
            lines.append(f"    lost: seq {message['seq']} of {message['destination']}{named}")
        if len(lost) > SHOWN:
            lines.append(f"    and {len(lost) - SHOWN} more: see {found.directory}/salvage.json")
    for path, lost_bytes in found.unreadable.items():
        lines.append(f"  {path}: the disk did not give {human_bytes(lost_bytes)} of it")
    lines += [f"  {note}" for note in found.notes]
    return lines


@click.command()
@click.argument("directory", type=LocalPath(), metavar="DIR")
@config_file("The configuration to move to.", required=True, metavar="NEW")
@click.option("--old", "old_path", type=LocalPath(), metavar="FILE",
              help="The configuration until now, where DIR does not say it: one with secrets, or of an interrupted "
              "run. Only for stores that NEW does not have and that do not open with defaults.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would move, and change nothing.")
@click.option("--restart", is_flag=True,
              help="Move to NEW though an interrupted run was moving to another configuration.")  # fmt: skip
@json_option
def repartition_command(
    directory: Path, config_path: Path, old_path: Path | None, dry_run: bool, restart: bool, as_json: bool
) -> None:
    """Move what a data directory holds to where NEW routes it.

    NEW is a configuration of the data directory DIR, which no other process may have open. Messages keep their order,
    ids, headers, priorities, times and counts of deliveries. Durable subscriptions and duplicate windows come along.
    Each destination is copied. Both copies are compared by count and digest, and only then the old one goes. A store
    that is empty then and not in NEW is removed.

    After a crash, or an error, run the command again with the same NEW: it goes on where it was. Until it is done no
    router opens DIR. There must be room on the disk for a second copy of the largest destination.

    Into a shared SQL store, and out of it, messages move in transactions, while other routers use it: out of it those
    that are ready. Times and counts of deliveries begin anew.

    A dry run looks at copies of the stores that messages would leave, one at a time, in the directory for temporary
    files (TMPDIR).

    \b
    Example:
      anabranch repartition --config new.yaml --dry-run data
      anabranch repartition --config new.yaml data
    """
    config, before = load(config_path), load(old_path) if old_path is not None else None
    if directory.resolve() != config.directory.resolve():
        raise ConfigError(
            [
                f"{config_path} has the data directory {config.directory}, and DIR is {directory.absolute()}; write "
                f"`directory: {directory.absolute()}` into the file, or give the other DIR"
            ]
        )
    removed: tuple[str, ...] = ()
    if dry_run:
        with warnings_shown(), working(f"Looking at {directory.name}"):
            moves = plan_of(config, before, restart)
    else:
        with warnings_shown(), working(f"Moving {directory.name}") as progress:
            try:
                done = repartition(config, before, restart, str(config_path), progress)
            except StoreLockedError as error:
                step = f"that program moves its messages itself by router.repartition({str(config_path)!r})"
                raise StoreLockedError(f"{error}; {step}") from error
        moves, removed = done.moves, done.removed
    if as_json:
        shown = [asdict(move) | {"destination": str(move.destination)} for move in moves]
        echo_json({"directory": str(config.directory), "dry_run": dry_run, "moves": shown, "removed": list(removed)})
        return
    _print_moves(moves, dry_run, f"everything in {config.directory} lies where {config_path} routes it")
    for name in removed:
        click.echo(f"Store {name} is empty and not in {config_path}: removed with its directory.")
    if not dry_run and (moves or removed):
        click.echo(f"From now on open {config.directory} with {config_path}.")


def _print_moves(moves: Sequence[Move], dry_run: bool, otherwise: str) -> None:
    if not moves:
        click.echo(f"Nothing to move: {otherwise}.")
        return
    rows = [("destination", "from", "to", "messages", "bytes", "subscriptions")]
    for move in moves:
        shown = str(move.destination), move.source, move.target
        rows.append((*shown, f"{move.messages:,}", human_bytes(move.bytes), f"{move.subscriptions:,}"))
    echo_table(rows, left=(0, 1, 2))
    count, size = sum(move.messages for move in moves), sum(move.bytes for move in moves)
    verb = "would move" if dry_run else "moved"
    what = f"{count_of(len(moves), 'destination')}, {count_of(count, 'message')}, {human_bytes(size)}"
    click.echo(f"{what} {verb}.")
