"""Bodies of any size, kept apart from their messages.

A body is durable before the message that names it is, and goes once no message names it.
"""
