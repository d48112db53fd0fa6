"""`anabranch recommend`: which destinations should share a store."""

from __future__ import annotations

from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from ...policies.errors import ConfigError, TraceError
from ...policies.units import parse_size
from .output import LocalPath, echo_json, json_option, warnings_shown, working

if TYPE_CHECKING:
    import pyarrow as pa


class SizeOption(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.3
    """`512KiB`, `32MiB`, or bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option("--from-kahadb", "kahadb_directory", type=LocalPath(), metavar="DIR",
              help="An ActiveMQ KahaDB directory, with its archive if there is one.")  # fmt: skip
@click.option("--trace", "trace_path", type=LocalPath(), metavar="PATH",
              help="A usage trace: .parquet, .arrow, .csv, or a directory of Parquet.")  # fmt: skip
@click.option("--workload", "workload_path", type=LocalPath(), metavar="FILE",
              help="A workload description in YAML, from which a trace is generated.")  # fmt: skip
@click.option("--out", type=LocalPath(), required=True, metavar="DIR",
              help="Where recommendation.json, stores.yaml and summary.txt go; made where it is missing.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace these files where they are there already.")
@click.option("--segment-size", type=SizeOption(), default="32MiB", show_default=True,
              help="Size of one journal file.")  # fmt: skip
@click.option("--model", type=click.Choice(["anabranch", "kahadb"]), default="anabranch", show_default=True,
              help="Whose journal to predict: our own, or ActiveMQ's with its ack rule.")  # fmt: skip
@click.option("--clock", type=click.Choice(["ts", "seq"]), default=None,
              help="The trace's clock, or order alone. Default: seq with --from-kahadb, else ts.")  # fmt: skip
@click.option("--stores-max", type=click.IntRange(1), default=None, help="At most so many stores.")
@click.option(
    "--peak-max",
    type=SizeOption(),
    default=None,
    help="A cap on all journals together at the peak. Where none found keeps it: exit code 1.",
)
@click.option(
    "--disk-gib", type=float, default=100.0, show_default=True, help="The disk's size, for the price of a sync."
)
@click.option("--sync-rate", type=float, default=5000.0, show_default=True, help="Syncs a second that the disk can do.")
@click.option("--master", default=None, metavar="URL", help="A Spark master. Default: this machine.")
@click.option("--engine", type=click.Choice(["spark", "local"]), default="spark", show_default=True,
              help="Who summarises; local needs no Java and suits traces that fit in memory.")  # fmt: skip
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    kahadb_directory: Path | None,
    trace_path: Path | None,
    workload_path: Path | None,
    out: Path,
    force: bool,
    segment_size: int,
    model: str,
    clock: str | None,
    stores_max: int | None,
    peak_max: int | None,
    disk_gib: float,
    sync_rate: float,
    master: str | None,
    engine: str,
    as_json: bool,
) -> None:
    """Recommend which destinations should share a store.

    Reads how they were used, simulates which journal files every partitioning would have kept, and writes the best
    one as a configuration. What a trace and a workload look like, what the figures and the warnings mean, which model
    and which clock to choose: docs/advisor.md. --disk-gib and --sync-rate weigh disk against transactions over
    several stores.

    Where no partitioning keeps the cap of --peak-max, the one with the lowest peak is written, the summary says so
    first, and the exit code is 1.

    \b
    Example:
      anabranch recommend --from-kahadb /var/lib/activemq/kahadb --out advice --segment-size 512KiB
      anabranch recommend --from-kahadb /var/lib/activemq/kahadb --out advice --model kahadb
      anabranch recommend --trace usage.csv --out advice --json
    """
    given = [path for path in (kahadb_directory, trace_path, workload_path) if path is not None]
    if len(given) != 1:
        raise ConfigError([f"give one of --from-kahadb, --trace and --workload; {len(given)} were given"])
    if master is not None and engine == "local":
        raise ConfigError([f"--engine local uses no Spark, so --master {master} has no effect; leave one of them out"])
    from ...policies.partitioning import RecommendOptions, check_place, recommend

    options = RecommendOptions(
        model=model,  # type: ignore[arg-type]
        segment_bytes=segment_size,
        clock=clock or ("seq" if kahadb_directory is not None else "ts"),  # type: ignore[arg-type]
        disk_gib=disk_gib,
        sync_rate=sync_rate,
        stores_max=stores_max,
        peak_bytes_max=peak_max,
        engine=engine,  # type: ignore[arg-type]
        master=master,
    )
    options.check()
    # Before the work, which may take minutes; what appears meanwhile is found when the files are written.
    check_place(out, overwrite=force)
    warnings: tuple[str, ...] = ()
    trace: Path | pa.Table
    if kahadb_directory is not None:
        trace, warnings = _kahadb_trace(kahadb_directory)
    elif workload_path is not None:
        trace = _workload_trace(workload_path)
    else:
        assert trace_path is not None
        if not trace_path.exists():
            raise TraceError(f"{trace_path}: no such trace")
        trace = trace_path
    with warnings_shown(), working("Recommending") as progress:
        answer = recommend(trace, options, progress.stage)
    paths = answer.write(out, overwrite=force)
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)
    if as_json:
        echo_json(answer.to_json())
    else:
        from ...policies.partitioning import render_text

        click.echo(render_text(answer, get_terminal_size((100, 24)).columns), nl=False)
        click.echo(f"\nWritten: {', '.join(str(path) for path in paths)}")
    if not answer.cap_kept:
        ctx.exit(1)


def _kahadb_trace(directory: Path) -> tuple[pa.Table, tuple[str, ...]]:
    """The usage trace of a KahaDB, and what could not be read of it."""
    from ...adapters import kahadb
    from ...policies.partitioning import from_events

    with working(f"Reading {directory.name}") as progress:
        usage = kahadb.usage_trace(directory, progress)
        return from_events(usage), usage.findings.warnings()


def _workload_trace(path: Path) -> pa.Table:
    from ...policies.partitioning import Workload, generate

    with working(f"Generating {path.name}"):
        workload = Workload.load(path)
        try:
            return generate(workload)
        except ConfigError as error:
            raise ConfigError(error.problems, str(path)) from error
