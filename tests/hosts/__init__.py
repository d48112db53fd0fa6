"""Each folder is for one program that stands on Anabranch: `make test-hosts` runs it in an environment of its own, with
what its requirements.txt pins. The sdists that its sdists.txt names lie unpacked in that environment's `sdists`."""

from __future__ import annotations

import sys
from pathlib import Path

SDISTS = Path(sys.prefix, "sdists")
