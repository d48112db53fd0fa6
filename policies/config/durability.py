"""How durable a store's work is when a call returns: invariant 1, in one enum.

Whatever the policy, killing the process loses nothing that returned, and what a power loss leaves is always a prefix
of what was done: never a later operation without an earlier one.
"""

from __future__ import annotations

import enum


class Sync(enum.Enum):
    """The times at which a store forces its journal to the disk. The values are the words of the configuration file."""

    ALWAYS = "always"
    """Before the call returns (or its future resolves): it survives power loss. Callers share one sync."""

    PERIODIC = "periodic"
    """Every `sync_interval`: a power loss costs at most that plus one sync of work. Senders wait for a late sync."""

    NEVER = "never"
    """When the operating system chooses: a power loss costs whatever it had not written by then. Nobody waits for the
    disk; the background syncs once a store has been idle for a second, and when it writes the index out."""


class OnCorruption(enum.Enum):
    """The choices of a store that finds its data damaged (invariant 9). The values are the words of the configuration
    file."""

    REFUSE = "refuse"
    """The store is not opened, and nothing is changed. An open store raises for a damaged message, which stays."""

    SALVAGE = "salvage"
    """All that can be read counts; what is lost is written down in a report, with what was damaged beside it."""
