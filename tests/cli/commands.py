"""Commands that are run in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from anabranch.router.cli.app import app


def run(*arguments: str, stdin: bytes | str | None = None, code: int | None = None) -> Result:
    """Run a command. Its exit code is `code`, if one is given; on bad input, which is 2, nothing is on stdout."""
    result = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
    assert code in (None, result.exit_code), result.output
    assert code != 2 or not result.stdout
    return result
