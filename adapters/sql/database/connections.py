"""The engine of a store: where its database is, and the pool of connections to it (pool.py)."""

from __future__ import annotations

import os
import pkgutil
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from ....policies.config.fields import variables_of
from ....policies.config.options import SqlOptions
from ....policies.errors import ConfigError, MissingExtraError
from ...system.background import unstruck
from . import dialects
from .pool import KeptPool, taken
from .statements import keepalive_statement

EXTRAS: Final = {"psycopg": "postgres"}
"""The extra that brings each driver."""
_SECRET: Final = ("password", "passwd", "pwd", "secret", "token", "key")
_MASK: Final = "***"
T = TypeVar("T")


def on_connection(engine: Engine, work: Callable[[Connection], T], **options: Any) -> T:
    """Return what `work` returns for a connection with these execution options. Raises SQLAlchemyError, and what `work`
    raises.

    Where Ctrl-C strikes, or a signal handler raises, nothing of it is open any more on return: neither its transaction,
    for which others would wait, nor what it was reading. It is no context manager: struck at the end of its block, that
    would have neither ended the transaction nor been asked again. SQLAlchemy, struck as it cleans up, raises an
    AssertionError at times; that is a KeyboardInterrupt all the same.
    """
    before, since = sys.exception(), taken()
    try:
        with engine.connect().execution_options(**options) as connection:
            return work(connection)
    except BaseException as error:
        _end(engine, error, before, since)
        raise


def on_driver(engine: Engine, work: Callable[..., T], *given: Any) -> T:
    """Return what `work` returns for a connection of the pool's and what is given, as `on_connection` does, for less:
    it is not reset when it comes back. Raises SQLAlchemyError if there is none, and what `work` raises."""
    pool, before, since = engine.pool, sys.exception(), taken()
    try:
        try:
            entry = pool._do_get()
            try:
                entry.get_connection()  # type: ignore[attr-defined]
            except BaseException:
                entry.invalidate()  # what was to be done with it once it was made, was not
                pool._do_return_conn(entry)
                raise
        except engine.dialect.loaded_dbapi.Error as error:
            raise driver_error(error, engine, False) from None
        try:
            return work(entry, *given)
        finally:
            pool._do_return_conn(entry)
    except BaseException as error:
        _end(engine, error, before, since)
        raise


def driver_error(error: Exception, engine: Engine, is_gone: bool) -> SQLAlchemyError:
    """Return an error of the driver's as SQLAlchemy's. `is_gone`: the connection is lost."""
    base = engine.dialect.loaded_dbapi.Error
    found: Any = DBAPIError.instance(None, None, error, base, hide_parameters=True, connection_invalidated=is_gone)
    assert isinstance(found, SQLAlchemyError)
    return found


def _end(engine: Engine, error: BaseException, before: BaseException | None, since: int) -> None:
    """End what this thread has taken from the pool since then: an error has struck it. Raises the KeyboardInterrupt
    that the error comes of."""
    if isinstance(engine.pool, KeptPool):
        engine.pool.end_since(since)
    interrupt: BaseException | None = error
    while interrupt is not before and interrupt is not None and not isinstance(interrupt, KeyboardInterrupt):
        interrupt = interrupt.__context__
    if isinstance(interrupt, KeyboardInterrupt) and interrupt is not error:
        raise interrupt from None


def database_url(options: SqlOptions, directory: Path) -> URL:
    """Return the URL with the password that is given beside it, or SQLite's in the store's directory. Show it by
    `shown_url` alone. Raises ConfigError, which shows nothing of a URL that does not read."""
    if options.url is None:
        return URL.create("sqlite", database=str(directory / dialects.SQLITE_FILE))
    try:
        url = make_url(options.url.get_secret_value())
    except (ArgumentError, ValueError):
        variable = variables_of(options).get("url")
        whence = f", of the environment's variable {variable!r} (url_env)," if variable is not None else ""
        raise ConfigError(
            [f"the url of an sql store{whence} is not one (it is not shown here, as it may hold a password); "
             "it is written like postgresql+psycopg://user@host:5432/database, with several hosts "
             "postgresql+psycopg://user@/database?host=db1:5432&host=db2:5432"]
        ) from None  # fmt: skip
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigError(
            ["an SQLite database in memory loses everything; leave the url out, or use the kind `memory`"]
        )
    if options.username is not None:
        url = url.set(username=options.username)
    return url if options.password is None else url.set(password=options.password.get_secret_value())


def shown_url(url: URL) -> str:
    """Return the URL as it may be shown: with neither the password, nor what its query may hold but hosts."""
    hosts = {name: url.query[name] for name in ("host", "port") if name in url.query}
    return unquote(url.set(query=hosts).render_as_string(hide_password=True))


def scrubbed(text: str, url: URL) -> str:
    """Return a driver's words without the secrets of the URL, should the driver echo one."""
    for secret in (str(url.password or ""), *_secrets(url).values()):
        text = text.replace(secret, _MASK) if secret else text
    return text


def _secrets(url: URL) -> dict[str, str]:
    """Return what is secret in the URL's query, by name. SQLAlchemy hides the password alone."""
    query = {name: values[-1] for name, values in url.normalized_query.items()}
    return {name: value for name, value in query.items() if any(part in name.lower() for part in _SECRET)}


def words_of(error: BaseException, url: URL) -> str:
    """Return the driver's words, on one line, without the secrets of the URL."""
    original = getattr(error, "orig", None) or error
    words = " ".join(str(original).split()) or type(original).__name__
    return scrubbed(words, url)


def open_engine(options: SqlOptions, directory: Path) -> Engine:
    """Return the engine of a store in this directory. It connects to nothing yet. Raises ConfigError,
    MissingExtraError.

    A forked child does not close its parent's connections.
    """
    url = database_url(options, directory)
    pool: dict[str, Any] = {"least": 1, "idle_timeout": options.pool_idle_timeout}
    if url.get_backend_name() != "sqlite":
        pool = {
            "least": options.pool_min,
            "most": options.pool_max,
            "pool_timeout": options.pool_timeout,
            "idle_timeout": options.pool_idle_timeout,
            "keepalive_interval": options.keepalive_interval,
            "keepalive_statement": keepalive_statement(options),
            "words_of": partial(words_of, url=url),
            "response_timeout": options.response_timeout,
            "name": f"the database {shown_url(url)}",
        }
    engine = _engine(url, options, poolclass=KeptPool, **pool)
    _engines.add(engine)
    return engine


def open_single(options: SqlOptions, directory: Path) -> Engine:
    """Return an engine that has no pool. Each connection is one of its own, closed by who opened it."""
    return _engine(database_url(options, directory), options, poolclass=NullPool)


def _engine(url: URL, options: SqlOptions, **pool: Any) -> Engine:
    secrets = _secrets(url)
    arguments = {**dialects.connect_args(url), **secrets}
    try:
        shown = url.difference_update_query(secrets)
        if options.creator is not None:
            pool["creator"] = _creating(options.creator, lambda: engine)
        # It asks for loggers, and Python's logging has a lock that Ctrl-C can leave locked.
        engine = unstruck(lambda: create_engine(shown, hide_parameters=True, connect_args=arguments, **pool))
    except NoSuchModuleError:
        raise ConfigError([f"SQLAlchemy knows no databases of the kind {url.drivername!r}: {shown_url(url)}"]) from None
    except ModuleNotFoundError as error:
        driver = url.get_driver_name() or str(error.name)
        extra = EXTRAS.get(driver)
        way = f"pip install 'anabranch[{extra}]'" if extra else f"install the driver {error.name}"
        raise MissingExtraError(f"{shown_url(url)} needs {error.name}, which is not installed: {way}") from None
    except (ArgumentError, TypeError, ValueError) as error:
        raise ConfigError([f"{shown_url(url)}: {scrubbed(str(error), url)}"]) from None
    dialects.configure(engine)
    if url.get_backend_name() == "sqlite" and "." in options.schema_prefix:
        raise ConfigError(
            [f"schema_prefix {options.schema_prefix!r}: SQLite has no schemas; give the beginning of a name, like mq_"]
        )
    if options.lease_expiration is not None:
        if url.get_backend_name() not in dialects.LEASED:
            raise ConfigError(
                [f"lease_expiration: {shown_url(url)}: leases are kept on {' and '.join(dialects.LEASED)}"]
            )
        dialects.end_idle_transactions(engine, options.lease_expiration)
    return engine


def _creating(creator: Any, ours: Callable[[], Engine]) -> Callable[[], Any]:
    """Return what makes a connection of the driver's by the option `creator`. Its error counts as the driver's error:
    it fails the calls that need the connection, and no more. `ours` returns the engine that the connection is for.
    Raises ConfigError."""
    what = creator
    if isinstance(creator, str):
        try:
            creator = pkgutil.resolve_name(creator)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError([f"creator: there is no {what}: {error}"]) from None
        if not callable(creator) and not isinstance(creator, Engine):
            raise ConfigError([f"creator: {what} is no function, but {type(creator).__name__}"])

    def create() -> Any:
        try:
            if not isinstance(creator, Engine):
                made = creator()
                if not hasattr(made, "cursor") or not hasattr(made, "rollback"):
                    driver = ours().dialect.loaded_dbapi.__name__
                    raise TypeError(f"it gave {type(made).__name__}, which is no connection of the driver {driver}")
                return made
            connection = creator.raw_connection()
            connection.detach()  # else its pool closes it, or gives it to somebody else
            return connection.dbapi_connection
        except Exception as error:
            errors = ours().dialect.loaded_dbapi
            original = getattr(error, "orig", None) or error
            if isinstance(original, errors.Error):
                raise original from None
            raise errors.OperationalError(f"creator {what}: {type(error).__name__}: {error}") from error

    return create


def cut_off(engine: Engine) -> None:
    """Give everyone who waits for the database on a connection of this pool an error, at once."""
    if isinstance(engine.pool, KeptPool):
        engine.pool.cut_off_all()


_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in _engines:
        if isinstance(engine.pool, KeptPool):
            engine.pool.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)
