"""The engine of a store: SQLAlchemy's pool."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, Engine, make_url

from ...policies.options import SqlOptions
from . import dialects


def database_url(options: SqlOptions, directory: Path) -> URL:
    """The URL, with the password that is given beside it; SQLite in the store's directory if there is none. Show it by
    `render_as_string(hide_password=True)` alone."""
    if options.url is None:
        return URL.create("sqlite", database=str(directory / dialects.SQLITE_FILE))
    url = make_url(options.url.get_secret_value())
    return url if options.password is None else url.set(password=options.password.get_secret_value())


def open_engine(options: SqlOptions, directory: Path) -> Engine:
    """The engine of a store in this directory. Connects to nothing yet."""
    engine = create_engine(
        database_url(options, directory),
        pool_size=5,
        max_overflow=-1,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args=dialects.connect_args(options.url is None),
    )
    dialects.configure(engine)
    return engine
