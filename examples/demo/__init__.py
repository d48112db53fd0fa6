"""`make demo`: from a real broker's journal to a recommendation that is put to the test, in some 40 lines.

`__main__` unpacks the journal, asks the advisor, in this process and through Spark, and prints; `replay` does again,
through a router, what a usage trace says was done, and `watch` the disk; `loop` has a router record how it is used,
asks for advice on that, moves what is there, and goes on.
"""
