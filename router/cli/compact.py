"""`anabranch compact`: give back disk that holds nothing."""

from __future__ import annotations

import click

from ...policies.config import Config
from ...policies.text import human_bytes
from .directory import on_directory, opened
from .output import echo_json, json_option, working


@click.command()
@on_directory()
@click.option("--store", "-s", "names", multiple=True, metavar="NAME",
              help="Only this store; may be given more than once. Else all that are recorded.")  # fmt: skip
@json_option
def command(config: Config, names: tuple[str, ...], as_json: bool) -> None:
    """Give back disk that holds no messages.

    The live messages in mostly dead segments of a journal are copied together, and the segments are released. A
    journal's index, and the file of an SQLite store, become as small as what is in them. There must be room for the
    copies. The command opens the stores, so no other process may have them open. A router that is in use does it by
    `router.compact()`. Killed at any moment, the command loses nothing, and can be run again.

    \b
    Example:
      anabranch compact data
      anabranch compact -c stores.yaml --store orders
    """
    from ...policies.errors import ConfigError

    freed: dict[str, int] = {}
    with opened(config) as router:
        rows = router._registry.table.stores.values()
        there = [row for row in rows if not names or row.name in names]
        if missing := [name for name in names if all(row.name != name for row in there)]:
            known = ", ".join(sorted(row.name for row in rows)) or "none yet"
            raise ConfigError([f"there is no store {missing[0]!r} to compact; there are: {known}"])
        with working(f"Compacting {router.config.directory.name}") as progress:
            for number, row in enumerate(there):
                progress(number, len(there))
                size = router._registry.with_row(row, lambda store: store.compact())
                freed[row.name] = freed.get(row.name, 0) + size
        directory = router.config.directory
    if as_json:
        echo_json({"directory": str(directory), "freed_bytes": freed})
        return
    for name, size in freed.items():
        click.echo(f"{name}: {human_bytes(size)} given back" if size else f"{name}: nothing to give back")
    if not freed:
        click.echo(f"{directory} holds no stores yet.")
