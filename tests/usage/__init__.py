"""The usage log: what a running router records, and the trace of it."""
