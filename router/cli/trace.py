"""`anabranch trace`: usage logs, or what a workload describes, as a usage trace in files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...policies.errors import ConfigError, TraceError
from ...policies.outputs import check_file, scratch_directory, write_file
from .output import LocalPath, PathOrUrl, echo_json, json_option, warnings_shown, working

if TYPE_CHECKING:
    import pyarrow as pa

    from ...policies.advisor import Workload
    from ..usage import UsageTrace

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv")

usage_option = click.option(
    "--usage", "usage_directories", type=LocalPath(), metavar="DIR", multiple=True,
    help="A usage log: the directory usage/ of a data directory, or that itself. Several are merged by their clocks.",
)  # fmt: skip
workload_option = click.option(
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
def command(
    usage_directories: tuple[Path, ...],
    workload_path: Path | None,
    out: Path | str,
    force: bool,
    master: str | None,
    engine: str,
    as_json: bool,
) -> None:
    """Write a usage trace of usage logs, or of a workload.

    A router records with `usage: {}` in its configuration, or once its program calls start_usage_log(). The logs are
    only read, also while they are written. docs/advisor.md says what the trace's columns mean. `anabranch recommend`
    reads logs and workloads itself. A trace is for other programs, for Spark, or to be kept.

    Spark generates the trace of a large workload: more than 10 million operations, or with --engine spark or --master.
    Its workers write a directory of Parquet files.

    \b
    Example:
      anabranch trace --usage data/usage --out trace.parquet
      anabranch trace --usage node1/usage --usage node2/usage --out trace.parquet
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
        count = _write(table, out, force)
    else:
        count = _write_workload(workload_path, out, force, master, engine)
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)
    if as_json:
        echo_json({"written": str(out), "operations": count, "warnings": list(warnings)})
    else:
        click.echo(f"Written: {out}, {count:,} operation{'' if count == 1 else 's'}")


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


def require_outside(out: Path | str, usage_directories: tuple[Path, ...]) -> None:
    """Raise ConfigError for an --out within a usage log, where its router keeps files; TraceError where there is no
    log."""
    from ..usage.reading import directory_of, find_logs

    if not isinstance(out, Path):
        return  # on another file system
    place = out.resolve()
    for directory in usage_directories:
        for journal in find_logs(directory):
            log = directory_of(journal)
            if log.resolve() in (place, *place.parents):
                raise ConfigError([f"--out {out} lies in the usage log {log}, which is only read; give another place"])


def usage_table(directories: tuple[Path, ...]) -> tuple[pa.Table, UsageTrace]:
    """Return the trace of usage logs, as a table too. Raises TraceError, also for one that holds nothing."""
    from ...policies.advisor import from_events
    from ..usage import usage_trace

    with working(f"Reading {directories[0].name}") as progress:
        usage = usage_trace(directories, progress)
        table = from_events(usage)
    if not table.num_rows:
        named = " and ".join(str(directory) for directory in directories)
        if usage.warnings:
            raise TraceError(f"{named}: no operation can be read there: {'; '.join(usage.warnings)}")
        raise TraceError(f"{named}: nothing is recorded there yet; let the router run for some days of ordinary use")
    return table, usage
