"""Which store a destination lives in, the durable record of that, and how destinations move."""
