"""`anabranch check`: everything that is wrong with a configuration."""

from __future__ import annotations

from pathlib import Path

import click

from ...policies.config import Config, StoreConfig, load, warnings
from ...policies.config.kinds import load_adapter
from ...policies.errors import AnabranchError, ConfigError, Problem
from ..migration.plan import changed_kinds
from ..placement.directories import missing_directories
from ..placement.in_force import file_of
from .modes import too_open
from .output import LocalPath, config_option, echo_json, json_option


@click.command()
@click.argument("path", type=LocalPath(), required=False)
@config_option
@json_option
@click.pass_context
def command(ctx: click.Context, path: Path | None, config_path: Path, as_json: bool) -> None:
    """Say what is wrong with a configuration file.

    The file is PATH or stores.yaml, or the configuration that a directory is opened under. All problems are listed at
    once. One of them is a store of the data directory that the file gives another kind than it has. The command creates
    nothing, and changes nothing. There are warnings, too: for valid text that is probably not meant, for files that
    more users may read than the configuration says, and for directories that are missing and must not be made.

    \b
    Example:
      anabranch check stores.yaml
      anabranch check -c stores.yaml --json
    """
    path = file_of(path or config_path)
    doubtful: list[Problem] = []
    try:
        config = load(path)
        refused = [Problem(f"store {store.name!r}: {said}") for store in config.stores for said in _refused(store)]
        refused += _changed_kinds(config, doubtful)
        if refused:
            raise ConfigError(refused, str(path))
    except ConfigError as error:
        if not as_json:
            raise
        problems = [{"line": problem.line, "message": problem.message} for problem in error.problems]
        echo_json({"path": str(path), "valid": False, "problems": problems})
        ctx.exit(2)
    doubtful += [*warnings(path), *map(Problem, missing_directories(config)), *too_open(config)]
    if as_json:
        found = [{"line": warning.line, "message": warning.message} for warning in doubtful]
        stores = [store.name for store in config.stores]
        echo_json({"path": str(path), "valid": True, "problems": [], "warnings": found, "stores": stores})
        return
    for warning in doubtful:
        where = f"{path}:{warning.line}" if warning.line else path
        click.echo(f"{where}: warning: {warning.message}", err=True)
    click.echo(f"{path} is valid. Data directory: {config.directory}")
    for store in config.stores:
        own = ", one for each destination" if store.per_destination else ""
        click.echo(f"  {store.name} ({store.kind}{own}): {', '.join(store.match)}")


def _changed_kinds(config: Config, doubtful: list[Problem]) -> list[Problem]:
    """Return the problem that an open would refuse. If the directory cannot be looked at, a problem joins
    `doubtful`."""
    try:
        found = changed_kinds(config)
    except (AnabranchError, OSError) as error:
        doubtful.append(Problem(f"the stores in {config.directory} cannot be compared: {error}"))
        return []
    return [] if found is None else [Problem(str(found))]


def _refused(store: StoreConfig) -> list[str]:
    """Return the adapter's problems with a store's options, beside those that their model finds."""
    try:
        check = getattr(load_adapter(store.kind), "check_options", None)
        if check is not None:
            check(store.options)
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    except (AnabranchError, ValueError) as error:
        return [str(error)]
    return []
