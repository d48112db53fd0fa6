"""A journal store when it is opened: the log, then the index brought up to it, and what to do about damage."""
