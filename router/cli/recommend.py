"""`anabranch recommend`: which destinations should share a store."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from ...policies.config.options import JournalOptions
from ...policies.errors import ConfigError, TraceError
from ...policies.outputs import check_file, scratch_directory
from ...policies.units import parse_size
from .mkahadb import as_mkahadb, echo_notes, write_xml
from .output import LocalPath, PathOrUrl, echo_json, json_option, warnings_shown, working
from .trace import (
    check_engine,
    engine_options,
    require_outside,
    usage_option,
    usage_table,
    workload_option,
    workload_trace,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from ...policies.advisor import CurrentConfig, Workload
    from ..usage import UsageTrace


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
@click.option("--trace", "trace_path", type=PathOrUrl(), metavar="PATH",
              help="A usage trace: .parquet, .arrow, .csv, a directory of Parquet, or its hdfs:// URL.")  # fmt: skip
@workload_option
@usage_option
@click.option("--out", type=PathOrUrl(), required=True, metavar="DIR",
              help="Where recommendation.json, stores.yaml, summary.txt and report.html go, or its hdfs:// URL; made "
                   "if missing.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace these files where they are there already.")
@click.option("--mkahadb-xml", type=LocalPath(), metavar="FILE",
              help="Also write it as an <mKahaDB> for ActiveMQ, as anabranch mkahadb --from-config does; with "
                   "--model kahadb.")  # fmt: skip
@click.option("--current", "current_path", type=LocalPath(), metavar="FILE",
              help="The stores.yaml in force, to compare with; what is written is that file, revised. Default: that "
                   "under which the log of --usage was recorded.")  # fmt: skip
@click.option("--durability", multiple=True, metavar="PATTERN=POLICY",
              help="How what the pattern matches syncs: always, periodic or never. Different ones share no store. "
                   "Default: as --current says, else always.")  # fmt: skip
@click.option("--pin", "pinned", multiple=True, metavar="PATTERN,...",
              help="What these patterns match stays together in one store.")  # fmt: skip
@click.option("--segment-size", "segment_sizes", type=SizeOption(), multiple=True, metavar="SIZE",
              help="Size of one journal file; of several the best is taken. Default: as --current has it, "
                   "else 32MiB.")  # fmt: skip
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
    "--disk-gib", type=float, default=100.0, show_default=True, help="The disk's size, for the price of its time."
)
@click.option("--sync-rate", type=float, default=5000.0, show_default=True, help="Syncs a second that the disk can do.")
@click.option("--copy-rate", type=float, default=100.0, show_default=True,
              help="MiB a second that the disk copies, each byte read once and written once.")  # fmt: skip
@engine_options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    kahadb_directory: Path | None,
    trace_path: Path | str | None,
    workload_path: Path | None,
    usage_directories: tuple[Path, ...],
    out: Path | str,
    force: bool,
    mkahadb_xml: Path | None,
    current_path: Path | None,
    durability: tuple[str, ...],
    pinned: tuple[str, ...],
    segment_sizes: tuple[int, ...],
    model: str,
    clock: str | None,
    stores_max: int | None,
    peak_max: int | None,
    disk_gib: float,
    sync_rate: float,
    copy_rate: float,
    master: str | None,
    engine: str,
    as_json: bool,
) -> None:
    """Recommend which destinations should share a store.

    Reads how they were used, simulates which journal files every partitioning would have kept, and writes the best
    one as a configuration. What a trace and a workload look like, what the figures and the warnings mean, which model
    and which clock to choose: docs/advisor.md. --disk-gib, --sync-rate and --copy-rate weigh disk against transactions
    over several stores and against what compaction copies.

    Where no partitioning keeps the cap of --peak-max, the one with the lowest peak is written, the summary says so
    first, and the exit code is 1.

    \b
    Example:
      anabranch recommend --usage data/usage --out advice
      anabranch recommend --from-kahadb /var/lib/activemq/kahadb --out advice --segment-size 512KiB
      anabranch recommend --from-kahadb /var/lib/activemq/kahadb --out advice --model kahadb --mkahadb-xml mkahadb.xml
      anabranch recommend --trace usage.csv --out advice --json
      anabranch recommend --trace usage.csv --out advice --current stores.yaml --pin "orders.>,audit" \\
          --durability "telemetry.>=never" --segment-size 8MiB --segment-size 32MiB
    """
    given = [path for path in (kahadb_directory, trace_path, workload_path, usage_directories or None) if path]
    if len(given) != 1:
        raise ConfigError([f"give one of --usage, --from-kahadb, --trace and --workload; {len(given)} were given"])
    check_engine(engine, master)
    if mkahadb_xml is not None and model != "kahadb":
        raise ConfigError(
            [f"--mkahadb-xml {mkahadb_xml} is for ActiveMQ, and the model is {model}'s; add --model kahadb"]
        )
    from ...policies.advisor import CurrentConfig, RecommendOptions, check_place, choose_engine, recommend_best
    from ...policies.advisor.search.pattern_options import parse_durability, parse_pins

    current = None if current_path is None else CurrentConfig.load(current_path)
    given_sizes = segment_sizes
    segment_sizes = given_sizes or (current.segment_bytes if current else JournalOptions().segment_size,)
    options = RecommendOptions(
        model=model,  # type: ignore[arg-type]
        segment_bytes=segment_sizes[0],
        durability=parse_durability(durability),
        pinned=parse_pins(pinned),
        current=current,
        clock=clock or ("seq" if kahadb_directory is not None else "ts"),  # type: ignore[arg-type]
        disk_gib=disk_gib,
        sync_rate=sync_rate,
        copy_rate=copy_rate,
        stores_max=stores_max,
        peak_bytes_max=peak_max,
        engine=engine,  # type: ignore[arg-type]
        master=master,
    )
    options.check()
    # Before the work, which may take minutes; what appears meanwhile is found when the files are written.
    require_outside(out, usage_directories)
    with warnings_shown():
        check_place(out, overwrite=force, master=master)
    if mkahadb_xml is not None:
        check_file(mkahadb_xml, overwrite=force)
    warnings: tuple[str, ...] = ()
    trace: Path | str | pa.Table | Workload
    if kahadb_directory is not None:
        trace, warnings = _kahadb_trace(kahadb_directory)
    elif usage_directories:
        trace, usage = usage_table(usage_directories)
        warnings = usage.warnings
        if current is None and (current := _remembered(usage)) is not None:
            segment_sizes = given_sizes or (current.segment_bytes,)
            options = replace(options, current=current, segment_bytes=segment_sizes[0])
    elif workload_path is not None:
        trace = workload_trace(workload_path, options.engine, master)
    else:
        assert trace_path is not None
        if isinstance(trace_path, Path) and not trace_path.exists():
            raise TraceError(f"{trace_path}: no such trace")
        trace = trace_path
    choice = choose_engine(trace, options.engine, master)
    if engine == "auto" and master is None:
        click.echo(f"Engine: {choice.name}, since {choice.why}.", err=True)
    options = replace(options, engine=choice.name)
    with warnings_shown(), working("Recommending") as progress:
        answer = recommend_best(trace, options, segment_sizes, progress.stage)
    paths = answer.write(out, overwrite=force, master=master)
    if mkahadb_xml is not None:
        with scratch_directory(Path(tempfile.gettempdir()), "anabranch") as scratch:
            stores = scratch / "stores.yaml"  # it may have been written to another file system
            stores.write_text(answer.stores_yaml(), encoding="utf-8")
            text, notes = as_mkahadb(stores)
        write_xml(mkahadb_xml, text, force)
        echo_notes(next(path for path in paths if str(path).endswith("stores.yaml")), notes)
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)
    if as_json:
        echo_json(answer.to_json())
    else:
        from ...policies.advisor import render_text

        click.echo(render_text(answer, get_terminal_size((80, 24)).columns, str(out)), nl=False)
        click.echo(f"\nWritten to {out}: {', '.join(str(path).rpartition('/')[2] for path in paths)}")
        if mkahadb_xml is not None:
            click.echo(f"For ActiveMQ: {mkahadb_xml}")
        click.echo(f"The report, for a browser: {paths[-1]}")
    if not answer.cap_kept:
        ctx.exit(1)


def _remembered(usage: UsageTrace) -> CurrentConfig | None:
    """Return the configuration that a usage log was recorded under. Prints what is taken for the one in force, and
    why."""
    from ...policies.advisor import CurrentConfig

    for note in usage.notes:
        click.echo(f"Note: {note}.", err=True)
    if usage.remembered is None:
        return None
    path = usage.remembered.path
    click.echo(f"In force: {path}, under which this was recorded; --current FILE says otherwise.", err=True)
    return CurrentConfig(usage.remembered.config, name=str(path))


def _kahadb_trace(directory: Path) -> tuple[pa.Table, tuple[str, ...]]:
    """Return the usage trace of a KahaDB, and what could not be read of it."""
    from ...adapters import kahadb
    from ...policies.advisor import from_events

    with working(f"Reading {directory.name}") as progress:
        usage = kahadb.usage_trace(directory, progress)
        return from_events(usage), usage.findings.warnings()
