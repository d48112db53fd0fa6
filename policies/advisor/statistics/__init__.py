"""Statistics of a trace: operations as arrays, their bytes, and a summary whose size does not grow with it."""
