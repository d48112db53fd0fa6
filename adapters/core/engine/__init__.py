"""From what is written to what is seen: writers hand tickets to the backend, the engine has them applied in order.

What is written counts; what is not yet applied is in memory, and is read back from the backend after a crash.
"""
