"""Redelivery: how long a message waits that was given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Required, Self, TypedDict, Unpack

from pydantic import Field, model_validator

from .fields import Duration, Model


class RedeliveryValues(TypedDict, total=False):
    """The values that `Redelivery` takes, for type checkers."""

    delay: Required[float | str]
    multiplier: float
    max_delay: float | str
    jitter: float


class Redelivery(Model):
    """The wait of a message that was given back."""

    delay: Annotated[float, Duration(0.001, 30 * 86_400)]
    """The wait after the first time, in seconds."""
    multiplier: Annotated[float, Field(strict=True, ge=1, le=1000, allow_inf_nan=False)] = 1.0
    """Each wait is so many times as long as the one before."""
    max_delay: Annotated[float, Duration(0.001, 365 * 86_400)] = 3600.0
    """The longest wait, in seconds."""
    jitter: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.0
    """The part by which a wait is longer or shorter, at random at most: 0.1 is a tenth. Messages that failed together
    then do not come back together."""

    if TYPE_CHECKING:

        def __init__(self, **values: Unpack[RedeliveryValues]) -> None: ...

    @model_validator(mode="after")
    def _first_wait_fits(self) -> Self:
        if self.delay > self.max_delay:
            raise ValueError(
                f"delay, {self.delay:g} s, is longer than max_delay, {self.max_delay:g} s: no message would wait so "
                "long; give a max_delay that is as long, at least"
            )
        return self

    def seconds(self, times: int) -> float:
        """Return the wait of a message that was given back so often by now, before `jitter`."""
        try:
            return min(self.delay * self.multiplier ** (times - 1), self.max_delay)
        except OverflowError:
            return self.max_delay
