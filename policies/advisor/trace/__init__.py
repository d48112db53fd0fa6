"""Usage traces: what happened to each message, in order; where they are read from, and what may be wrong."""
