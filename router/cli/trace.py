"""`anabranch trace`: usage logs as one usage trace in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...policies.errors import ConfigError, TraceError
from ...policies.outputs import check_file, write_file
from .output import LocalPath, echo_json, json_option, working

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv")

usage_option = click.option(
    "--usage", "usage_directories", type=LocalPath(), metavar="DIR", multiple=True,
    help="A usage log: the directory usage/ of a data directory, or that itself. Several are merged by their clocks.",
)  # fmt: skip


@click.command()
@usage_option
@click.option("--out", type=LocalPath(), required=True, metavar="FILE",
              help="Where the trace goes: .parquet, .arrow, .feather or .csv.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the file where it is there already.")
@json_option
def command(usage_directories: tuple[Path, ...], out: Path, force: bool, as_json: bool) -> None:
    """Write what usage logs recorded as a usage trace.

    A router records with `usage: {}` in its configuration, or once its program calls start_usage_log(). The logs are
    only read, also while they are written. What the trace's columns mean: docs/advisor.md. `anabranch recommend
    --usage` reads the logs itself: a trace is for other programs, for Spark, or to be kept.

    \b
    Example:
      anabranch trace --usage data/usage --out trace.parquet
      anabranch trace --usage node1/usage --usage node2/usage --out trace.parquet
    """
    if not usage_directories:
        raise ConfigError(["give at least one --usage, the directory usage/ of a data directory"])
    if not out.name.lower().endswith(SUFFIXES):
        raise ConfigError([f"--out {out} has no suffix of a trace; .parquet, .arrow, .feather and .csv are written"])
    require_outside(out, usage_directories)
    check_file(out, overwrite=force)  # before the work, which may take minutes
    from ...policies.partitioning.trace import write_trace

    table, warnings = usage_table(usage_directories)
    write_file(out, lambda path: write_trace(table, path), overwrite=force)
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)
    if as_json:
        echo_json({"written": str(out), "operations": table.num_rows, "warnings": list(warnings)})
    else:
        click.echo(f"Written: {out}, {table.num_rows:,} operation{'' if table.num_rows == 1 else 's'}")


def require_outside(out: Path, usage_directories: tuple[Path, ...]) -> None:
    """Raise ConfigError for an --out within a usage log, where its router keeps files; TraceError where there is no
    log."""
    from ..usage.reading import directory_of, find_logs

    place = out.resolve()
    for directory in usage_directories:
        for journal in find_logs(directory):
            log = directory_of(journal)
            if log.resolve() in (place, *place.parents):
                raise ConfigError([f"--out {out} lies in the usage log {log}, which is only read; give another place"])


def usage_table(directories: tuple[Path, ...]) -> tuple[pa.Table, tuple[str, ...]]:
    """The trace of usage logs, and what one should know of it. Raises TraceError, also for one that holds nothing."""
    from ...policies.partitioning import from_events
    from ..usage import usage_trace

    with working(f"Reading {directories[0].name}") as progress:
        usage = usage_trace(directories, progress)
        table = from_events(usage)
    if not table.num_rows:
        named = " and ".join(str(directory) for directory in directories)
        if usage.warnings:
            raise TraceError(f"{named}: no operation can be read there: {'; '.join(usage.warnings)}")
        raise TraceError(f"{named}: nothing is recorded there yet; let the router run for some days of ordinary use")
    return table, usage.warnings
