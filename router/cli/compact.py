"""`anabranch compact`: give back disk that holds nothing."""

from __future__ import annotations

from pathlib import Path

import click

from ...policies.text import human_bytes
from .output import config_option, echo_json, json_option, opened, warnings_shown, working


@click.command()
@config_option
@click.option("--store", "-s", "names", multiple=True, metavar="NAME",
              help="Only this store; may be given more than once. Else all that are recorded.")  # fmt: skip
@json_option
def command(config_path: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Give back disk that holds no messages.

    What lives in mostly dead segments of a journal is copied together, and they are released; its index, and the file
    of an SQLite store, become as small as what is in them. There must be room for the copies. The stores are opened for
    it, so no other process may have them open: a router that is in use does it by `router.compact()`. Killed at any
    moment, it loses nothing, and can be run again.

    \b
    Example:
      anabranch compact --config stores.yaml
      anabranch compact --config stores.yaml --store orders
    """
    from ...policies.errors import ConfigError

    freed: dict[str, int] = {}
    with warnings_shown(), opened(config_path) as router:
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
