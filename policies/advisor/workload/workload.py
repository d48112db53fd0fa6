"""A workload described in YAML: who sends what when, and when it is acked. `generator` makes a trace of it.

    name: shop
    seed: 7                                  # same seed, same trace
    duration: 24h
    start: 2026-01-05T00:00:00Z              # optional
    destinations:
      - name: queue://orders.custom
        arrival: {burst: {every: 8h, count: 600, spacing: 500ms, offset: 0s}}
        size: {min: 800, max: 3000}          # of the body, in bytes; or one number, or {mean: 1KiB}
        consumer: {lag: {min: 8m, max: 7h}}  # from send to ack; or one duration, or {mean: 5m}
      - name: topic://prices.eu
        subscriptions: 3                     # each acks for itself
        arrival: {diurnal: {mean: 2/s, amplitude: 0.8, peak: 14h}}
        size: 180
        consumer:
          lag: 1s
          batch: 10m                         # acks wait for the next full 10 minutes
          offline: [{from: 2h, to: 6h}]      # since the start; `every: 24h` repeats it
          never: 0.001                       # this share is never acked
    transactions:
      - name: order                          # one send to each, atomically
        sends: [queue://orders.standard, queue://audit]
        arrival: {poisson: 225/h}

Arrivals: `rate` (evenly spaced), `poisson`, `diurnal` (Poisson whose rate follows the time of day) and `burst` (a
number of messages, spaced, every so often). A rate is a number a second or a count by a time: `225/h`, `5400/24h`. A
destination without an arrival is sent to in transactions only.
"""

from __future__ import annotations

import datetime
import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ...config import yaml_lines as config_yaml
from ...config.problems import describe_value
from ...errors import ConfigError, Problem
from ...names.destination import Destination, Kind
from ...outputs import local_path
from ...units import parse_duration, parse_size
from ..trace.events import SIZE_BYTES_MAX


def _rate(value: object) -> float:
    """Read the events a second from 2, `2/s` or `5400/24h`."""
    if isinstance(value, str) and "/" in value:
        count, _, time = value.partition("/")
        seconds = parse_duration(time if time.strip()[:1].isdigit() else "1" + time.strip())
        with suppress(ValueError, ZeroDivisionError):
            if math.isfinite(rate := float(count) / seconds):
                return rate
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError("expected a rate: a number a second, or a count by a time such as 2/s, 225/h or 5400/24h")


def _size(value: object) -> int:
    size = parse_size(value)
    if size > SIZE_BYTES_MAX:
        raise ValueError(f"expected a size of {SIZE_BYTES_MAX} bytes (1 TiB) at most")
    return size


def _destination(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a destination such as queue://orders or topic://prices")
    return str(Destination.parse(value))


Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Name = Annotated[str, BeforeValidator(_destination)]


class _Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Spread(_Model):
    """A random amount: uniform from `min` to `max`, or exponential with a `mean`. Seconds or bytes."""

    min: float | None = None
    max: float | None = None
    mean: float | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Spread:
        uniform = self.min is not None and self.max is not None and self.mean is None
        exponential = self.mean is not None and self.min is None and self.max is None
        if not uniform and not exponential:
            raise ValueError("give min and max, or mean alone")
        if uniform and (self.min or 0.0) > (self.max or 0.0):
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


def _spread(parse: Any) -> Any:
    def part(key: str, value: object) -> object:
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}; found {describe_value(value)}") from None

    def convert(value: object) -> object:
        if isinstance(value, dict):
            return {key: part(key, item) for key, item in value.items()}
        if isinstance(value, Spread):
            return value
        amount = parse(value)
        return {"min": amount, "max": amount}

    return convert


class Burst(_Model):
    """`count` messages, `spacing` apart, every `every`, the first `offset` after the start."""

    every: Annotated[Duration, Field(gt=0)]
    count: Annotated[int, Field(gt=0)]
    spacing: Duration = 0.0
    offset: Duration = 0.0

    @model_validator(mode="after")
    def _fits(self) -> Burst:
        if self.spacing * self.count > self.every:
            raise ValueError(f"{self.count} messages {self.spacing} s apart do not fit into {self.every} s")
        return self


class Diurnal(_Model):
    """Poisson with a rate of mean * (1 + amplitude * cos), highest at `peak` after midnight."""

    mean: Rate
    amplitude: Annotated[float, Field(ge=0, le=1)] = 0.8
    peak: Duration = 14 * 3600.0


class Arrival(_Model):
    """The times when messages are sent: exactly one of the kinds."""

    rate: Rate | None = None
    poisson: Rate | None = None
    burst: Burst | None = None
    diurnal: Diurnal | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Arrival:
        given = [kind for kind in (self.rate, self.poisson, self.burst, self.diurnal) if kind is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of rate, poisson, burst and diurnal")
        return self

    @property
    def per_second(self) -> float:
        """Return the mean rate."""
        if self.burst is not None:
            return self.burst.count / self.burst.every
        return self.rate or self.poisson or (self.diurnal.mean if self.diurnal else 0.0)


class Offline(_Model):
    """A time without consumer: what would be acked in it is acked at its end."""

    from_: Duration = Field(alias="from")
    to: Duration
    every: Annotated[Duration, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _forwards(self) -> Offline:
        if self.to <= self.from_:
            raise ValueError("`to` must be later than `from`")
        if self.every is not None and self.to - self.from_ >= self.every:
            raise ValueError("`every` must be longer than from `from` to `to`")
        return self


class Consumer(_Model):
    """The times when messages are acked."""

    lag: Annotated[Spread, BeforeValidator(_spread(parse_duration))] = Spread(min=1.0, max=1.0)
    batch: Annotated[Duration, Field(gt=0)] | None = None
    offline: tuple[Offline, ...] = ()
    never: Annotated[float, Field(ge=0, le=1)] = 0.0


class DestinationLoad(_Model):
    """One destination."""

    name: Name
    arrival: Arrival | None = None
    size: Annotated[Spread, BeforeValidator(_spread(_size))]
    consumer: Consumer = Consumer()
    subscriptions: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _of_a_topic(self) -> DestinationLoad:
        if self.subscriptions > 1 and Destination.parse(self.name).kind is Kind.QUEUE:
            raise ValueError("only a topic has several subscriptions")
        return self


class TransactionLoad(_Model):
    """One send to each of several destinations, atomically."""

    name: Annotated[str, Field(min_length=1)]
    sends: Annotated[tuple[Name, ...], Field(min_length=1)]
    arrival: Arrival


class Workload(_Model):
    """The whole description."""

    name: str = "workload"
    seed: Annotated[int, Field(ge=0)] = 0
    duration: Annotated[Duration, Field(gt=0)]
    start: datetime.datetime = datetime.datetime(2026, 1, 5, tzinfo=datetime.UTC)
    destinations: Annotated[tuple[DestinationLoad, ...], Field(min_length=1)]
    transactions: tuple[TransactionLoad, ...] = ()

    @model_validator(mode="after")
    def _agree(self) -> Workload:
        names = [destination.name for destination in self.destinations]
        for name in sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"destination {name} is described twice")
        for transaction in self.transactions:
            for name in transaction.sends:
                if name not in names:
                    raise ValueError(f"transaction {transaction.name} sends to {name}, which is not described")
        used = {name for transaction in self.transactions for name in transaction.sends}
        for destination in self.destinations:
            if destination.arrival is None and destination.name not in used:
                raise ValueError(f"destination {destination.name} has no arrival and is in no transaction")
        return self

    @property
    def start_seconds(self) -> float:
        """Return the start, in seconds since the epoch; a time without zone is UTC."""
        start = self.start if self.start.tzinfo else self.start.replace(tzinfo=datetime.UTC)
        return start.timestamp()

    @property
    def operations(self) -> float:
        """Estimate how many sends and acks the workload describes."""
        own = {load.name: 1 + load.subscriptions for load in self.destinations}
        rate = sum(load.arrival.per_second * own[load.name] for load in self.destinations if load.arrival is not None)
        rate += sum(t.arrival.per_second * own[name] for t in self.transactions for name in t.sends)
        return rate * self.duration

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read a workload from a YAML file. Raises ConfigError with all that is wrong in it."""
        path = local_path(path, "the workload")
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"the workload cannot be read: {error.strerror}"], str(path)) from error
        except UnicodeDecodeError as error:
            raise ConfigError(["not UTF-8; save the file as UTF-8"], str(path)) from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str | None = None) -> Workload:
        """Read a workload from YAML text. Raises ConfigError."""
        document = config_yaml.parse(text)
        if document.problems:
            raise ConfigError(document.problems, source)
        try:
            return cls.model_validate(document.data)
        except ValidationError as error:
            raise ConfigError(_problems(error, document), source) from None


def _problems(error: ValidationError, document: config_yaml.Document) -> list[Problem]:
    """Tell Pydantic's findings: line, key, what is wrong with which value."""
    found = error.errors()
    problems = []
    for details in found:
        path = details["loc"]
        below = any(len(other["loc"]) > len(path) and other["loc"][: len(path)] == path for other in found)
        if details["type"] == "too_short" and below:
            continue  # what is wrong is in its items, which pydantic then takes for missing
        place = ".".join(str(part) for part in path)
        message = str(details["msg"]).removeprefix("Value error, ")
        value = details["input"]
        if details["type"] != "missing" and not isinstance(value, dict | list | tuple):
            message = f"{message}; found {describe_value(value)}"
        problems.append(Problem(f"{place}: {message}" if place else message, document.line(path)))
    return problems
