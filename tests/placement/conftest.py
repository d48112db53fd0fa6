"""The router's fixtures."""

from ..router.conftest import cross, faults, synced, tmp_path  # noqa: F401
