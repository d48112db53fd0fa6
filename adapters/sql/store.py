"""SqlStore: the core's store over the tables of a database."""

from __future__ import annotations

from ...policies.config.options import SqlOptions
from ..core.store import Store
from .backend import SqlBackend


class SqlStore(Store):
    """A store in tables of its own. Threads: all. Forks: a child's calls raise ClosedError (rule D4)."""

    backend_type = SqlBackend
    options_model = SqlOptions

    @classmethod
    def check_options(cls, options: SqlOptions) -> None:
        """Raise ConfigError and MissingExtraError for what `create` would refuse before it connects."""
        SqlBackend.check_options(options)
