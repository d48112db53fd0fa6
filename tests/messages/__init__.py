"""What docs/messages.md and docs/maps.md tell users of queues, topics, maps and dead letters, a file a feature."""
