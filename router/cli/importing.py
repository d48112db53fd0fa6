"""`anabranch import`: the pending messages of an ActiveMQ broker, into stores of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...policies.config import Config
from ...policies.text import count_of, human_bytes
from .directory import on_directory
from .output import LocalPath, echo_json, echo_table, json_option, working

if TYPE_CHECKING:
    from ..offline.importing import Report


@click.command()
@click.option(
    "--from-kahadb", "source", type=LocalPath(), required=True, help="The KahaDB or mKahaDB directory; only read."
)
@on_directory()
@click.option("--dry-run", is_flag=True, help="Say what would go where, and what not; write nothing.")
@click.option("--force", is_flag=True, help="Import what can be, also where files are damaged or messages left out.")
@json_option
def command(config: Config, source: Path, dry_run: bool, force: bool, as_json: bool) -> None:
    """Bring an ActiveMQ broker's pending messages over.

    The messages in its queues, and those that its durable subscriptions have yet to ack, come into the data directory.
    They are routed as the configuration says, and keep message ids, headers, priorities, expiry and redelivery counts.
    Stop the broker first; its files are only read. If an import was cut short, give the same command again: it goes on,
    and nothing comes twice.

    \b
    Example:
      anabranch import --from-kahadb /var/activemq/kahadb -c stores.yaml --dry-run
      anabranch import --from-kahadb /var/activemq/kahadb -c stores.yaml
      anabranch import --from-kahadb /var/activemq/kahadb data --json
    """
    from ...adapters.kahadb.pending import pending_of
    from ...policies.errors import ConfigError, PlacementError
    from ..offline import importing

    with working(f"Reading {source.name}") as work:

        def progress(what: str, done: int, total: int) -> None:
            work.stage(what, done / total if total else 0.0)

        with pending_of(source, work) as pending:
            report = importing.survey(config, pending, progress)
            refused = None
            if dry_run:
                refused = importing.in_use(config, pending, report)
            else:
                report.require_importable(force)
                importing.bring_in(config, pending, report, progress)
    if as_json:
        echo_json({**importing.as_json(report), "dry_run": dry_run})
    else:
        _print(report, dry_run)
    for line in importing.warnings(report):
        click.echo(f"Warning: {line}", err=True)
    if report.problems:
        raise ConfigError(list(report.problems))
    if refused is not None:
        raise PlacementError(refused)


def _print(report: Report, dry_run: bool) -> None:
    rows = [("destination", "messages", "bytes", "subscriptions", "store")]
    rows += [
        (str(one.destination), f"{one.messages:,}", human_bytes(one.bytes), str(len(one.subscriptions)), one.store)
        for one in report.destinations
    ]
    if report.destinations:
        echo_table(rows, left=(0, 4))
    what = f"{count_of(report.messages, 'message')} of {count_of(len(report.destinations), 'destination')}"
    click.echo(f"{what} {'would be imported' if dry_run else 'imported, and counted in their stores'}.")
