"""OPTIONS of a backend in Django's settings, and the router that they name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from threading import Lock
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.module_loading import import_string

import anabranch

_routers: dict[Path, anabranch.Router] = {}
"""Those that this process has opened. Django makes a backend for each thread."""
_opening = Lock()


@dataclass(frozen=True)
class Options:
    """What OPTIONS may say. Seconds are numbers; None: for ever, or never."""

    directory: Any = None
    """The directory, which must be there, and which processes share."""
    router: Any = None
    """Instead of it: a router, a function that returns one, or the dotted path to either. Who opened it closes it."""
    database: Any = "default"
    """The database whose transaction a call waits for; None: for none."""
    in_transaction: Any = False
    """The message is part of that transaction. It has to be in the same database."""
    result_ttl: Any = 7 * 86400.0
    """How long the result of a task is kept that has ended."""
    retries: Any = 0
    """How often a task that raises is executed again."""
    retry_delay: Any = 1.0
    """After how many seconds it is; twice as many each further time."""


def read(alias: str, given: Any) -> Options:
    """Return the options of a backend. Raises ImproperlyConfigured, which names the first that is wrong."""
    where = f"TASKS[{alias!r}]['OPTIONS']"
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f"{where} is {given!r}; it has to be a dict")
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ImproperlyConfigured(f"{where} has {name!r}, which is no option; {advice}")
    options = Options(**given)

    def wrong(name: str, expected: str) -> ImproperlyConfigured:
        return ImproperlyConfigured(f"{where}[{name!r}] is {getattr(options, name)!r}; it has to be {expected}")

    if (options.directory is None) == (options.router is None):
        raise ImproperlyConfigured(f"{where} needs 'directory', or 'router', and not both")
    if not isinstance(options.directory, str | Path | None):
        raise wrong("directory", "a path")
    if options.database is not None and options.database not in connections:
        raise wrong("database", f"one of DATABASES ({', '.join(connections)}), or None")
    if not isinstance(options.in_transaction, bool) or (options.in_transaction and options.database is None):
        raise wrong("in_transaction", "False, or True beside a 'database'")
    if options.in_transaction and options.router is None:
        raise wrong("in_transaction", "False with 'directory'; give a 'router' that has a store in the database")
    if not isinstance(options.retries, int) or options.retries < 0:
        raise wrong("retries", "a whole number from 0 on")
    for name in ("result_ttl", "retry_delay"):
        value = getattr(options, name)
        is_none = value is None and name == "result_ttl"
        if not is_none and not (isinstance(value, int | float) and value > 0):
            raise wrong(name, "a number of seconds above 0")
    return options


def router_of(alias: str, options: Options) -> anabranch.Router:
    """Return the router of a backend; opened once in a process, and never closed by us: it ends with the process.
    Raises ImproperlyConfigured, and what anabranch.open does."""
    if options.router is None:
        return _shared(alias, Path(options.directory))
    given = import_string(options.router) if isinstance(options.router, str) else options.router
    router = given() if callable(given) else given
    if not callable(getattr(router, "transaction", None)):
        raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS']['router'] gives {router!r}; it has to be a router")
    return router  # type: ignore[no-any-return]


def missing(alias: str, options: Options) -> str | None:
    """Return what is wrong if the directory is not there."""
    if options.directory is None or Path(options.directory).is_dir():
        return None
    path = options.directory
    return f"TASKS[{alias!r}]['OPTIONS']['directory']: {path} is not there; make the directory (mkdir {path})"


def _shared(alias: str, directory: Path) -> anabranch.Router:
    with _opening:
        router = _routers.get(directory)
        if router is None:
            wrong = missing(alias, Options(directory=directory))
            if wrong is not None:
                raise ImproperlyConfigured(wrong)
            source: Path | anabranch.Config = directory
            if not (directory / "stores.yaml").exists():
                journal = anabranch.JournalOptions(priorities=True)
                source = anabranch.Config(directory, [anabranch.StoreConfig("django", [">"], journal=journal)])
            router = _routers[directory] = anabranch.open(source, shared=True)
        return router
