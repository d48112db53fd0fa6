"""Workloads described in YAML, and the traces that are made of them."""
