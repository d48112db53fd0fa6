"""Routing is what the configuration in force says of destinations: which store takes them, and what may be a slip."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...policies.errors import NoRouteError
from ...policies.names.destination import Destination, Kind
from ...policies.names.pattern import Pattern
from ...policies.names.routes import Match, RouteTable
from .near_names import LOOKED_AT, near_name
from .record import DestinationsTable

if TYPE_CHECKING:
    from ...policies.config import Config, StoreConfig

log: logging.Logger = logging.getLogger(__name__)


class Routing:
    """The routes of one router. Threads: all."""

    def __init__(self, config: Config, table: DestinationsTable) -> None:
        self._table = table
        self.reroute(config)

    def reroute(self, config: Config) -> None:
        """Route by this configuration from now on."""
        self.config: Config = config
        self.routes: RouteTable[StoreConfig] = config.routes()

    def route(self, destination: Destination) -> Match[StoreConfig]:
        """Return the pattern and the store for a destination. Raises NoRouteError, which names the closest patterns."""
        match = self.routes.route(destination)
        if match is None:
            near = ", ".join(self.routes.nearest(destination))
            raise NoRouteError(
                f'no pattern matches {destination}; the closest are {near}. Add one, or a store that matches ">"'
            )
        return match

    def require_queues(self, pattern: Pattern) -> None:
        """Raise NoRouteError for a pattern that no queue can match: none is known, and none could be sent to."""
        known = list(self._table.destinations)
        if not self.routes._may_take(pattern, Kind.QUEUE) and not any(
            destination.kind is Kind.QUEUE and pattern.matches(destination) for destination in known
        ):
            near = ", ".join(self.routes.nearest(pattern))
            raise NoRouteError(
                f"no queue can match {pattern}: no store takes any of that name; the closest patterns of stores are "
                f"{near}"
            )

    def hint_at_slip(self, destination: Destination) -> None:
        """Hint at a slip in a name for whose messages somebody is about to wait for ever. Says so in the log if nobody
        has sent there, and there is a queue whose name is the same but for a slip."""
        known = self._table.destinations
        if destination in known or destination.kind is not Kind.QUEUE or len(known) > LOOKED_AT:
            return
        near = near_name(destination, list(known))
        if near is not None:
            log.warning(
                "somebody waits for messages of %s, to which nothing was ever sent; did you mean %s?", destination, near
            )
