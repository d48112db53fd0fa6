"""The whole point on real input, from a broker's journal to a measured recommendation: `make demo`."""

from __future__ import annotations

import lzma
import shutil
import sys
import tarfile
import tempfile
import textwrap
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Final

import click

import anabranch
from anabranch.adapters import kahadb
from anabranch.policies.advisor import (
    CurrentConfig,
    Recommendation,
    RecommendOptions,
    UsageEvent,
    from_events,
    recommend,
)
from anabranch.policies.advisor.advice.answer import headline, peak_bytes
from anabranch.policies.advisor.advice.recommendation import FILES, Candidate
from anabranch.policies.config import Config, UsageOptions
from anabranch.policies.errors import AnabranchError, ConfigError
from anabranch.policies.outputs import scratch_directory
from anabranch.policies.text import human_bytes
from anabranch.router.cli.output import LocalPath, warnings_shown, working

from .loop import run_loop
from .replay import Replay
from .watch import Watch

SEGMENT_BYTES: Final = 512 * 1024
ARCHIVE: Final = Path(__file__).parents[1] / "toymaker" / "toymaker-kahadb.tar.xz"
Stores = Mapping[str, tuple[str, ...]]
"""Names, and the patterns of each."""

APART: Final[Stores] = {"custom": ("queue://orders.custom",), "dlq": ("queue://dlq",), "others": (">",)}
"""The split that was measured on the broker which wrote the archive."""
BROKER: Final = (23_100_000, 3_100_000)
"""Bytes that this broker peaked at: all in one KahaDB, and split as APART (examples/toymaker/README.md)."""

MARKER: Final = ".anabranch-demo"
"""Stands in a directory that the demo made; only what carries it is deleted by a later run."""


@click.command()
@click.option("--out", type=LocalPath(), default=Path("out/demo"), show_default=True,
              help="Where the unpacked journal, the recommendation and the replayed stores go.")  # fmt: skip
@click.option("--archive", type=LocalPath(), default=ARCHIVE, help="The journal to work on, a KahaDB in a .tar.xz.")
def main(out: Path, archive: Path) -> None:
    """Explain a real broker's journal, split it, and measure that.

    The journal is that of an ActiveMQ broker in a toy factory: 46,771 operations on six queues. What is recommended is
    put to the test: the same operations go through Anabranch's own router. At last a router in one store records how it
    is used, is advised from that, and its messages move.
    """
    try:
        _show(out, archive)
    except AnabranchError as error:
        raise click.ClickException(str(error)) from error


def _show(out: Path, archive: Path) -> None:
    journal = _unpack(archive, out)
    with working("Reading the broker's journal") as progress:
        explanation = kahadb.explain(journal, progress)
        events = list(kahadb.usage_trace(journal, progress))
    options = RecommendOptions(segment_bytes=SEGMENT_BYTES, clock="seq", engine="local")
    answer, spark = _both_engines(events, options)
    broker = recommend(from_events(events), replace(options, model="kahadb"))
    answer.write(out, overwrite=True)  # those of an earlier demo; `_unpack` has looked whose they are
    best = {store.name: store.filters for store in answer.recommended.stores}
    apart = recommend(from_events(events), replace(options, current=CurrentConfig(_config(Path("data"), APART))))
    found = [answer.candidate("all-together"), apart.candidate("current"), answer.recommended]
    measured = [
        _measure(out / "replayed" / name, stores, events)
        for name, stores in (("together", {"all": (">",)}), ("apart", APART), ("recommended", best))
    ]
    home = out / "replayed" / "own"
    recording = _config(home / "data", {"all": (">",)})
    loop = run_loop(recording.model_copy(update={"usage": UsageOptions()}), home / "advice", events)

    _say("1. What is on a broker's disk")
    for store in explanation.stores:
        _say(store.summary, "   ")
    _say("2. What the advisor says")
    _say(f"For Anabranch: {headline(answer)}", "   ")
    _say(f"For ActiveMQ: {headline(broker)}", "   ")
    _say(spark, "   ")
    _say(f"3. What it comes to: disk at the peak of {len(events):,} operations, with compaction")
    click.echo(_table(found, measured))
    _say("4. A router of your own: record, recommend, move, go on")
    for line in loop.sentences():
        _say(line, "   ")
    _say(f"The report, for a browser: {out / 'report.html'}. Try next:")
    click.echo(f"  {_command()} explain {journal}")
    click.echo(f"  {_command()} recommend --usage {home / 'data'} --out advice")


def _command() -> Path:
    """`anabranch` as it is called from here."""
    there = Path(sys.executable).parent / "anabranch"
    return there.relative_to(Path.cwd()) if there.is_relative_to(Path.cwd()) else there


def _both_engines(events: Sequence[UsageEvent], options: RecommendOptions) -> tuple[Recommendation, str]:
    """The recommendation, and a sentence on whether Spark comes to the same. Raises ConfigError where it does not."""
    trace = from_events(events)
    with warnings_shown(), working("Recommending") as progress:
        begin = time.monotonic()
        answer = recommend(trace, options, progress.stage)
        middle = time.monotonic()
        again = recommend(trace, replace(options, engine="spark"), progress.stage)
        end = time.monotonic()
    one, other = ({**a.to_json(), "parameters": {**a.parameters, "engine": None}} for a in (answer, again))
    if one != other:
        raise ConfigError([f"Spark comes to other figures: {', '.join(k for k in one if one[k] != other[k])} differ"])
    return answer, (
        f"The same through Spark: {end - middle:.0f} s with its start, {middle - begin:.1f} s in this process; every "
        "figure is equal."
    )


def _say(text: str, indent: str = "") -> None:
    width = min(get_terminal_size((80, 24)).columns, 100)
    click.echo(
        textwrap.fill(
            text, width, initial_indent=indent, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


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
    for path in (out / name for name in FILES):
        if path.is_symlink() or path.exists():
            raise ConfigError(
                [f"{path} exists and was not made by this demo, so it was left as it is; give another --out"]
            )


def _config(directory: Path, stores: Stores) -> Config:
    """Journals with files of the broker's size, whose syncs would be all that takes time here."""
    options = anabranch.JournalOptions(
        sync=anabranch.Sync.NEVER,
        segment_size=SEGMENT_BYTES,
        pool_files=0,
    )
    return Config(directory, [anabranch.StoreConfig(name, match, journal=options) for name, match in stores.items()])


def _measure(directory: Path, stores: Stores, events: Sequence[UsageEvent]) -> int:
    """Replay the events through a router of these stores. Returns the bytes at the peak."""
    config, watch = _config(directory, stores), Watch()
    with working(f"Replaying, {directory.name}") as progress, anabranch.open(config) as router:
        Replay().run(router, events, progress, watch.look, every=1)
    return watch.peak_bytes


def _table(found: Sequence[Candidate], measured: Sequence[int]) -> str:
    rows = [
        ("", ["all in one store", "custom, dlq apart", "as recommended"]),
        ("Anabranch, predicted", [human_bytes(peak_bytes(candidate)) for candidate in found]),
        ("Anabranch, measured", [human_bytes(size) for size in measured]),
        ("copied by compaction", [human_bytes(candidate.copied_bytes) for candidate in found]),
        ("ActiveMQ, measured", [*map(human_bytes, BROKER), "-"]),
    ]
    return "\n".join(f"   {what:<20}" + "".join(f"{cell:>19}" for cell in cells) for what, cells in rows)


if __name__ == "__main__":
    main()
