"""`anabranch schema`: the JSON Schema of the configuration file, and the tables of SQL stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...policies.config import json_schema, load
from ...policies.config.options import SqlOptions
from ...policies.errors import ConfigError
from ...policies.text import count_of
from .output import Command, config_file, echo_json, echo_result, json_option

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from ...adapters.sql.database.schema import Schema

DIALECTS = ("postgresql", "sqlite")


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def schema_command(ctx: click.Context, as_json: bool) -> None:
    """Print the JSON Schema of stores.yaml, or make SQL tables.

    Without a command it prints the JSON Schema. Editors use it for completion, descriptions, and most mistakes while
    typing. It is JSON with or without --json.

    \b
    Example:
      anabranch schema > stores.schema.json
      anabranch schema print --dialect postgresql > tables.sql
      anabranch schema create --config stores.yaml --store ledger
    """
    if ctx.invoked_subcommand is None:
        echo_json(json_schema())


@schema_command.command("config")
@json_option
def config_schema(as_json: bool) -> None:
    """Print the configuration file's JSON Schema.

    \b
    Example:
      anabranch schema config > stores.schema.json
    """
    echo_json(json_schema())


@schema_command.command("recommendation")
@json_option
def recommendation(as_json: bool) -> None:
    """Print the JSON Schema of recommendation.json.

    \b
    Example:
      anabranch schema recommendation > recommendation.schema.json
    """
    from ...policies.advisor.advice.schema import recommendation_schema

    echo_json(recommendation_schema())


def _which(command: Command) -> Command:
    """Give a command the options that say which tables are meant: `_options` takes them."""
    prefix = click.option("--prefix", metavar="PREFIX", help="Put this before the tables' names instead.")
    better = "A database, instead of a configuration; better in the variable ANABRANCH_URL if it has a password."
    url = click.option("--url", envvar="ANABRANCH_URL", metavar="URL", help=better)
    store = click.option("--store", "store_name", metavar="NAME", help="Which of its SQL stores, if there are several.")
    return config_file("The configuration that names it.")(store(url(prefix(command))))


@schema_command.command("print")
@click.option(
    "--dialect", type=click.Choice(DIALECTS), help="The database's kind, if neither a store nor a URL says it."
)
@click.option("--drop", "dropping", is_flag=True, help="Print the SQL that removes the tables instead.")
@_which
@json_option
def print_script(dialect: str | None, dropping: bool, as_json: bool, **which: Any) -> None:
    """Print the SQL that makes the tables of a store.

    The command connects to nothing.

    \b
    Example:
      anabranch schema print --dialect postgresql --prefix mq.
      anabranch schema print --config stores.yaml --store ledger
    """
    options, directory = _options(**which)
    script, tables = _script(), _tables(options)
    from ...adapters.sql.database.connections import database_url

    given = which["url"] is not None or which["config_path"] is not None
    if dialect is None and not given:
        raise click.UsageError("give --dialect, --config or --url")
    kind = database_url(options, directory).get_backend_name() if given else dialect
    if kind not in DIALECTS or (dialect is not None and dialect != kind):
        raise click.UsageError(f"the database is of the kind {kind}; scripts are for {' and '.join(DIALECTS)}")
    made: list[str] = (
        script.drop_script(tables, kind) if dropping else script.create_script(tables, kind, options.priorities)
    )
    text = "\n\n".join(f"{statement};" for statement in made)
    echo_result(as_json, {"dialect": kind, "statements": made}, text)


@schema_command.command("create")
@_which
@json_option
def create(as_json: bool, **which: Any) -> None:
    """Make the tables of a store that are missing.

    They belong to nobody until a store is opened on them for the first time.

    \b
    Example:
      anabranch schema create --config stores.yaml --store ledger
    """
    with _connected(**which) as (connection, tables, options):
        made = _script().create(connection, tables, options.priorities)
        connection.commit()
    echo_result(as_json, {"created": made}, f"Made {', '.join(made)}." if made else "All of them were there.")


@schema_command.command("drop")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also if messages are there, or another node is at work on them.")
@_which
@json_option
def drop(yes: bool, force: bool, as_json: bool, **which: Any) -> None:
    """Remove the tables of a store, with all that is in them.

    The command asks first. It refuses if messages or prepared transactions are in the tables.

    \b
    Example:
      anabranch schema drop --config stores.yaml --store ledger
    """
    with _connected(**which) as (connection, tables, _):
        held = _script().held(connection, tables)
        connection.rollback()
        where = _shown(connection)
        lost = f"{count_of(held.messages, 'message')} and {count_of(held.prepared, 'prepared transaction')}"
        if held.owner is not None and not force:
            raise ConfigError([f"the tables of {where} are in use by {held.owner}; close it there, or give --force"])
        if (held.messages or held.prepared) and not force:
            raise ConfigError([f"the tables of {where} hold {lost}; receive them first, or give --force to lose them"])
        if not yes:
            click.confirm(f"Remove the tables of {where}, with {lost}?", abort=True, err=True)
        gone = _script().drop(connection, tables)
        connection.commit()
    said = {"dropped": gone, "messages": held.messages, "prepared": held.prepared}
    echo_result(as_json, said, f"Removed {', '.join(gone)}." if gone else "There were none.")


# The tables that are meant -------------------------------------------------------------------------------------------


def _options(
    config_path: Path | None, store_name: str | None, url: str | None, prefix: str | None
) -> tuple[SqlOptions, Path]:
    """Return the options of the store that is meant, and its directory. Raises ConfigError."""
    if config_path is None:
        given: dict[str, Any] = {"url": url, **({} if prefix is None else {"schema_prefix": prefix})}
        return SqlOptions(**given), Path()
    if url is not None or prefix is not None:
        raise click.UsageError("give either --config, or --url and --prefix")
    config = load(config_path)
    stores = {store.name: store for store in config.stores if isinstance(store.options, SqlOptions)}
    if store_name is None and len(stores) == 1:
        store_name = next(iter(stores))
    if store_name not in stores:
        if not stores:
            raise ConfigError([f"{config_path}: none of its stores is an SQL store"])
        missing = "--store is missing" if store_name is None else f"{store_name!r} is no SQL store"
        raise ConfigError([f"{config_path}: {missing}; its SQL stores are {', '.join(stores)}"])
    store = stores[store_name]
    options = store.options
    assert isinstance(options, SqlOptions)
    if options.url is None:
        raise ConfigError([f"store {store_name!r} has its tables in its own directory; they come and go with it"])
    return options, store.directory or config.directory


@contextmanager
def _connected(**which: Any) -> Iterator[tuple[Connection, Schema, SqlOptions]]:
    """Connect to the database that is meant. Its errors show no password."""
    if which["config_path"] is None and which["url"] is None:
        raise click.UsageError("give --config or --url")
    options, directory = _options(**which)
    tables = _tables(options)
    from sqlalchemy.exc import SQLAlchemyError

    from ...adapters.sql.database.connections import open_single
    from ...adapters.sql.database.dialects import WRITES
    from ...adapters.sql.database.errors import Database

    engine = open_single(options, directory)
    try:
        with engine.connect().execution_options(**{WRITES: True}) as connection:
            yield connection, tables, options
    except SQLAlchemyError as error:
        raise Database(which["store_name"] or "--url", engine).error(error) from None
    finally:
        engine.dispose()


def _shown(connection: Connection) -> str:
    from ...adapters.sql.database.connections import shown_url

    return shown_url(connection.engine.url)


def _tables(options: SqlOptions) -> Schema:
    _script()
    from ...adapters.sql.database.schema import schema

    return schema(options.schema_prefix, options.table_names)


def _script() -> Any:
    from ...adapters.sql.database import schema_script  # says which extra brings what it needs

    return schema_script
