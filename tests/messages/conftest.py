"""The router's fixtures."""

from ..router.conftest import cross, faults, synced, tmp_path  # noqa: F401
from ..sharing.fixtures import owned  # noqa: F401
from ..sharing.fixtures import run_shared as pytest_generate_tests  # noqa: F401
