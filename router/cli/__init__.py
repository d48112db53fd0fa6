"""The `anabranch` command. Needs the extra `cli`; the library does not.

    anabranch route --config stores.yaml orders.custom

Exit codes: 0 done; 2 bad input (arguments, configuration, a name, a trace); 1 any other failure; 130 interrupted, 143
terminated (SIGTERM), 129 hung up (SIGHUP). These three end it as Ctrl-C does: what it has open is closed, and its
temporary files go.
Results go to stdout, with `--json` as one JSON document; errors, one clear line each, and progress go to stderr, as
text also with `--json`: then stdout is empty and the exit code tells. (`check --json` alone has errors as its result.)

To add a command: a `click` command called `<name>_command`, whose help shows an example, in the module of what it acts
on, and its name in `app.COMMANDS`. It raises the library's errors and prints none: `app` turns them into a line and an
exit code. `output` has what commands share, `showing` what those over messages do. Heavy imports belong inside the
function: `anabranch --help` imports every module here.
"""

from __future__ import annotations

import logging
import sys


def main() -> None:
    """Run the command line: the entry point of `anabranch` and of `python -m anabranch`."""
    try:
        _run()
    except KeyboardInterrupt as interrupt:
        from ...adapters.system.signals import exit_code  # here: its import may be what was interrupted

        sys.exit(exit_code(interrupt))


def _run() -> None:
    from ...adapters.system.acceleration import describe_version
    from ...adapters.system.signals import ended_by_signals

    # A command shows what the library warns of where it says so (output.warnings_shown), and nowhere else.
    logging.getLogger(__package__.partition(".")[0]).addHandler(logging.NullHandler())
    try:
        from .app import app

        ended_by_signals()
        app(prog_name="anabranch")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"click", "rich"}:
            raise
        if sys.argv[1:] != ["--version"]:
            sys.exit("The command line is not installed; install it with: pip install 'anabranch[cli]'")
        print(describe_version())
