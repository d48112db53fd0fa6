"""Messages with all that a store knows of them, out of one store and into another of any kind.

What is copied is durable in its new store before it leaves the old one; the router records which of the two counts.
"""
