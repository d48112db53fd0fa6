"""Finds the data directory of a command: `DIR`, or a configuration by `-c`.

    @click.command()
    @on_directory("QUEUE", "[BODY]")
    @json_option
    def command(config: Config, queue: str, body: str | None, as_json: bool) -> None: ...

DIR is all that `anabranch.open` takes: the directory, with the configuration in force that lies in it, or a file. With
`-c FILE` it is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import click

from ...policies.config import Config
from ...policies.errors import PlacementError
from ...policies.outputs import local_path
from ..placement.on_disk.in_force import configuration_of
from ..placement.record import RECORD
from ..router import Router
from ..sharing.clients import living
from ..sharing.socket_file import connected
from .output import Command, config_file, warnings_shown, working

FILE: Final = Path("stores.yaml")
"""The configuration of a command without operands that is given neither."""


def on_directory(*operands: str) -> Callable[[Command], Command]:
    """Give a command the operand DIR and those behind it: `QUEUE`, or `[BODY]` for one that may be left out. The
    command gets `config`, and each operand by its name in small letters."""
    names = [operand.strip("[]").lower() for operand in operands]
    required = sum(not operand.startswith("[") for operand in operands)

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(directory: str | None, config_path: Path | None, **given: Any) -> Any:
            values = [value for value in (directory, *(given.pop(name) for name in names)) if value is not None]
            source = config_path
            if config_path is None and values:
                source = local_path(values.pop(0), "DIR")
            elif config_path is None and not required:
                source = FILE
                if not FILE.exists():
                    raise click.UsageError(f"no {FILE} is here; give DIR, the data directory, or -c FILE")
            if source is None or len(values) < required:
                missing = "DIR" if source is None else operands[len(values)]
                raise click.UsageError(f"Missing argument '{missing}'.")
            if len(values) > len(operands):
                raise click.UsageError(f"-c {config_path} says the directory already; leave DIR, {values[0]}, out")
            values += [None] * (len(operands) - len(values))
            return function(config=configuration_of(source), **dict(zip(names, values, strict=True)), **given)

        for operand, name in reversed(list(zip(operands, names, strict=True))):
            command = click.argument(name, required=False, metavar=operand)(command)
        shown = "DIR" if required else "[DIR]"
        command = click.argument("directory", required=False, metavar=shown)(command)
        without = "" if required else f" Without either: {FILE}."
        return config_file(f"The configuration, instead of DIR.{without}", metavar="FILE")(command)

    return decorate


@contextmanager
def opened(config: Config, *, create: bool = False, quiet: bool = False) -> Iterator[Router]:
    """Open in the block the router of a data directory that somebody has used: that of the process which has it open.
    Nothing is made, unless `create`. The library's warnings are shown, unless `quiet`.
    Raises PlacementError."""
    with nullcontext() if quiet else warnings_shown():
        if not create:
            require_used(config)
        with working(f"Opening {config.directory.name}") as progress:
            router = running(config) or Router(config).open(lambda what, done, total: progress(done, total))
        with router:
            yield router


def require_used(config: Config) -> None:
    """Raise PlacementError for a data directory that nobody has used."""
    if not (config.bindings / RECORD).exists() and not (config.directory / RECORD).exists():
        what = "holds no data of Anabranch's" if config.directory.exists() else "does not exist"
        of = f", the data directory of {config.file}," if config.file is not None else ""
        step = "it is made at the first use, by a program or by `anabranch send --create`"
        raise PlacementError(f"{config.directory}{of} {what} yet; {step}")


def running(config: Config) -> Router | None:
    """Return a router over the process that has the directory open; None where none does, or lets nobody look in. Where
    clients live whose owner has just died, this is one more of them, and starts another: it would keep it from them
    else."""
    clients = any(living(config.directory))
    if not clients:
        try:
            connected(config.directory).close()
        except OSError:
            return None
    from ..sharing.client.router import NoOwnerError, SharedRouter  # which takes longer than all else here

    try:
        return SharedRouter(config, starts=clients).open()
    except NoOwnerError:
        return None
