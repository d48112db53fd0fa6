"""Commands over ActiveMQ: `import` brings a broker's messages, `mkahadb` its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...adapters.kahadb.pending import pending_of
from ...policies.config import Config, load
from ...policies.errors import ConfigError, PlacementError
from ...policies.outputs import write_file
from ...policies.text import count_of, human_bytes
from ..offline import importing
from ..offline.importing import Report
from .output import LocalPath, echo_json, echo_table, echo_warnings, json_option, working


def bring_from_kahadb(config: Config, source: Path, dry_run: bool, force: bool, as_json: bool) -> None:
    """Import a broker's pending messages, and print what came."""
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
    echo_warnings(importing.warnings(report))
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


@click.command()
@click.argument("xml_path", metavar="[ACTIVEMQ_XML]", type=LocalPath(), required=False)
@click.option("--from-config", "config_path", type=LocalPath(), help="The other way: this stores.yaml as an <mKahaDB>.")
@click.option("--property", "-D", "given", metavar="NAME=VALUE", multiple=True,
              help="Replace ${NAME} by this value; may be repeated.")  # fmt: skip
@click.option("--properties", "files", type=LocalPath(), multiple=True,
              help="A file of properties, or ActiveMQ's env file; may be repeated.")  # fmt: skip
@click.option("--directory", help="The directory to write into the result: of our stores, or of the mKahaDB.")
@click.option("--out", type=LocalPath(), help="Where to write it, instead of on stdout.")
@click.option("--force", is_flag=True, help="Replace the file of --out where it is there already.")
@json_option
def mkahadb_command(
    xml_path: Path | None,
    config_path: Path | None,
    given: tuple[str, ...],
    files: tuple[Path, ...],
    directory: str | None,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Convert ActiveMQ's <mKahaDB> to stores.yaml, or back.

    ACTIVEMQ_XML is a broker's configuration, XBean or plain Spring beans. Only its persistence adapter, a <kahaDB> or
    an <mKahaDB>, is read. ${...} stands for what --property gives, else --properties, else the environment. With
    --from-config the result goes into <broker> in place of its <persistenceAdapter>. So the advice of
    `anabranch recommend` becomes a split for ActiveMQ.

    Options without a counterpart stand in comments at the head of the result, and on stderr if the result goes to a
    file. The command converts configuration alone: no message moves.

    \b
    Example:
      anabranch mkahadb activemq.xml -D activemq.data=/var/lib/activemq --out stores.yaml
      anabranch mkahadb --from-config advice/stores.yaml --out mkahadb.xml
    """
    if (xml_path is None) == (config_path is None):
        raise ConfigError(["give an activemq.xml, or a stores.yaml by --from-config: one of them"])
    if config_path is not None:
        if given or files:
            raise ConfigError(["--property and --properties are for an activemq.xml; leave them out"])
        text, found = as_mkahadb(config_path, directory)
    else:
        assert xml_path is not None
        text, found = _from_activemq(xml_path, given, files, directory)
    if out is not None:
        write_xml(out, text, force)
    if as_json:
        echo_json({"written": str(out) if out is not None else None, "text": text, "notes": found})
    elif out is None:
        click.echo(text, nl=False)
    else:
        echo_notes(xml_path or config_path, found)
        click.echo(f"Written: {out}")


Notes = list[dict[str, Any]]


def echo_notes(source: Path | str | None, notes: Notes) -> None:
    """Print on stderr the notes about things that have no counterpart."""
    for note in notes:
        where = f"{source}:{note['line']}" if note["line"] else str(source)
        click.echo(f"{where}: note: {note['message']}", err=True)


def _from_activemq(
    path: Path, given: tuple[str, ...], files: tuple[Path, ...], directory: str | None
) -> tuple[str, Notes]:
    from ...policies.activemq import read_properties, read_stores
    from ...policies.activemq.placeholders import given_properties

    properties: dict[str, str] = {}
    for file in files:
        properties |= read_properties(file)
    found = read_stores(path, properties | given_properties(given))
    return found.stores_yaml(directory or "data"), [{"line": n.line, "message": n.message} for n in found.notes]


def as_mkahadb(path: Path, directory: str | None = None) -> tuple[str, Notes]:
    """Return a stores.yaml as an <mKahaDB>, and notes about things that have no counterpart there."""
    from ...policies.activemq import write_mkahadb
    from ...policies.activemq.writing import DIRECTORY

    written = write_mkahadb(load(path, names_suffice=True), directory or DIRECTORY, path.name)
    return written.xml, [{"line": 0, "message": note} for note in written.notes]


def write_xml(path: Path, text: str, force: bool) -> None:
    """Write a file, whole or not at all. Raises ConfigError where it is there already, unless `force`."""
    write_file(path, lambda written: written.write_text(text, encoding="utf-8"), overwrite=force)
