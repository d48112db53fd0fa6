"""`anabranch ui`: the command."""

from __future__ import annotations

import json

import click

from ....policies.config import Config
from ...router import inspection_of
from ..directory import on_directory, opened


@click.command()
@on_directory()
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="The port. Default: a free one.")
@click.option("--write", is_flag=True, help="Let the page put dead letters back, and discard them.")
@click.option("--bodies", is_flag=True, help="Show the headers and bodies of dead letters.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON. Errors stay text, on stderr.")
def ui_command(config: Config, port: int, write: bool, bodies: bool, as_json: bool) -> None:
    """Show a directory in a browser, until Ctrl-C.

    The command prints an address on 127.0.0.1. Open it in a browser on this machine. Whoever has it may look until the
    command ends: it holds a token, which the page takes out of the address bar. Other users of the machine, and other
    pages, are refused.

    The page shows stores with their rates and their health, the 50 queues and subscriptions that wait longest, dead
    letters, and transactions in doubt. When asked, it shows why each segment is kept, and makes the advisor's report of
    the usage log. It only reads unless --write is given, and shows no bodies unless --bodies is.

    Where no program has the directory open, it is held while this runs.

    \b
    Example:
      anabranch ui data
      anabranch ui data --port 8161 --write --bodies
      ssh -L 8161:127.0.0.1:8161 server anabranch ui data --port 8161
    """
    from .advice import Advice
    from .figures import Figures
    from .server import Server  # which takes longer than the help

    with opened(config) as router, Advice(router.config) as advice:
        facts = {"directory": str(router.config.directory), "owner_pid": inspection_of(router).owner_pid}
        with Server(port, Figures(router, bodies=bodies), advice, facts, write=write) as server:
            if as_json:
                click.echo(json.dumps({"url": server.url, **facts}))
            else:
                click.echo(f"{server.url}\nFor a browser on this machine. The address holds a token. Ctrl-C ends it.")
            server.serve_forever()
