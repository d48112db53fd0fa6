"""The features of a store: each hangs on the hooks of its engine (engine/hooks.py), and nothing below knows it.

A feature is one folder or module here and one line of FEATURES: without both the rest stands. What a user asks for
that a missing feature would give is refused. Features come in the order in which a store opens them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..engine.hooks import Feature
from .groups import MessageGroups
from .keyed.maps import Maps
from .large.bodies import LargeBodies
from .outbox import OutboxFeature
from .parts import Parts
from .quotas.reserving import Limits
from .scheduled import Waiting
from .transient.messages import TransientFeature

FEATURES: Final[tuple[Callable[[Parts], Feature], ...]] = (
    Limits,
    LargeBodies,
    TransientFeature,
    Waiting,
    Maps,
    MessageGroups,
    OutboxFeature,
)
