"""The frame of the command line: finds a command's module when asked for it, turns errors into a line and a code."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from ...adapters.system.acceleration import describe_version
from ...adapters.system.files import FULL
from ...adapters.system.signals import describe, exit_code
from ...policies.config.problems import did_you_mean
from ...policies.errors import AnabranchError, ConfigError, DestinationError, NoRouteError, PlacementError, TraceError
from ...policies.text import printable

COMMANDS = {
    "init": "configuration", "check": "configuration", "route": "configuration", "schema": "schema",
    "serve": "operating", "top": "top", "ui": "ui.command", "queues": "queues", "browse": "messages",
    "send": "messages", "receive": "messages", "tail": "messages", "move": "queues", "requeue": "queues",
    "purge": "queues", "delete": "queues", "stats": "stores", "compact": "stores", "transactions": "transactions",
    "explain": "stores", "trace": "advisor", "recommend": "advisor", "repartition": "stores", "health": "operating",
    "calibrate": "operating",
    "backup": "operating",
    "verify": "operating", "salvage": "stores", "export": "operating", "import": "operating", "mkahadb": "activemq",
}  # fmt: skip
"""The module here of each command, which is called `<name>_command` there. The order is that of `--help`."""

BAD_INPUT = (DestinationError, NoRouteError, PlacementError, TraceError)
"""The errors, with ConfigError, that users mend in what they gave: exit code 2. All others exit with 1."""


class Failure(click.ClickException):
    """An error as the user sees it. The lines of a configuration's error begin with file and line, as editors like
    them."""

    def show(self, file: Any = None) -> None:
        click.echo("\n".join(map(printable, self.message.split("\n"))), err=True)


class BadInput(Failure):
    """A failure that another input mends."""

    exit_code = 2


def _said(error: BaseException, text: str | None = None) -> str:
    """Return an error's text with the notes that were added to it: how far it had come, say."""
    return "\n".join([str(error) if text is None else text, *getattr(error, "__notes__", ())])


class App(click.Group):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f".{COMMANDS[cmd_name]}", __package__)
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0][:1].isalpha() and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}; {did_you_mean(args[0], list(COMMANDS))}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            prefix = "" if error.path else "Error: "  # what is wrong with a file begins with its name
            raise BadInput("\n".join(f"{prefix}{line}" for line in str(error).splitlines())) from error
        except BAD_INPUT as error:
            raise BadInput(f"Error: {_said(error)}") from error
        except AnabranchError as error:
            raise Failure(f"Error: {_said(error)}") from error
        except BrokenPipeError:
            raise  # whoever read our output has seen enough: click ends quietly
        except OSError as error:
            # Of a copy the second name is its target, which is what had no room.
            name = error.filename2 if error.errno in FULL and error.filename2 is not None else error.filename
            where = f"{name}: " if name is not None else ""
            raise Failure(f"Error: {where}{_said(error, error.strerror)}") from error
        except MemoryError as error:
            reason = f": {error}" if str(error) else ""
            text = f"out of memory{reason}; give it less to work on, or more memory"
            raise Failure(f"Error: {_said(error, text)}") from error
        except KeyboardInterrupt as interrupt:
            click.echo(_said(interrupt, describe(interrupt)), err=True)
            ctx.exit(exit_code(interrupt))


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(describe_version(), message="%(version)s")
def app() -> None:
    """Partitioned durable message stores: set them up, look into them, and learn what to split.

    Exit codes: 0 is done, 2 is bad input, 1 is any other failure. Ended by Ctrl-C, SIGTERM or SIGHUP it is 130, 143 or
    129. Errors are lines on stderr, also with --json.

    \b
    Example:
      anabranch queues data
      anabranch browse data orders.custom
      anabranch check stores.yaml
    """
