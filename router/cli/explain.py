"""`anabranch explain`: why each journal file of a directory is kept."""

from __future__ import annotations

from pathlib import Path
from shutil import get_terminal_size

import click

from .output import LocalPath, Work, echo_json, json_option, working


@click.command()
@click.argument("directory", type=LocalPath())
@click.option(
    "--config",
    "-c",
    "config_path",
    type=LocalPath(),
    help="Anabranch's configuration of DIRECTORY, where indexes or archives lie elsewhere.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, directory: Path, config_path: Path | None, as_json: bool) -> None:
    """Say why each journal file is kept.

    DIRECTORY is a data directory of Anabranch's, or one of its journal stores, or one of ActiveMQ's KahaDB. It is only
    read. A file is kept for the pending messages of a destination or a subscription, or for a prepared transaction. In
    KahaDB it is also kept for a chain of acks.

    Messages that an interrupted repartition has copied, and that do not count yet, are marked.

    No process may have a directory of Anabranch's open meanwhile. The command reads as much of a store's journal as its
    next opening would. The exit code is 1 also where a store cannot be read, or is damaged.

    \b
    Example:
      anabranch explain data
      anabranch explain --json data/stores/orders
      anabranch explain /var/lib/activemq/kahadb
    """
    from ..upkeep.explanation import is_ours

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
    from ...policies.config import load
    from ..placement.in_force import known_configuration
    from ..upkeep.explanation import explain
    from ..upkeep.explanation_text import render_text

    config = load(config_path) if config_path is not None else known_configuration(directory.absolute())
    found = explain(directory, config, lambda what, done, total: progress(done, total))
    is_whole = not found.unreadable and not any(store.damages for store in found.stores)
    return render_text(found, _columns()), found.to_json(), is_whole


def _kahadb(directory: Path, config_path: Path | None, progress: Work) -> Explained:
    from ...adapters import kahadb
    from ...adapters.kahadb.files import find_stores
    from ...policies.errors import ConfigError, TraceError

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
