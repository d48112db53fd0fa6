"""The end of removals, at open, that had messages still to go.

While a store is open they go a page at a time, each in a transaction of its own (Write.ack_range). Until the last of
them a destination's row has a KIND below 0, and that of a subscription which has ended a DESTINATION below 0.
"""

from __future__ import annotations

from sqlalchemy.engine import Connection

from ...policies.names.destination import Destination, Kind
from ..core.state.leases import DestinationState
from .database.errors import Database
from .database.statements import Statements
from .writing import LAST, Write


def complete(database: Database, statements: Statements) -> None:
    """Complete the removals, before anything is loaded. Whoever does so again removes nothing more. Raises
    SQLAlchemyError."""
    destinations = database.read(lambda c: c.execute(statements["select.destinations"]).all())
    subscriptions = database.read(lambda c: c.execute(statements["select.durables"]).all())
    removed = [(number, Destination(Kind(-1 - kind), name)) for number, kind, name in destinations if kind < 0]
    ended = [(row[0], -row[6], Destination(Kind.TOPIC, row[3])) for row in subscriptions if row[6] < 0]
    if not removed and not ended:
        return

    def remove(connection: Connection) -> None:
        write = Write(connection, statements, 0, False, {}, iter(()))
        for number, topic, name in ended:
            write.ack_range(DestinationState(topic, name), 0, LAST, number)
        for number, name in removed:
            state = DestinationState(number, name)
            state.removed = True
            write.ack_range(state, 0, LAST, 0)
        connection.commit()

    database.write(remove)
