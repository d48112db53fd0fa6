"""Shared by the commands: options, JSON, progress on long work."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ...policies.outputs import is_elsewhere, local_path
from ...policies.text import printable, table
from ...policies.units import parse_duration

if TYPE_CHECKING:
    from rich.progress import Progress

Command = Callable[..., Any]
"""A command, with its options or before it gets them."""


class LocalPath(click.Path):
    """A path of this machine. The URL of another file system is an error, and not a directory named `s3a:`."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        what = "the path"
        if param is not None:
            what = max(param.opts, key=len) if param.param_type_name == "option" else (param.name or what).upper()
        return super().convert(local_path(value, what), param, ctx)


class PathOrUrl(LocalPath):
    """A path of this machine, or the URL of another file system, for Spark: a str then."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_elsewhere(value) else super().convert(value, param, ctx)


class Seconds(click.FloatRange):
    """A duration as the configuration has it: `0.5`, `500ms`, `2m`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.fail(f"{error}; found {value!r}", param, ctx)
        return super().convert(seconds, param, ctx)


json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of text. Errors stay text, on stderr."
)


def config_file(text: str, **more: Any) -> Callable[[Command], Command]:
    """Return the option of a configuration's file, with this help."""
    return click.option("--config", "-c", "config_path", type=LocalPath(), help=text, **more)


config_option: Final = config_file("The configuration file.", default=Path("stores.yaml"), show_default=True)


def echo_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> None:
    """Print columns, the head of which is the first row; all but those in `left` are aligned to the right."""
    right = [column for column in range(len(rows[0])) if column not in left]
    click.echo("\n".join(table(rows, right, ruled=False)))


def shortened(name: str, room: int) -> str:
    """Shorten a text to its beginning and its end."""
    return name if len(name) <= room else f"{name[: room // 2 - 1]}...{name[len(name) - room + room // 2 + 2 :]}"


def echo_json(data: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def echo_result(as_json: bool, data: Any, *lines: str) -> None:
    """Print a result as one JSON document, or else as these lines."""
    if as_json:
        echo_json(data)
    else:
        click.echo("\n".join(lines))


def echo_warnings(warnings: Iterable[str]) -> None:
    """Print warnings on stderr, a line each."""
    for warning in warnings:
        click.echo(f"Warning: {printable(warning)}", err=True)


_LABEL_MAX = 32
"""Columns that a label may take: with bar and clock it fits a terminal of 80."""
SHOWN_AFTER = 0.5
"""Seconds before a bar is shown: one of a shorter work would only flash."""
_ALMOST = 0.999
"""A bar that is full stops its clock; the work ends only with the block."""


class Work:
    """Moves a progress bar: called with what is done and how much there is, in any unit; `stage` names a part."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress, self._label = progress, label
        self._task = progress.add_task(_short(label), total=None)

    def __call__(self, done: float, total: float) -> None:
        self._progress.update(self._task, completed=min(done, _ALMOST * total), total=total)

    def stage(self, name: str, share: float) -> None:
        """Show a part of the work, by its own share from 0 to 1; at 0 the bar only shows that time passes."""
        done, total = (min(share, _ALMOST), 1.0) if share > 0 else (0.0, None)
        # Not `update`, which takes None for no change.
        task = self._progress.tasks[0]
        task.description, task.completed, task.total = _short(f"{self._label}: {name}"), done, total


def _short(text: str) -> str:
    return text if len(text) <= _LABEL_MAX else text[: _LABEL_MAX - 1] + "…"


@contextmanager
def working(label: str) -> Iterator[Work]:
    """Show a progress bar on stderr while the block runs, gone when it ends; nothing where stderr is no terminal.

    A bar that is never told anything shows that time passes. Of work that is done soon nothing is shown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    showing = threading.Timer(SHOWN_AFTER, progress.start)
    showing.daemon = True
    if console.is_terminal:
        showing.start()
    try:
        yield Work(progress, label)
    finally:
        showing.cancel()
        if showing.is_alive():
            showing.join()  # it is just being shown
        if progress.live.is_started:
            progress.stop()


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Show on stderr, a line each, the warnings that the library logs in the block."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("Warning: %(message)s"))
    logger = logging.getLogger(__package__.partition(".")[0])
    logger.addHandler(handler)
    # Spark's Python gives the root logger a handler sometimes, which would say it a second time.
    propagated, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)
