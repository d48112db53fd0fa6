"""Shared stores: tables of a PostgreSQL database that any number of routers, on any machines, use at the same time.

    sql: {url: "postgresql+psycopg://app@db/app", shared: true}

What other stores know in memory is in rows here: who holds which message, until when, and who waits where. So a message
that one router sends is received by another, which need not even run when it is sent. A router that is killed is
noticed by its row in ROUTERS, and what it held is free again.

    statements   what is asked of the database
    prepared     how a connection is asked
    tables       the tables, made and recognised
    database     transactions, and what became of one that was cut off
    leases       the messages that this router holds
    heads        where the messages of a queue begin, about
    waiting      who waits here for a message, and the one connection that hears of it
    listening    callbacks
    queues       the numbers of queues, topics and subscriptions
    sending      messages that are stored
    topics       subscriptions, each of which is a queue of its own
    usage        what the usage log is told
    branches     what is prepared and waits for its outcome
    store        the face, as that of every store
"""

from .store import SharedStore

__all__ = ["SharedStore"]
