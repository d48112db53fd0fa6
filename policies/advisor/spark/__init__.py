"""The advisor through Spark: a session, and the same figures of a trace of any size."""
