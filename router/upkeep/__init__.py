"""Upkeep keeps a directory in order: dead letters and requeue, idle queues, salvage, explanations, space."""
