"""How long a message waits that was given back: the options of it."""

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
    """How long a message waits once it was given back."""

    delay: Annotated[float, Duration(0.001, 30 * 86_400)]
    """After it was given back for the first time, in seconds."""
    multiplier: Annotated[float, Field(strict=True, ge=1, le=1000, allow_inf_nan=False)] = 1.0
    """Each time it waits so many times as long as the time before."""
    max_delay: Annotated[float, Duration(0.001, 365 * 86_400)] = 3600.0
    """But never longer."""
    jitter: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.0
    """By up to so large a part longer or shorter, at random, so that what failed together does not come back together:
    0.1 is a tenth."""

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
        """How long it waits that was given back so often by now, before `jitter`."""
        try:
            return min(self.delay * self.multiplier ** (times - 1), self.max_delay)
        except OverflowError:
            return self.max_delay
