"""The marker in a data directory while an import from ActiveMQ is under way, or was cut short (rule K9)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ....policies.errors import PlacementError

MARKER: Final = "import-kahadb.json"


def require_no_import(directory: Path) -> None:
    """Raise PlacementError if an import into the directory was cut short: nothing may change that the import goes on
    with."""
    if (directory / MARKER).exists():
        raise PlacementError(
            f"an import from ActiveMQ into {directory} was cut short; run `anabranch import --from-kahadb DIR` again "
            f"with the same configuration: it goes on where it was. Or delete {directory / MARKER} to keep what has "
            "come so far, and bring in no more"
        )
