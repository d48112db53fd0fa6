"""Features that a message need not use: quotas, keyed values, large bodies, transient messages, schedules, the
outbox."""
