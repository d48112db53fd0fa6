"""What the commands share: options, JSON, and progress on long work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
config_option = click.option(
    "--config",
    "-c",
    "config_path",
    type=click.Path(path_type=Path),
    default=Path("stores.yaml"),
    show_default=True,
    help="The configuration file.",
)


def echo_json(data: Any) -> None:
    """Prints one JSON document."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


@contextmanager
def working(label: str) -> Iterator[Callable[[float, float], None]]:
    """A progress bar on stderr while the block runs, gone when it ends; nothing where stderr is no terminal.

    Yields a callback of what is done and how much there is, in any unit. Never called, it shows that time passes.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
