"""Work on a directory that nobody has open, by a router of its own: repartition, import from ActiveMQ.

Killed anywhere, each goes on when it is asked for again.
"""
