"""Messages that are not persistent: no backend sees them, and none is there after a crash or a close."""
