"""Types of arrays, and what stands for a time or a position that never comes."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER: Final = float("inf")
NEVER_POSITION: Final = 1 << 62
"""Where an ack stands that never comes."""
