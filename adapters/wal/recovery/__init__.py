"""A log when it is opened: which segments count, where it ends; and what a damaged one still has."""
