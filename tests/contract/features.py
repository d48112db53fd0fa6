"""The features of a store, for tests that look inside one."""

from __future__ import annotations

from typing import TypeVar

from anabranch.adapters.core import Store
from anabranch.adapters.core.engine.hooks import Feature
from anabranch.adapters.core.features.large.bodies import LargeBodies
from anabranch.adapters.core.features.quotas.reserving import Limits
from anabranch.adapters.core.features.scheduled import Waiting

F = TypeVar("F", bound=Feature)


def feature_of(store: Store, kind: type[F]) -> F:
    """The feature of that kind of a store."""
    return next(feature for feature in store._engine.features if isinstance(feature, kind))


def bodies_of(store: Store) -> LargeBodies:
    return feature_of(store, LargeBodies)


def limits_of(store: Store) -> Limits:
    return feature_of(store, Limits)


def schedule_of(store: Store) -> Waiting:
    return feature_of(store, Waiting)
