"""Commands of the advisor: `trace` writes usage traces, `recommend` says which destinations should share a store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from ...policies.advisor.trace.events import NodeLog
from ...policies.config import loads
from ...policies.config.options import JournalOptions
from ...policies.errors import ConfigError, TraceError
from ...policies.outputs import check_file, is_elsewhere, scratch_directory, write_file
from ...policies.text import count_of
from ...policies.units import format_size, parse_size
from ..usage.reading import UsageTrace, directory_of, find_logs, usage_trace
from .activemq import Notes, as_mkahadb, echo_notes, write_xml
from .output import LocalPath, PathOrUrl, echo_json, echo_result, echo_warnings, json_option, warnings_shown, working

if TYPE_CHECKING:
    import pyarrow as pa

    from ...policies.advisor import CurrentConfig, Recommendation, RecommendOptions, Workload

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv")


def _listed(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> tuple[Path | str, ...]:
    """Return the paths and URLs of an option that takes several, with commas between them or one by one."""
    given = [part for value in values for part in ([value] if Path(value).exists() else value.split(","))]
    if "" in given:
        raise ConfigError([f"--usage {','.join(values)} has nothing before or behind a comma; give a path there"])
    return tuple(PathOrUrl().convert(part, param, ctx) for part in given)


usage_option: Final = click.option(
    "--usage", "usage_directories", callback=_listed, metavar="DIR,...", multiple=True,
    help="A usage log: the directory usage/ of a data directory, or that itself, or its hdfs:// URL. Those of several "
         "nodes, or a directory that holds them, are read as one trace.",
)  # fmt: skip
workload_option: Final = click.option(
    "--workload", "workload_path", type=LocalPath(), metavar="FILE",
    help="A workload description in YAML, from which a trace is generated.",
)  # fmt: skip


def engine_options(command: Any) -> Any:
    """Give a command the options that say who does the work."""
    master = click.option("--master", default=None, metavar="URL", help="A Spark master. Default: this machine.")
    engine = click.option(
        "--engine", type=click.Choice(["auto", "spark", "local"]), default="auto", show_default=True,
        help="The engine of the work: local needs no Java, spark no memory; auto goes by its size.",
    )  # fmt: skip
    return master(engine(command))


def check_engine(engine: str, master: str | None) -> None:
    """Raise ConfigError where the two options contradict each other."""
    if master is not None and engine == "local":
        raise ConfigError([f"--engine local uses no Spark, so --master {master} has no effect; leave one of them out"])


@click.command()
@usage_option
@workload_option
@click.option("--out", type=PathOrUrl(), required=True, metavar="PATH",
              help="Where the trace goes: a .parquet, .arrow, .feather or .csv file, or its hdfs:// URL; through Spark "
                   "a directory of Parquet.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace what is there already.")
@engine_options
@json_option
def trace_command(
    usage_directories: tuple[Path | str, ...],
    workload_path: Path | None,
    out: Path | str,
    force: bool,
    master: str | None,
    engine: str,
    as_json: bool,
) -> None:
    """Write a usage trace of usage logs, or of a workload.

    A router records with `usage: {}` in its configuration, or once its program calls start_usage_log(). The logs are
    only read, also while they are written. The page "The advisor" of the documentation says what the trace's columns
    mean. `anabranch recommend` reads logs and workloads itself. A trace is for other programs, for Spark, or to be
    kept.

    The logs of several nodes make one trace, which says in the column node where each operation was. Clocks that
    differ are merged by the messages that were sent on one node and acked on another.

    Spark generates the trace of a large workload: more than 10 million operations, or with --engine spark or --master.
    Its workers write a directory of Parquet files.

    \b
    Example:
      anabranch trace --usage data/usage --out trace.parquet
      anabranch trace --usage node1/usage,node2/usage --out trace.parquet
      anabranch trace --workload workload.yaml --out trace.parquet
      anabranch trace --workload workload.yaml --out hdfs://namenode/trace --master spark://host:7077
    """
    if bool(usage_directories) == (workload_path is not None):
        raise ConfigError(["give at least one --usage, the directory usage/ of a data directory, or --workload"])
    check_engine(engine, master)
    if usage_directories and (engine == "spark" or master is not None):
        raise ConfigError(["usage logs are read by this process; leave --engine and --master out"])
    warnings: tuple[str, ...] = ()
    if workload_path is None:
        require_outside(out, usage_directories)
        _check_out(out, force)
        table, usage = usage_table(usage_directories)
        warnings = usage.warnings
        if usage.logs:
            from ...policies.advisor.advice.sharing import clock_sentence

            for log in usage.logs[1:]:
                click.echo(f"Note: {clock_sentence(log)}", err=True)
        count = _write(table, out, force)
    else:
        count = _write_workload(workload_path, out, force, master, engine)
    echo_warnings(warnings)
    said = {"written": str(out), "operations": count, "warnings": list(warnings)}
    echo_result(as_json, said, f"Written: {out}, {count_of(count, 'operation')}")


def _check_out(out: Path | str, force: bool) -> None:
    """Raise ConfigError where one file cannot be written there; before the work, which may take minutes."""
    if not str(out).lower().endswith(SUFFIXES):
        raise ConfigError(
            [
                f"--out {out} has no suffix of a trace; .parquet, .arrow, .feather and .csv are written, and of "
                "--workload with --engine spark a directory of Parquet"
            ]
        )
    if isinstance(out, Path):
        check_file(out, overwrite=force)
    else:
        from ...policies.advisor.spark.hadoop import file_system

        with file_system(out) as files:
            files.check_file(out, overwrite=force)


def _write(table: pa.Table, out: Path | str, force: bool) -> int:
    from ...policies.advisor.trace.table import write_trace

    if isinstance(out, Path):
        write_file(out, lambda path: write_trace(table, path), overwrite=force)
    else:
        from ...policies.advisor.spark.hadoop import file_system

        with scratch_directory(Path(tempfile.gettempdir()), "anabranch") as scratch, file_system(out) as files:
            copy = scratch / out.rpartition("/")[2]
            write_trace(table, copy)
            files.copy_file(copy, out, overwrite=force)
    return int(table.num_rows)


def _write_workload(path: Path, out: Path | str, force: bool, master: str | None, engine: str) -> int:
    from ...policies.advisor import Workload, choose_engine

    workload = Workload.load(path)
    if choose_engine(workload, engine, master).name == "local":  # type: ignore[arg-type]
        _check_out(out, force)
        return _write(_generated(workload, path), out, force)
    from ...policies.advisor.workload.files import write_workload

    if Path(str(out)).suffix.lower() in SUFFIXES[1:]:
        raise ConfigError([f"--out {out}: Spark writes a directory of Parquet; give it a name without that suffix"])
    with warnings_shown(), working(f"Generating {path.name}"):
        return write_workload(workload, out, master=master, overwrite=force)


def workload_trace(path: Path, engine: str, master: str | None) -> pa.Table | Workload:
    """Return the trace of a workload; the workload itself where Spark is to generate it."""
    from ...policies.advisor import Workload, choose_engine

    workload = Workload.load(path)
    if choose_engine(workload, engine, master).name == "spark":  # type: ignore[arg-type]
        return workload
    return _generated(workload, path)


def _generated(workload: Workload, path: Path) -> pa.Table:
    from ...policies.advisor import generate

    with working(f"Generating {path.name}"):
        try:
            return generate(workload)
        except ConfigError as error:
            raise ConfigError(error.problems, str(path)) from error


def require_outside(out: Path | str, usage_directories: tuple[Path | str, ...]) -> None:
    """Raise ConfigError for an --out within a usage log, where its router keeps files; TraceError where there is no
    log."""
    if not isinstance(out, Path):
        return  # on another file system
    place = out.resolve()
    for directory in usage_directories:
        for journal in find_logs(directory) if isinstance(directory, Path) else ():
            log = directory_of(journal)
            if log.resolve() in (place, *place.parents):
                raise ConfigError([f"--out {out} lies in the usage log {log}, which is only read; give another place"])


def usage_table(given: Sequence[Path | str], master: str | None = None) -> tuple[pa.Table, UsageTrace]:
    """Return the trace of usage logs, as a table too, by one clock. Logs of URLs are read in copies. Raises TraceError,
    also where nothing is recorded."""
    from ...policies.advisor import from_events
    from ...policies.advisor.trace.nodes import merge_clocks

    with _on_this_machine(given, master) as directories, working(f"Reading {directories[0].name}") as progress:
        usage = usage_trace(directories, progress)
        table = from_events(usage)
        if len(usage.nodes) > 1:
            table, logs = merge_clocks(table, usage.nodes)
            usage.logs = tuple(log._replace(sampled=usage.sampled[log.node]) for log in logs)
    if not table.num_rows:
        named = " and ".join(map(str, given))
        if usage.warnings:
            raise TraceError(f"{named}: no operation can be read there: {'; '.join(usage.warnings)}")
        raise TraceError(f"{named}: nothing is recorded there yet; let the router run for some days of ordinary use")
    return table, usage


@contextmanager
def _on_this_machine(given: Sequence[Path | str], master: str | None) -> Iterator[list[Path]]:
    """Give the paths, and for each URL that of a copy, which goes at the end."""
    if not any(is_elsewhere(one) for one in given):
        yield [Path(one) for one in given]
        return
    from ...policies.advisor.spark.hadoop import file_system

    with scratch_directory(Path(tempfile.gettempdir()), "anabranch") as scratch:
        places = [Path(one) for one in given]
        for number, url in enumerate(given):
            if is_elsewhere(url):
                places[number] = scratch / str(number) / urlsplit(str(url)).path.strip("/")
                click.echo(f"Note: {url} is copied to be read, and is called {places[number]} here.", err=True)
                with file_system(str(url), master, read=True) as files:
                    files.fetch(str(url), places[number])
        yield places


class SizeOption(click.types.IntParamType):
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
              help="The stores.yaml in force, to compare with. Its revision is written. Default: the file "
                   "under which the log of --usage was recorded.")  # fmt: skip
@click.option("--durability", multiple=True, metavar="PATTERN=POLICY",
              help="How destinations of the pattern sync: always, periodic or never. Different ones share no store. "
                   "Default: as --current says, else always.")  # fmt: skip
@click.option("--pin", "pinned", multiple=True, metavar="PATTERN,...",
              help="Keep destinations that these patterns match in one store.")  # fmt: skip
@click.option("--segment-size", "segment_sizes", type=SizeOption(), multiple=True, metavar="SIZE",
              help="Size of one journal file. If given several times, the best is taken. Default: as --current has it, "
                   "else the broker's with --from-kahadb and --model kahadb, else 32MiB.")  # fmt: skip
@click.option("--model", type=click.Choice(["anabranch", "kahadb"]), default="anabranch", show_default=True,
              help="Whose journal to predict: our own, or ActiveMQ's with its ack rule.")  # fmt: skip
@click.option("--clock", type=click.Choice(["ts", "seq"]), default=None,
              help="The trace's clock, or order alone. Default: seq with --from-kahadb, else ts.")  # fmt: skip
@click.option("--stores-max", type=click.IntRange(1), default=None, help="At most so many stores.")
@click.option("--peak-max", "peak_bytes_max", type=SizeOption(), default=None,
              help="A cap on all journals together at the peak. If no division keeps it: exit code 1.")  # fmt: skip
@click.option("--disk-gib", type=float, default=100.0, show_default=True,
              help="The disk's size, for the price of its time.")  # fmt: skip
@click.option("--sync-rate", type=float, default=5000.0, show_default=True, help="Syncs a second that the disk can do.")
@click.option("--copy-rate", type=float, default=100.0, show_default=True,
              help="MiB a second that the disk copies, each byte read once and written once.")  # fmt: skip
@engine_options
@json_option
@click.pass_context
def recommend_command(
    ctx: click.Context,
    /,
    kahadb_directory: Path | None,
    trace_path: Path | str | None,
    workload_path: Path | None,
    usage_directories: tuple[Path | str, ...],
    out: Path | str,
    force: bool,
    mkahadb_xml: Path | None,
    current_path: Path | None,
    durability: tuple[str, ...],
    pinned: tuple[str, ...],
    segment_sizes: tuple[int, ...],
    clock: str | None,
    as_json: bool,
    **figures: Any,
) -> None:
    """Recommend which destinations should share a store.

    The command reads how destinations were used. It simulates which journal files every partitioning would have kept,
    and writes the best one as a configuration. The page "The advisor" of the documentation says how a trace and a
    workload look, what the figures and the warnings mean, and which model and clock to choose. --disk-gib, --sync-rate
    and --copy-rate weigh disk against transactions over several stores and against compaction's copying.

    If no partitioning keeps the cap of --peak-max, the one with the lowest peak is written. Then the summary says so
    first, and the exit code is 1.

    Of the usage logs of several nodes it also says which destinations need a store that the nodes share, since messages
    were sent on one and acked on another. The other stores are each node's own.

    \b
    Example:
      anabranch recommend --usage data/usage --out advice
      anabranch recommend --usage node1/usage,node2/usage --out advice
      anabranch recommend --from-kahadb /var/lib/activemq/kahadb --out advice
      anabranch recommend --from-kahadb /var/lib/activemq/kahadb --out advice --model kahadb --mkahadb-xml mkahadb.xml
      anabranch recommend --trace usage.csv --out advice --json
      anabranch recommend --trace usage.csv --out advice --current stores.yaml --pin "orders.>,audit" \\
          --durability "telemetry.>=never" --segment-size 8MiB --segment-size 32MiB
    """
    given = [path for path in (kahadb_directory, trace_path, workload_path, usage_directories or None) if path]
    if len(given) != 1:
        raise ConfigError([f"give one of --usage, --from-kahadb, --trace and --workload; {len(given)} were given"])
    check_engine(figures["engine"], figures["master"])
    if mkahadb_xml is not None and figures["model"] != "kahadb":
        raise ConfigError(
            [f"--mkahadb-xml {mkahadb_xml} is for ActiveMQ, and the model is {figures['model']}'s; add --model kahadb"]
        )
    from ...policies.advisor import CurrentConfig, RecommendOptions, check_place, choose_engine, recommend_best
    from ...policies.advisor.search.pattern_options import parse_durability, parse_pins

    options = RecommendOptions(
        current=None if current_path is None else CurrentConfig.load(current_path),
        durability=parse_durability(durability), pinned=parse_pins(pinned),
        clock=clock or ("seq" if kahadb_directory is not None else "ts"),  # type: ignore[arg-type]
        **figures,
    )  # fmt: skip
    options = replace(options, segment_bytes=_sizes(segment_sizes, options.current)[0])
    options.check()
    # Before the work, which may take minutes; what appears meanwhile is found when the files are written.
    require_outside(out, usage_directories)
    with warnings_shown():
        check_place(out, overwrite=force, master=options.master)
    if mkahadb_xml is not None:
        check_file(mkahadb_xml, overwrite=force)
    warnings: tuple[str, ...] = ()
    logs: tuple[NodeLog, ...] = ()
    trace: Path | str | pa.Table | Workload
    if kahadb_directory is not None:
        if ctx.get_parameter_source("model") is ParameterSource.DEFAULT:
            click.echo(
                "Note: this predicts Anabranch's journals, which compact, and not the broker's own; "
                "for ActiveMQ add --model kahadb.", err=True,
            )  # fmt: skip
        trace, warnings = _kahadb_trace(kahadb_directory)
        if figures["model"] == "kahadb" and options.current is None and not segment_sizes:
            segment_sizes = _broker_size(kahadb_directory)
            options = replace(options, segment_bytes=_sizes(segment_sizes, None)[0])
    elif usage_directories:
        trace, usage = usage_table(usage_directories, options.master)
        warnings, logs = usage.warnings, usage.logs
        if options.current is None and (current := _remembered(usage, usage_directories)) is not None:
            options = replace(options, current=current, segment_bytes=_sizes(segment_sizes, current)[0])
    else:
        trace = _trace(trace_path, workload_path, options)
    choice = choose_engine(trace, options.engine, options.master)
    if options.engine == "auto" and options.master is None:
        click.echo(f"Engine: {choice.name}, since {choice.why}.", err=True)
    options = replace(options, engine=choice.name)
    with warnings_shown(), working("Recommending") as progress:
        sizes = segment_sizes or (() if options.current is not None else (options.segment_bytes,))
        answer = recommend_best(trace, options, sizes, progress.stage, logs)
    xml, notes = ("", []) if mkahadb_xml is None else _for_mkahadb(answer)
    paths = answer.write(out, overwrite=force, master=options.master)
    if mkahadb_xml is not None:
        write_xml(mkahadb_xml, xml, force)
        echo_notes(next(path for path in paths if str(path).endswith("stores.yaml")), notes)
    echo_warnings(warnings)
    if as_json:
        echo_json(answer.to_json())
    else:
        _print(answer, out, paths, mkahadb_xml)
    if not answer.cap_kept:
        ctx.exit(1)


def _trace(
    trace_path: Path | str | None, workload_path: Path | None, options: RecommendOptions
) -> Path | str | pa.Table | Workload:
    """Return where a trace is, or the one of a workload. Raises TraceError where there is none."""
    if workload_path is not None:
        return workload_trace(workload_path, options.engine, options.master)
    assert trace_path is not None
    if isinstance(trace_path, Path) and not trace_path.exists():
        raise TraceError(f"{trace_path}: no such trace")
    return trace_path


def _sizes(given: tuple[int, ...], current: CurrentConfig | None) -> tuple[int, ...]:
    """Return the sizes of segments to try."""
    return given or (JournalOptions().segment_size if current is None else current.segment_bytes,)


def _broker_size(directory: Path) -> tuple[int, ...]:
    """Return the size of a broker's files, and say that it is taken; nothing where that cannot be told."""
    from ...adapters import kahadb

    size = kahadb.file_bytes(directory)
    if size is None:
        return ()
    click.echo(f"Files of {format_size(size)}, as the broker has them. --segment-size tries others.", err=True)
    return (size,)


def _for_mkahadb(answer: Recommendation) -> tuple[str, Notes]:
    """Return an answer as an <mKahaDB>, and notes about what has no counterpart there."""
    with scratch_directory(Path(tempfile.gettempdir()), "anabranch") as scratch:
        stores = scratch / "stores.yaml"  # it may have been written to another file system
        stores.write_text(answer.stores_yaml(), encoding="utf-8")
        return as_mkahadb(stores)


def _print(answer: Recommendation, out: Path | str, paths: Sequence[Path | str], mkahadb_xml: Path | None) -> None:
    from ...policies.advisor import render_text

    click.echo(render_text(answer, get_terminal_size((80, 24)).columns, str(out)), nl=False)
    click.echo(f"\nWritten to {out}: {', '.join(str(path).rpartition('/')[2] for path in paths)}")
    if mkahadb_xml is not None:
        click.echo(f"For ActiveMQ: {mkahadb_xml}")
    click.echo(f"The report, for a browser: {paths[-1]}")


def _remembered(usage: UsageTrace, given: Sequence[Path | str]) -> CurrentConfig | None:
    """Return the configuration that a usage log was recorded under. Prints what is taken for the one in force, and
    why."""
    from ...policies.advisor import CurrentConfig
    from ...policies.config.writing import plain_data

    for note in usage.notes:
        click.echo(f"Note: {note}.", err=True)
    if usage.remembered is None:
        return None
    path, config, data = usage.remembered.path, usage.remembered.config, None
    click.echo(f"In force: {path}, under which this was recorded; --current FILE says otherwise.", err=True)
    if usage.logs or any(map(is_elsewhere, given)):  # it goes back to other directories
        config = loads(usage.remembered.text, "/data", names_suffice=True)
        data = plain_data(config, Path("/"))
    return CurrentConfig(config, data, str(path))


def _kahadb_trace(directory: Path) -> tuple[pa.Table, tuple[str, ...]]:
    """Return the usage trace of a KahaDB, and what could not be read of it."""
    from ...adapters import kahadb
    from ...policies.advisor import from_events

    with working(f"Reading {directory.name}") as progress:
        usage = kahadb.usage_trace(directory, progress)
        return from_events(usage), usage.findings.warnings()
