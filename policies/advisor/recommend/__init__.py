"""What is recommended: an open trace, candidates with names, what else could be, the answer in values and in words."""
