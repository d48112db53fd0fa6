"""What a store should hold, as plain lists: no files, no threads, nothing to get wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.policies.destination import Destination

READY, LEASED, CLAIMED, PREPARED = "ready", "leased", "claimed", "prepared"


@dataclass(slots=True)
class Expected:
    """One message."""

    seq: int
    body: bytes
    message_id: str | None
    state: str = READY


@dataclass(slots=True)
class Model:
    """One store. Every method does at once what the store does durably."""

    window_limit: int
    queues: dict[Destination, list[Expected]] = field(default_factory=dict)
    window: dict[tuple[Destination, str], int] = field(default_factory=dict)
    last_seq: int = 0

    def send(self, messages: list[tuple[Destination, bytes, str | None]], outcomes: list[tuple[int, bool]]) -> None:
        """One batch was sent, with these outcomes: are they right?"""
        fresh: dict[tuple[Destination, str], int] = {}
        for (destination, body, message_id), (seq, duplicate) in zip(messages, outcomes, strict=True):
            key = (destination, message_id) if message_id is not None else None
            known = (fresh.get(key) or self.window.get(key)) if key is not None else None
            if known is not None:
                assert (seq, duplicate) == (known, True), f"{key} is in the window with seq {known}"
                continue
            assert not duplicate
            assert seq > self.last_seq
            self.last_seq = seq
            self.queues.setdefault(destination, []).append(Expected(seq, body, message_id))
            if key is not None:
                fresh[key] = seq
        self.window.update(fresh)
        while len(self.window) > self.window_limit:
            del self.window[next(iter(self.window))]

    def queue(self, destination: Destination) -> list[Expected]:
        return self.queues.get(destination, [])

    def first_ready(self, destination: Destination) -> Expected | None:
        return next((expected for expected in self.queue(destination) if expected.state == READY), None)

    def find(self, destination: Destination, seq: int) -> Expected:
        return next(expected for expected in self.queue(destination) if expected.seq == seq)

    def remove(self, destination: Destination, seq: int) -> None:
        self.queues[destination].remove(self.find(destination, seq))

    def purge(self, destination: Destination) -> int:
        queue = self.queue(destination)
        count = sum(expected.state == READY for expected in queue)
        queue[:] = [expected for expected in queue if expected.state != READY]
        return count

    def delete(self, destination: Destination) -> int:
        self.window = {key: seq for key, seq in self.window.items() if key[0] != destination}
        return len(self.queues.pop(destination, []))

    def restart(self) -> None:
        """Leases and claims end with the process, but for those of a prepared transaction."""
        for queue in self.queues.values():
            for expected in queue:
                if expected.state != PREPARED:
                    expected.state = READY
