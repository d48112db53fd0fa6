"""`anabranch demo`: the whole point on real input, from a broker's journal to a measured recommendation."""

from __future__ import annotations

import lzma
import shutil
import tarfile
import tempfile
import textwrap
import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from ...policies.errors import ConfigError
from ...policies.outputs import scratch_directory, write_new_file
from ...policies.text import count_of, human_bytes
from .demo_loop import FILE, run_loop
from .output import LocalPath, echo_json, json_option, warnings_shown, working

if TYPE_CHECKING:
    from ...policies.config import Config
    from ...policies.partitioning import CurrentConfig, Recommendation, UsageEvent
    from ..replay import DiskUse

SEGMENT_BYTES: Final = 512 * 1024
ARCHIVE: Final = Path("examples") / "toymaker" / "toymaker-kahadb.tar.xz"
Stores = Mapping[str, tuple[str, ...]]
"""Names, and the patterns of each."""

APART: Final[Stores] = {"custom": ("queue://orders.custom",), "dlq": ("queue://dlq",), "others": (">",)}
"""The split that was measured on the broker which wrote the archive."""
BROKER_TOGETHER: Final = (44, 23_100_000)
BROKER_APART: Final = (6, 3_100_000)
"""Files and bytes that this broker peaked at: all in one KahaDB, and split as APART (examples/toymaker/README.md)."""

MARKER: Final = ".anabranch-demo"
"""Stands in a directory that the demo made; only what carries it is deleted by a later run."""

_WHY_IT_DIFFERS: Final = (
    "Why Anabranch's own recommendation is another split than the broker's: in ActiveMQ an ack keeps its file for as "
    "long as its message's file is there, in long chains, so orders.custom and dlq must be apart from the rest. In "
    "Anabranch acks retain nothing, so only messages that wait long matter. For an ActiveMQ broker, ask with "
    "--model kahadb."
)

Peak = tuple[int, int]
"""Journal files, and their bytes."""


class Row(NamedTuple):
    """One line of the table: whose journal, how it is known, and the peak under each of three partitionings."""

    journal: str
    how: str
    together: Peak
    apart: Peak
    recommended: Peak | None


@click.command()
@click.option("--out", type=LocalPath(), default=Path("out/demo"), show_default=True,
              help="Where the unpacked journal, the recommendation and the replayed stores go.")  # fmt: skip
@click.option("--archive", type=LocalPath(), default=None,
              help=f"The journal to work on. Default: {ARCHIVE} of the source tree.")  # fmt: skip
@json_option
def command(out: Path, archive: Path | None, as_json: bool) -> None:
    """Explain a real broker's journal, split it, and measure that.

    The journal is that of an ActiveMQ broker in a toy factory: 46,771 operations on six queues. What is recommended is
    put to the test: the same operations go through Anabranch's own router, all in one store and as recommended. At last
    a router in one store records how it is used, is advised from that, and its messages move.

    \b
    Example:
      anabranch demo
      anabranch demo --out /tmp/demo --json
    """
    journal = _unpack(archive or _find_archive(), out)
    from ...adapters import kahadb
    from ...policies.partitioning import RecommendOptions, from_events, recommend, render_text

    with working("Reading the broker's journal") as progress:
        explanation = kahadb.explain(journal, progress)
        usage = kahadb.usage_trace(journal, progress)
        events = list(usage)
    trace = from_events(events)
    with warnings_shown(), working("Recommending") as progress:
        options = RecommendOptions(segment_bytes=SEGMENT_BYTES, clock="seq", engine="spark")
        answer = recommend(trace, options, progress.stage)
    paths = answer.write(out, overwrite=True)  # those of an earlier demo; `_unpack` has looked whose they are
    best = {store.name: store.filters for store in answer.recommended.stores}
    local = replace(options, engine="local")
    apart = recommend(trace, replace(local, current=_in_force(APART)))
    broker_apart, broker_best = (
        recommend(trace, replace(local, model="kahadb", current=_in_force(stores))) for stores in (APART, best)
    )
    measured = {
        name: _measure(out / "replayed" / name, stores, events)
        for name, stores in (("together", {"all": (">",)}), ("apart", APART), ("recommended", best))
    }
    loop = run_loop(_one_store(out / "replayed" / "loop"), events)
    rows = [
        Row("ActiveMQ", "measured", BROKER_TOGETHER, BROKER_APART, None),
        Row(
            "ActiveMQ", "predicted",
            _peak(broker_apart, "all-together"), _peak(broker_apart, "current"), _peak(broker_best, "current"),
        ),
        Row("Anabranch", "measured", *((use.peak_files, use.peak_bytes) for use in measured.values())),
        Row(
            "Anabranch", "predicted",
            _peak(answer, "all-together"), _peak(apart, "current"), _peak(answer, "recommended"),
        ),
    ]  # fmt: skip
    if as_json:
        echo_json(
            {
                "explanation": explanation.to_json(),
                "recommendation": answer.to_json(),
                "table": [row._asdict() for row in rows],
                "measured": {name: asdict(use) for name, use in measured.items()},
                "loop": asdict(loop),
            }
        )
        return
    width = min(get_terminal_size((80, 24)).columns, 100)
    _say(f"1. What is on the broker's disk ({journal})", width)
    for store in explanation.stores:
        _say(store.summary, width, "   ")
    _say(f"All of it, file by file: anabranch explain {journal}", width, "   ")
    click.echo("\n2. What to split, for Anabranch\n")
    click.echo(textwrap.indent(render_text(answer, width - 3), "   "))
    click.echo(f"3. What it comes to: {len(events):,} operations replayed, journal files at the peak\n")
    click.echo(_table(rows))
    click.echo()
    _say(_WHY_IT_DIFFERS, width, "   ")
    click.echo("\n4. The same for a router of your own: record, recommend, move, go on\n")
    for line in loop.lines():
        _say(line, width, "   ")
    click.echo()
    _say(f"The report, for a browser: {paths[3]}", width, "   ")
    _say(f"The configuration: {paths[1]}", width, "   ")


def _say(text: str, width: int, indent: str = "") -> None:
    click.echo(
        textwrap.fill(
            text, width, initial_indent=indent, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


def _find_archive() -> Path:
    """In the working directory, or in the source tree that this file lies in."""
    here = Path(__file__).resolve()
    for base in (Path.cwd(), *here.parents):
        if (base / ARCHIVE).is_file():
            return base / ARCHIVE
    raise ConfigError(
        [f"{ARCHIVE} is not here: run this in a clone of the source, or give --archive with a KahaDB in a .tar.xz"]
    )


def _unpack(archive: Path, out: Path) -> Path:
    """The journal's directory, unpacked anew. The archive is read whole before anything of an earlier run goes."""
    target = out / "broker"
    with scratch_directory(Path(tempfile.gettempdir()), "anabranch") as scratch:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
        except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError([f"{archive} cannot be unpacked as a tar archive: {reason}"]) from error
        journals = sorted(path.relative_to(scratch) for path in scratch.rglob("db-*.log"))
        if not journals:
            raise ConfigError([f"{archive} holds no KahaDB journal (db-*.log)"])
        ours = (target, out / "replayed")
        for directory in ours:
            _check_ours(directory)
        if not (target / MARKER).is_file():
            _check_free(out)
        for directory in ours:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            (directory / MARKER).touch()
        shutil.copytree(scratch, target, dirs_exist_ok=True)
    found = target / journals[0]
    return found.parent.parent if found.parent.name == "archive" else found.parent


def _check_ours(directory: Path) -> None:
    """What another program put there is never deleted."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise ConfigError([f"{directory} is in the way: the demo needs that name for a directory; give another --out"])
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise ConfigError(
            [f"{directory} exists and was not made by this demo, so it was left as it is; give another --out"]
        )


def _check_free(out: Path) -> None:
    """No recommendation of somebody else is overwritten."""
    from ...policies.partitioning.recommendation import FILES

    for path in (out / name for name in FILES):
        if path.is_symlink() or path.exists():
            raise ConfigError(
                [f"{path} exists and was not made by this demo, so it was left as it is; give another --out"]
            )


def _peak(answer: Recommendation, name: str) -> Peak:
    peak = answer.candidate(name).peak_bytes
    return peak // SEGMENT_BYTES, peak


def _config(directory: Path, stores: Stores) -> Config:
    from ...policies.config import Config, JournalOptions, StoreConfig
    from ...policies.durability import Sync

    # As a broker does it: what is seen is what the division alone does.
    options = JournalOptions(sync=Sync.NEVER, segment_size=SEGMENT_BYTES, pool_files=0, compact_live_percent=0)
    return Config(directory, [StoreConfig(name, match, journal=options) for name, match in stores.items()])


def _one_store(directory: Path) -> Config:
    """A store for all, whose use is recorded, and the file that says so."""
    from ...policies.config import UsageOptions, dump_yaml, load

    config = _config(directory / "data", {"all": (">",)})
    write_new_file(directory / FILE, dump_yaml(config.model_copy(update={"usage": UsageOptions()})))
    return load(directory / FILE)


def _in_force(stores: Stores) -> CurrentConfig:
    from ...policies.partitioning import CurrentConfig

    return CurrentConfig(_config(Path("data"), stores))


def _measure(directory: Path, stores: Stores, events: list[UsageEvent]) -> DiskUse:
    """Replay the events through a router of these stores."""
    from ..replay import replay
    from ..router import open as open_router

    config = _config(directory, stores)
    with working(f"Replaying, {directory.name}") as progress, open_router(config) as router:
        return replay(router, events, progress)


def _table(rows: list[Row]) -> str:
    heads = ("all in one store", "custom, dlq apart", "as recommended")
    lines = [" " * 22 + "".join(f"{head:>19}" for head in heads)]
    for row in rows:
        cells = [f"{count_of(peak[0], 'file')}, {human_bytes(peak[1])}" if peak else "not measured" for peak in row[2:]]
        lines.append(f"   {row.journal:<10}{row.how:<9}" + "".join(f"{cell:>19}" for cell in cells))
    return "\n".join(lines)
