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

    What lives in mostly dead segments of a journal is copied together, and they are released; its index, and the file
    of an SQLite store, become as small as what is in them. There must be room for the copies. The stores are opened for
    it, so no other process may have them open: a router that is in use does it by `router.compact()`. Killed at any
    moment, it loses nothing, and can be run again.

    \b
    Example:
      anabranch compact data
      anabranch compact -c stores.yaml --store orders
    """
    from ..router import inspection_of

    with opened(config) as router:
        directory = router.config.directory
        with working(f"Compacting {directory.name}") as progress:
            freed = inspection_of(router).compact(names, progress)
    if as_json:
        echo_json({"directory": str(directory), "freed_bytes": freed})
        return
    for name, size in freed.items():
        click.echo(f"{name}: {human_bytes(size)} given back" if size else f"{name}: nothing to give back")
    if not freed:
        click.echo(f"{directory} holds no stores yet.")
