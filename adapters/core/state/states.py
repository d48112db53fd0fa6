"""The catalog of a store: its destinations and subscriptions, known without asking the backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

from ....policies.names.destination import Destination
from ..store_types import Subscription
from .leases import Channel, DestinationState, SubscriptionState


class Catalog:
    """All destinations and subscriptions of one store. Any thread may ask; `lock` guards what is added."""

    def __init__(self) -> None:
        self.lock: Final = threading.RLock()
        self.destinations: dict[Destination, DestinationState] = {}
        """Destinations, those too from which somebody receives and to which nothing was sent yet."""
        self.by_number: dict[int, DestinationState] = {}
        """What comes is at its end, also what was there before."""
        self.added: int = 0
        """How many have come to `by_number`, or have come again."""
        self.subscriptions: dict[int, SubscriptionState] = {}
        """By number."""
        self.leaving: dict[Channel, None] = {}
        """Channels of removed destinations and of subscriptions that have ended, whose messages are still to go, a page
        at a time (purging.py). Under the store's lock."""
        self.last_number: int = 0
        """The highest that a destination or a subscription ever had."""
        self.messages: int = 0
        """Messages of all destinations together."""
        self.bytes: int = 0
        """Their bytes."""

    def held(self) -> list[DestinationState]:
        """Return all destinations of which there may be messages, also removed ones. With the store's lock held."""
        removed = [channel.state for channel in self.leaving if channel.state.removed]
        return list(dict.fromkeys([*self.by_number.values(), *removed]))

    def left(self, state: DestinationState, number: int) -> None:
        """Forget a removed destination, or (by number) a subscription that has ended, of which nothing is left. With
        the store's lock held."""
        for channel in [
            channel for channel in self.leaving if channel.state is state and number in (0, channel.number)
        ]:
            self.leaving.pop(channel, None)

    def next_number(self) -> int:
        """Return a number that nothing in this store ever had."""
        with self.lock:
            self.last_number += 1
            return self.last_number

    def state(self, destination: Destination) -> DestinationState:
        """Return a destination's state, made if it is new here. It is written down with its first message or
        subscription."""
        state = self.destinations.get(destination)
        if state is None:
            with self.lock:
                state = self.destinations.get(destination)
                if state is None:
                    state = DestinationState(self.next_number(), destination)
                    self.add(state)
        return state

    def add(self, state: DestinationState) -> None:
        """Add a destination that is there. Idempotent."""
        with self.lock:  # it may be about to be dropped
            self.added += state.number not in self.by_number
            self.by_number[state.number] = state
            self.destinations[state.destination] = state

    def current(self, state: DestinationState) -> DestinationState:
        """Return the state of the same destination that is in the catalog: this one, if it was dropped and is the only
        one."""
        with self.lock:
            latest = self.destinations.get(state.destination)
            if latest is None and state.removed:
                return self.state(state.destination)
            if latest is None:
                self.add(state)
                return state
            return latest

    def count(self, state: DestinationState, messages: int, size: int) -> None:
        """Count so many messages of a destination, and bytes of them, more than before, or less. With the store's lock
        held. Interrupted half way it leaves what `recount` mends."""
        state.count += messages
        state.bytes += size
        self.messages += messages
        self.bytes += size

    def recount(self) -> None:
        """Sum up what each destination holds."""
        states = list(self.by_number.values())
        self.messages, self.bytes = sum(state.count for state in states), sum(state.bytes for state in states)

    def remove(self, state: DestinationState) -> None:
        """Remove a destination: its name is free. Until this is applied it is known by its number. Idempotent."""
        with self.lock:
            state.declared = False
            state.removed = True
            if self.destinations.get(state.destination) is state:
                del self.destinations[state.destination]

    def drop(self, state: DestinationState) -> None:
        """Drop a destination that is no more, unless somebody waits for its messages. Idempotent."""
        with self.lock:
            if state.declared:
                return
            channels = (state.channel, *state.channels())
            if state.removed:  # who waits there goes on at what has its name, and the store stays open for them
                is_used = any(channel.receivers or channel.listeners for channel in channels)
            else:
                is_used = state.volatile is not None or any(channel.is_used for channel in channels)
            if not is_used:
                self.forget(state)

    def forget(self, state: DestinationState) -> None:
        """Forget a destination that is no more. Idempotent."""
        with self.lock:
            if self.destinations.get(state.destination) is state:
                del self.destinations[state.destination]
            self.by_number.pop(state.number, None)

    def declared(self) -> Iterator[DestinationState]:
        """Return the destinations that the store says it has, also empty ones."""
        states = list(self.destinations.values())
        return (state for state in states if state.declared or state.count or state.volatile is not None)

    def load(self, number: int, destination: Destination) -> DestinationState:
        """Load, at open, a destination that the backend holds."""
        state = DestinationState(number, destination)
        state.declared = True
        self.add(state)
        self.last_number = max(self.last_number, number)
        return state

    def load_subscription(
        self, number: int, topic: DestinationState, subscription: Subscription, start: int
    ) -> SubscriptionState:
        """Load, at open, a subscription that the backend holds."""
        subscriber = SubscriptionState(number, topic, subscription, start)
        topic.join(subscriber)
        self.subscriptions[number] = subscriber
        self.last_number = max(self.last_number, number)
        return subscriber

    def channels(self) -> Iterator[Channel]:
        """Yield all channels that messages are received from."""
        for state in list(self.by_number.values()):
            yield state.channel
            for subscriber in state.subscriptions.values():
                yield subscriber.channel
