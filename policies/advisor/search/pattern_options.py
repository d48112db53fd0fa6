"""The advisor's options that are written in patterns: durability by pattern, and groups that stay together.

parse_durability(["queue://orders.>=always", "telemetry.>=never"])
parse_pins(["orders.>,audit"])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...config.durability import Sync
from ...errors import ConfigError, DestinationError
from ...names.pattern import Pattern
from ...names.routes import RouteTable

_POLICIES = ", ".join(sync.value for sync in Sync)


def parse_durability(texts: Sequence[str]) -> dict[str, Sync]:
    """Read the policy by pattern, from `PATTERN=POLICY` each. Raises ConfigError with everything that is wrong."""
    found: dict[str, Sync] = {}
    problems = []
    for text in texts:
        # The last one: a name may hold an equals sign, a policy does not.
        pattern, equals, policy = text.rpartition("=")
        if not equals:
            problems.append(f"--durability {text!r} has no =; write PATTERN=POLICY, such as 'orders.>=always'")
            continue
        try:
            sync = Sync(policy.strip())
        except ValueError:
            problems.append(f"--durability {text!r}: {policy!r} is no policy; it must be one of {_POLICIES}")
            continue
        if pattern in found:
            problems.append(f"--durability gives pattern {pattern!r} twice; keep one of them")
        found[pattern] = sync
        problems += _wrong(pattern, f"--durability {text!r}")
    if problems:
        raise ConfigError(problems)
    return found


def parse_pins(texts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Read groups of patterns, from `PATTERN,PATTERN` each. A comma in a pattern is written `[,]`. Raises
    ConfigError."""
    groups = []
    problems = []
    for text in texts:
        group = tuple(part.strip().replace("\0", "[,]") for part in text.replace("[,]", "\0").split(","))
        problems += [problem for pattern in group for problem in _wrong(pattern, f"--pin {text!r}")]
        groups.append(group)
    if problems:
        raise ConfigError(problems)
    return tuple(groups)


def wrong_patterns(durability: Mapping[str, Any], pinned: Iterable[Iterable[str]]) -> list[str]:
    """Find what is wrong with the patterns and policies of these options."""
    problems = []
    for pattern, sync in durability.items():
        problems += _wrong(pattern, "durability (--durability)")
        if not isinstance(sync, Sync):
            problems.append(f"durability (--durability) of {pattern!r} is {sync!r}; it must be one of Sync's values")
    for group in pinned:
        problems += [problem for pattern in group for problem in _wrong(pattern, "pinned (--pin)")]
    if not problems:
        try:
            RouteTable(list(durability.items()))
        except ConfigError as error:
            problems += [f"durability (--durability): {problem.message}" for problem in error.problems]
    return problems


def _wrong(pattern: str, where: str) -> list[str]:
    try:
        Pattern.parse(pattern)
    except DestinationError as error:
        return [f"{where}: {error}"]
    return []
