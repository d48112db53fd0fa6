"""A send in the transaction of Django's ORM, where the store is in the same database."""

from __future__ import annotations

import weakref
from typing import Any

from django.db import transaction

_engines: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""By Django's connection: the driver's, which may be another one later, and SQLAlchemy's engine over that."""


class _Borrowed:
    """The driver's connection as SQLAlchemy may use it. Django alone ends transactions, and closes it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def _ignored(self, *_: Any, **__: Any) -> None:
        pass

    commit = rollback = close = _ignored
    create_function = _ignored  # SQLAlchemy's REGEXP, which would replace Django's
    add_notice_handler = _ignored


def joined(connection: Any) -> Any:
    """Return a connection of SQLAlchemy's in the atomic block of Django's. A rollback, to a savepoint too, forgets it
    with all that was to be done on commit: that is how its store knows then."""
    from sqlalchemy import create_engine  # of the extra `sql`
    from sqlalchemy.pool import StaticPool

    driver = connection.connection
    known, engine = _engines.get(connection, (None, None))
    if known is not driver:
        postgresql = connection.vendor == "postgresql"
        url = "postgresql+psycopg://" if postgresql else f"{connection.vendor}://"
        options = {"use_native_hstore": False} if postgresql else {}
        engine = create_engine(
            url, creator=lambda: _Borrowed(driver), poolclass=StaticPool, pool_reset_on_return=None, **options
        )
        _engines[connection] = driver, engine
    ours = engine.connect()

    def end() -> None:
        ours.commit()  # which tells the store; the driver has committed
        ours.close()

    transaction.on_commit(end, using=connection.alias)
    return ours
