"""The recommendation: an open trace, candidates with names, what else could be, the answer in values and in words."""
