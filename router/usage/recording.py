"""UsageRecording starts and stops the usage log of a router, which has at most one at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...adapters.core import Store
from ...policies import config as configs
from ...policies.errors import AnabranchError, ConfigError
from .log import UsageLog, UsageStats

if TYPE_CHECKING:
    from ...policies.config import Config, UsageOptions

log: logging.Logger = logging.getLogger(__name__)


class UsageRecording:
    """The recording of one router. Threads: all. `_lock` is held while it starts and stops."""

    def __init__(
        self, config: Callable[[], Config], stores: Callable[[], Iterable[Store]], require_own: Callable[[Path], None]
    ) -> None:
        """Begin without a log. `config` returns the configuration in force, `stores` the open stores. `require_own`
        raises ConfigError for a directory that is not in the router's hands."""
        self._config, self._stores, self._require_own = config, stores, require_own
        self._lock = threading.RLock()
        self.log: UsageLog | None = None

    def start(self, given: UsageOptions | Mapping[str, Any] | None) -> None:
        """Record from now on. A recording that is under way ends first. Raises as Router.start_usage_log."""
        options = self._options(given)
        with self._lock:
            self.stop()
            self._start(options)

    def start_configured(self) -> None:
        """Start the usage log of the configuration. It is an observation: an error of its opening keeps nobody from the
        messages."""
        options = self._config().usage
        if options is not None:
            try:
                with self._lock:
                    self._start(options)
            except AnabranchError as error:
                log.warning("nothing is recorded: %s", error)

    def _start(self, options: UsageOptions) -> None:
        config, path = self._config(), options.directory
        if path is None:
            path = config.directory / "usage"
            self._require_own(path)
        self.log = UsageLog(path, options, self._stores, self._config, config.file_mode)
        self.log.open()

    def stop(self) -> None:
        """Stop recording. Idempotent."""
        with self._lock:
            if self.log is not None:
                self.log.close()
                self.log = None

    def attach(self, store: Store) -> None:
        """Record what a store does that was just opened."""
        usage = self.log
        if usage is not None:
            usage.attach(store)

    def stats(self) -> UsageStats | None:
        """Return the statistics of the usage log, or why it could not be started; None if there is none."""
        usage = self.log
        return None if usage is None else usage.stats()

    def _options(self, given: UsageOptions | Mapping[str, Any] | None) -> UsageOptions:
        config = self._config()
        if given is None:
            given = config.usage or configs.UsageOptions()
        elif isinstance(given, Mapping):
            given = configs.UsageOptions(**{str(key): value for key, value in given.items()})
        elif not isinstance(given, configs.UsageOptions):
            raise TypeError(
                f"the usage log takes UsageOptions or a mapping of them, not {type(given).__name__}: {given!r}"
            )
        if conflict := config._usage_conflict(given):
            raise ConfigError([f"the usage log's directory: {conflict}"])
        return given
