"""Migration moves destinations: repartition of a closed directory or a live one, and import from ActiveMQ.

Killed anywhere, a move goes on when it is asked for again; no message is in two stores that count.
"""
