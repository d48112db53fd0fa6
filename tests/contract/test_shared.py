"""A store that many routers share keeps the contract of queues and topics with two routers, of which one sends what the
other receives, but for what NOT_HAD says, and for what moves the clock of this process (waiting.py, ages.py) or asks
for what it does not keep (keyed.py, large.py, nonpersistent.py, limits.py, when_full.py, marking.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from anabranch.adapters.core import Store

from ..sql.shared import SharedTables, TwoRouters, shared_tables
from .changing import ChangingContract
from .counting import CountingContract
from .crediting import CreditingContract
from .deliveries import DeliveriesContract
from .disk import PLACES, Disk
from .expiring import Clock, ExpiringContract, GoingClock, going_by
from .grouping import GroupingContract
from .leasing import LONG, Lasting, LeasingContract
from .lifecycle import LifecycleContract
from .newest import NewestContract
from .preparing import PreparingContract
from .receiving import ReceivingContract
from .removing import RemovingContract
from .sending import SendingContract
from .sending_leased import SendingLeasedContract
from .settling import SettlingContract
from .threads import ThreadsContract
from .topics import TopicsContract

sets = pytest.fixture(scope="module")(shared_tables)


NOT_HAD: Final = {
    "a shared store keeps no maps": ("test_what_is_declared_is_there",),
    "a duplicate uses up an id": ("test_sends_of_many_callers_are_stored_or_refused_each",),
    "it has no priorities, no limits and nothing that is not persistent": (
        "test_a_commit_that_fails_changes_nothing",
        "test_a_topic_by_priority",
        "test_room_for_a_lease_is_a_subscriptions_own",
        "test_what_nobody_wants_takes_no_room",
        "test_a_prepared_branch_keeps_its_bytes",
        "test_a_prepared_branch_keeps_its_room",
        "test_a_branch_needs_room_for_what_it_sends_beyond_what_it_acks",
        "test_browse_after_a_seq_says_nothing_here",
        "test_it_counts_among_the_leases",
        "test_of_those_that_are_not_persistent",
        "test_receive_many_up_to_the_leases_that_there_may_be",
        "test_reserve_is_all_or_nothing",
        "test_room_that_is_reserved_and_let_go",
        "test_delete_of_many_that_are_persistent_or_not",
        "test_one_that_is_not_persistent",
        "test_groups_of_transient_messages",
        "test_expired_ones_by_priority",
        "test_once_acked_it_is_received_by_nobody_though_the_clock_goes_back",
        "test_one_that_came_back_before_it_was_looked_up_stops_too",
        "test_groups_have_the_order_of_their_queue",
        "test_it_comes_back_at_its_old_place",
        "test_the_newest_of_the_most_urgent",
        "test_leased_to_its_sender_by_priority",
        "test_leased_to_its_sender_or_not_stored_for_want_of_leases",
        "test_leased_to_its_sender_where_there_is_room",
    ),
    "of one whose lease ran out it says less, and its clock is not that of core's leases": (
        "test_a_clock_before_1970",
        "test_a_store_that_is_closed_forgets_them",
        "test_extended_it_goes_on",
        "test_the_stores_own_time",
        "test_who_comes_too_late",
    ),
    "what is taken for all subscriptions of a topic is none's any more, though it is given back": (
        "test_of_a_topic_given_back_for_all",
        "test_of_a_topic_it_is_found_once_nobody_holds_it",
    ),
    "a message that is sent to come later holds up those of its group behind it": (
        "test_groups_what_is_sent_to_come_later_is_passed",
    ),
    "the newest message is none that another of its group comes before": (
        "test_the_newest_of_a_group_leaves_the_others_once_each",
        "test_the_newest_of_a_group_one_at_a_time",
    ),
    "it writes to no disk of ours, and has no writer that could fail": (
        "test_an_ack_that_fails_later",
        "test_on_a_full_disk_they_are_handed_out_uncounted",
        "test_what_cannot_be_counted_is_not_handed_out",
    ),
    "a router that ends gives its messages back, and that counts": ("test_a_process_that_ends_counts_nothing",),
    "ids beyond the window are forgotten now and then": (
        "test_the_window_forgets_the_oldest",
        "test_the_latest_are_known_later",
    ),
    "it may be in use elsewhere, and is not removed": ("test_one_that_is_to_be_removed_retires_empty",),
    "a router does not know what another one's transaction has claimed: that is refused when it commits": (
        "test_a_claim_refuses_to_delete_a_topic",
        "test_a_claim_refuses_to_unsubscribe",
        "test_claimed_messages_refuse_a_delete",
    ),
    "a router does not know what was settled by a token, or deleted, in another one before it comes to settle it": (
        "test_one_that_was_settled_is_nobodys_loss",
        "test_what_was_settled_inside_is_left_as_it_is",
    ),
}
"""Why it does not keep some of the contract, and what."""


class MovedClock(GoingClock):
    """That of this machine and of the database's."""

    def __init__(self, sets: SharedTables) -> None:
        self._sets, self._offset_ms = sets, 0
        super().__init__()

    @property
    def offset_ms(self) -> int:
        return self._offset_ms

    @offset_ms.setter
    def offset_ms(self, ms: int) -> None:
        self._offset_ms = ms
        self._sets.set_clock(ms)


class MovedLeases(Lasting):
    """The clock of the database, by which leases run out."""

    def __init__(self, patches: pytest.MonkeyPatch, sets: SharedTables) -> None:
        super().__init__(patches)
        self._sets = sets

    def go_on(self, store: Store, seconds: float = 2 * LONG) -> None:
        self.ahead += seconds
        self._sets.set_clock(round(1000 * self.ahead))
        store.take_undelivered(0)


class TestShared(
    SendingContract, ReceivingContract, SettlingContract, DeliveriesContract, CountingContract, LeasingContract,
    RemovingContract, PreparingContract, LifecycleContract, ThreadsContract, ExpiringContract,
    GroupingContract, TopicsContract, ChangingContract, CreditingContract, NewestContract,
    SendingLeasedContract,
):  # fmt: skip
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "place" in metafunc.fixturenames:
            # What it has is in the database, wherever one looks from; all places are looked from in a campaign.
            campaign = pytest.mark.campaign, pytest.mark.weight(0)
            metafunc.parametrize("place", [p if p == "here" else pytest.param(p, marks=campaign) for p in PLACES])

    @pytest.fixture
    def disk(self, tmp_path: Path, sets: SharedTables) -> Iterator[Disk]:
        with TwoRouters(tmp_path, sets) as disk:
            yield disk

    @pytest.fixture
    def store(self, disk: Disk) -> Store:
        return disk.create()

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch, sets: SharedTables) -> Iterator[Clock]:
        """That of the machines: one that stands still differs from the database's, more and more."""
        yield from going_by(MovedClock(sets), monkeypatch)
        sets.set_clock(0)

    @pytest.fixture
    def lasting(self, monkeypatch: pytest.MonkeyPatch, sets: SharedTables) -> Iterator[Lasting]:
        yield MovedLeases(monkeypatch, sets)
        sets.set_clock(0)


for _name in itertools.chain.from_iterable(NOT_HAD.values()):
    setattr(TestShared, _name, None)
