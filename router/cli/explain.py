"""`anabranch explain`: why each journal file of a directory is kept."""

from __future__ import annotations

from pathlib import Path
from shutil import get_terminal_size

import click

from .output import LocalPath, echo_json, json_option, working


@click.command()
@click.argument("directory", type=LocalPath())
@json_option
def command(directory: Path, as_json: bool) -> None:
    """Say why each journal file is kept.

    DIRECTORY is one of ActiveMQ's KahaDB; it is only read. For each file: which destination's pending messages, which
    chain of acks, which transaction.

    \b
    Example:
      anabranch explain /var/lib/activemq/kahadb
      anabranch explain --json /var/lib/activemq/kahadb
    """
    from ...adapters import kahadb

    with working(f"Reading {directory.name}") as progress:
        explanation = kahadb.explain(directory, progress)
    if as_json:
        echo_json(explanation.to_json())
    else:
        click.echo(kahadb.render_text(explanation, get_terminal_size((120, 24)).columns), nl=False)
