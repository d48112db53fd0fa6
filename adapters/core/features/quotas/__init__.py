"""The amount that a store may hold, and what happens to what does not fit: limits, room, what is dropped."""
