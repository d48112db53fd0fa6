"""Commands for operators: `serve`, `health`, `calibrate`, `backup`, `verify`, `export` and `import`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from ...policies.config import Config, load
from ...policies.errors import StoreFailedError, StoreLockedError
from ...policies.outputs import local_path, write_file
from ...policies.text import count_of, human_bytes
from ..offline.calibration import CALLERS, calibrate
from ..offline.exporting import Exported, export
from ..offline.importing_lines import import_lines
from ..offline.verification import Verified, verify
from ..placement.on_disk.in_force import known_configuration
from ..router import inspection_of
from ..sharing.owner.process import log_to_stderr, own
from ..upkeep.health import Health
from .activemq import bring_from_kahadb
from .directory import on_directory, opened, require_used
from .output import (
    LocalPath,
    Seconds,
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
@click.option(
    "--linger",
    type=Seconds(min=0),
    metavar="SECONDS",
    help="End so long after the last client has gone. Without it: never by itself.",
)
def serve_command(config: Config, linger: float | None) -> None:
    """Own a data directory, and serve the processes that share it.

    Any number of processes of this user open the directory with anabranch.open(DIR, shared=True); the first of them
    starts an owner by itself, which lingers for 10 seconds, if there is none. Run this command, under systemd say,
    where the owner is to stay, and its log is to be seen. SIGTERM and Ctrl-C end it once what is in hand is done;
    clients then start another.

    \b
    Example:
      anabranch serve data
      anabranch serve -c stores.yaml
    """
    log_to_stderr()
    failure = own(config, linger)
    if failure is not None:
        raise StoreFailedError(f"the server has ended: {failure}") from failure


@click.command()
@on_directory()
@json_option
@click.pass_context
def health_command(ctx: click.Context, config: Config, as_json: bool) -> None:
    """Say whether all stores of a directory can be used.

    Each store puts on disk what it has written. One that has not done so after five seconds is stalled: it waits for
    its disk. Told are also stores that have failed, that do not open, or whose file system is read-only, how old the
    oldest message is, what is free on the disk, and transactions in doubt. `sync` is when a journal forces its work to
    the disk, `sync ms` how long that takes lately. A program that has the directory open is asked.

    The exit code is 1 where a store is not ok, the decision log is damaged, or a transaction waits for an operator.

    \b
    Example:
      anabranch health data
      anabranch health data --json || systemctl restart shop
    """
    with opened(config, quiet=True) as router:
        found = router.health()
        config = router.config
    rows, wrong = health_shown(found, config)
    if as_json:
        stores = [asdict(one) | {"sync": config._sync_of(one.name)} for one in found.stores]
        echo_json(asdict(found) | {"stores": stores})
    elif found.stores:
        echo_table(rows, left=(0, 1, 2))
    echo_warnings(wrong)
    if not found.ok:
        ctx.exit(1)


def health_shown(found: Health, config: Config) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the health of stores as rows of text, the first of which is the heads, and what is wrong."""
    rows: list[tuple[str, ...]] = [("store", "state", "sync", "messages", "oldest", "sync ms", "free")]
    for one in found.stores:
        oldest = "-" if one.oldest_ready_seconds is None else f"{one.oldest_ready_seconds:,.0f} s"
        free = "-" if one.free_bytes is None else human_bytes(one.free_bytes)
        took = f"{one.sync_seconds * 1000:.2f}" if one.sync_seconds else "-"
        rows.append((one.name, one.state, config._sync_of(one.name), f"{one.messages:,}", oldest, took, free))
    wrong = [f"store {one.name}: {one.reason}" for one in found.stores if one.reason is not None]
    if found.decision_log is not None:
        wrong.append(f"the decision log cannot be used: {found.decision_log}")
    if found.in_doubt:
        wrong.append(f"{count_of(found.in_doubt, 'transaction')} in doubt: see `anabranch transactions`")
    return rows, wrong


@click.command()
@on_directory("TARGET")
@json_option
def backup_command(config: Config, target: str, as_json: bool) -> None:
    """Copy a directory, as it is at one moment, while it is used.

    TARGET is made: a data directory that is opened like any other. It holds all that was acknowledged before the backup
    began, and of each transaction all or nothing. A program that has the directory open makes the copy itself, and goes
    on meanwhile; for some milliseconds whoever writes waits.

    All of it must lie in the one directory: no store of its own `directory`, and none in a database on a server. The
    usage log is left out, and so are indexes, which the first opening makes anew.

    \b
    Example:
      anabranch backup data /backup/data-monday
      anabranch verify /backup/data-monday
    """
    place = local_path(target, "TARGET").absolute()
    with opened(config) as router, working(f"Copying {router.config.directory.name}"):
        found = inspection_of(router).backup(str(place))
    text = (
        f"{found.directory} holds {count_of(len(found.stores), 'store')}, {human_bytes(found.bytes)}. Whoever writes "
        f"waited for {found.still_seconds * 1000:.1f} ms."
    )
    echo_result(as_json, asdict(found), text)


@click.command()
@click.argument("directory", type=LocalPath(), metavar="DIR")
@json_option
def calibrate_command(directory: Path, as_json: bool) -> None:
    """Measure how long the disk of DIR takes to sync.

    DIR is any directory on the disk that stores are to lie on. A file of its own is written there, for five seconds at
    most, and removed. Said is what each durability policy costs on this disk, and which one suits it; and where a sync
    takes so short that the disk may not keep what it says.

    \b
    Example:
      anabranch calibrate data
      anabranch calibrate /mnt/fast --json
    """
    with working(f"Measuring {directory.absolute().name}"):
        found = calibrate(directory)
    echo_warnings([found.doubt] if found.doubt is not None else [])
    alone = found.alone_per_second
    provided = "" if found.doubt is None else ", if the disk keeps what it says that it has synced: see the warning"
    echo_result(
        as_json,
        asdict(found) | {"alone_per_second": alone},
        f"A small write and its sync take {found.median * 1000:.3f} ms; one in a hundred {found.p99 * 1000:.3f} ms or "
        f"more; the longest of {found.writes} took {found.longest * 1000:.3f} ms.",
        f"always    as far as the disk goes, one caller sends some {alone:,.0f} messages a second; {CALLERS} callers "
        f"share syncs, and send up to {alone * CALLERS:,.0f}. A power failure costs nothing{provided}.",
        f"periodic  nobody waits. A power failure costs sync_interval and one sync more, {found.median * 1000:.3f} ms.",
        "never     nobody waits. A power failure costs what the system has not written, 30 seconds say.",
        f"For a store here:  {found.configuration}{provided}",
    )


@click.command()
@click.argument("directory", type=LocalPath(), metavar="DIR")
@config_file("Anabranch's configuration of DIR, where that does not say it itself.")
@json_option
@click.pass_context
def verify_command(ctx: click.Context, directory: Path, config_path: Path | None, as_json: bool) -> None:
    """Compare every byte of DIR that has a checksum with it.

    DIR is a data directory, or that of one journal store. It is only read, and no process may have it open. Each damage
    is told with its file, the offset, what is lost by it, and what to do.

    A journal is read where it lies. A copy of its index, and of a store in SQLite, is made in the directory for
    temporary files (TMPDIR). What lies in a database elsewhere is not read, which is said. The exit code is 1 where
    anything is damaged.

    \b
    Example:
      anabranch verify data
      anabranch verify data/stores/orders --json
    """
    given = load(config_path, names_suffice=True) if config_path is not None else None
    config = given or known_configuration(directory.absolute())
    with working(f"Reading {directory.absolute().name}") as progress:
        found = verify(directory, config, lambda what, done, total: progress.stage(what, done / total if total else 0))
    echo_warnings(found.notes)
    echo_result(
        as_json,
        {
            "directory": found.directory,
            "stores": found.stores,
            "damages": [damage._asdict() for damage in found.damages],
            "notes": found.notes,
        },
        *_verified(directory, found),
    )
    if found.damages:
        ctx.exit(1)


def _verified(directory: Path, found: Verified) -> list[str]:
    lines = [f"{one.path} at offset {one.offset}: {one.reason}\n  lost: {one.lost}" for one in found.damages]
    names = ", ".join(found.stores) or "none"
    if found.damages:
        lines.append(
            f"{count_of(len(found.damages), 'place')} damaged. Restore {directory} from a backup, all of it from one "
            f"moment; or make a directory of all that can be read: anabranch salvage {directory} --to NEW. Before "
            "that a store may not open, even where nothing is lost; on_corruption: salvage mends a journal as it opens."
        )
    else:
        lines.append(f"{directory} is whole. Stores that were verified: {names}.")
    return lines


@click.command()
@on_directory()
@click.option("--out", type=LocalPath(), metavar="FILE", help="Where to write the lines, instead of on stdout.")
@click.option("--force", is_flag=True, help="Replace the file of --out where it is there already.")
@json_option
def export_command(config: Config, out: Path | None, force: bool, as_json: bool) -> None:
    """Write all that a directory holds as JSON Lines.

    The lines have all messages with all that is known of them, large bodies, maps, durable subscriptions and what each
    has yet to ack, the message ids that are remembered, and prepared transactions. `anabranch import` brings them into
    any directory. Messages that are not persistent, and stores that other routers use too, are left out. So are
    stores in memory.

    No process may have the directory open: export a backup then. --json needs --out, and prints what was written.

    \b
    Example:
      anabranch export data --out data.jsonl
      anabranch export data | gzip > data.jsonl.gz
    """
    if as_json and out is None:
        raise click.UsageError("with --json the lines need --out FILE")
    require_used(config)
    with warnings_shown(), working(f"Exporting {config.directory.name}") as progress:
        try:
            done = _exported(config, out, force, progress)
        except StoreLockedError as error:
            raise StoreLockedError(f"{error}; or export a backup, which `anabranch backup` makes meanwhile") from error
    echo_warnings(f"not exported: {one}" for one in done.left_out)
    if out is not None:
        text = f"{count_of(done.messages, 'message')} of {count_of(done.destinations, 'destination')} written to {out}"
        echo_result(as_json, {"written": str(out), **asdict(done)}, f"{text}.")


def _exported(config: Config, out: Path | None, force: bool, progress: Work) -> Exported:
    """Export into a file, or else to stdout."""

    def told(what: str, done: int, total: int) -> None:
        progress.stage(what, done / total if total else 0)

    if out is None:
        done = export(config, sys.stdout.buffer.write, told)
        sys.stdout.buffer.flush()
        return done
    done = Exported()

    def write(path: Path) -> None:
        nonlocal done
        with path.open("xb") as file:
            done = export(config, file.write, told)

    write_file(out, write, overwrite=force)
    return done


@click.command()
@click.option("--from-kahadb", "source", type=LocalPath(), metavar="SOURCE",
              help="Bring over what is pending in this directory of ActiveMQ's, a KahaDB or mKahaDB.")  # fmt: skip
@on_directory("[FILE]")
@click.option("--from-line", type=click.IntRange(min=1), default=1, metavar="N",
              help="The first line of FILE to import, where an import has stopped.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would go where, and what not; write nothing.")
@click.option("--force", is_flag=True, help="With --from-kahadb: import what can be, also where files are damaged or "
              "messages left out.")  # fmt: skip
@json_option
def import_command(
    config: Config, source: Path | None, file: str | None, from_line: int, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Bring in an export, or a broker's messages.

    FILE is what `anabranch export` has written, - is stdin. Its messages come behind those that are there, into the
    stores that the configuration of DIR names. A message whose id is remembered there is not brought twice; one without
    an id is. A map's value takes the place of the one that its key has. At a line that is broken the import stops: all
    before it is imported, and the error says how to go on.

    With --from-kahadb the messages in a broker's queues, and those that its durable subscriptions have yet to ack, come
    into the data directory. They keep message ids, headers, priorities, expiry and redelivery counts. Stop the broker
    first. If that import was cut short, give the same command again: it goes on, and nothing comes twice.

    \b
    Example:
      anabranch import data data.jsonl
      gunzip < data.jsonl.gz | anabranch import -c stores.yaml -
      anabranch import --from-kahadb /var/activemq/kahadb -c stores.yaml --dry-run
    """
    if (source is None) == (file is None):
        raise click.UsageError("give the FILE of an export, or --from-kahadb SOURCE: one of them")
    if source is not None:
        if from_line != 1:
            raise click.UsageError("--from-line is for the FILE of an export")
        bring_from_kahadb(config, source, dry_run, force, as_json)
        return
    assert file is not None
    if force:
        raise click.UsageError("--force is for --from-kahadb")
    opening = sys.stdin.buffer if file == "-" else local_path(file, "FILE").open("rb")
    with warnings_shown(), working(f"Importing {Path(file).name}"), opening as lines:
        done = import_lines(config, lines, file, from_line, dry_run)
    echo_warnings(f"left out: {one}" for one in done.left_out)
    verb = "would be imported" if dry_run else "imported"
    if done.known and done.without_id:
        came = f"{count_of(done.without_id, 'message')} without an id came too"
        echo_warnings([f"{came}: once more, if FILE was imported here before"])
    known = f"; {done.known:,} known already (messages and ids)" if done.known else ""
    known = "; what is known there already was not looked at" if dry_run else known
    text = f"{count_of(done.messages, 'message')} of {count_of(done.lines, 'line')} {verb}{known}."
    echo_result(as_json, {"directory": str(config.directory), "dry_run": dry_run, **asdict(done)}, text)
