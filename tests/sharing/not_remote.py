"""What stores promise and a client of a shared directory does not have, test by test, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..contract.contract import StoreContract
from ..contract.marking import MarkingContract

CLAIMS = (
    "a client's transaction is shipped whole when it commits: until then its owner knows what it is to ack as leased, "
    "so that it can be deleted"
)
CLAIMED = "a client that claims a message does not wait until its owner has stopped the lease's time"
MARKS = "a client's commit is remembered by the number of its request, which the client does not choose"
REFUSED = "a commit that the owner refuses is rolled back there, as by any router: its acks are free again"
PAGES = "a client looks at a page at a time, so that it sees what was there when it asked for the page"
IDS = "the library's own ids are made by the owner, of messages that come without"
AT_ONCE = "what the owner alone knows is wrong is raised by the Future, not by the call that returns it"
INSIDE = "it puts something of its own into the store's objects, which are in another process"
RETIRED = "a store that was closed for being idle is opened again by the owner for whoever asks"
BODIES = "what a client sends is in a file of the owner's without a name until its message is sent, in no store"
ROOM = "whether a caller may wait for room is known to its thread alone, which is the owner's"
FORKED = "a forked child is a client of its own, and goes on"
CLOCK = "it sets the clock of its own process"
MOVES = "a shared directory is repartitioned by its owner, from a file that it can read"
DISK = "it lets the disk fail under its own process"
OPEN = "the open transactions of a client are counted by itself, and those that are prepared by the owner"
CLOSED = "a transaction that has voted and was rolled back since is told of in the words of its owner"
LATER = "what an interrupted call of a client had in hand is given back in the background, a moment later"
SYNCS = "it counts syncs, of which an owner does some by itself once a store has been idle for a second"
OWNERS = "it is the owner's own call, by which it writes what several clients send"
CALLS = "it is a call of the owner's own, for who comes again and for who looks at many queues"
WALL = "who waits is a listener of the owner's, which does not see that the wall clock was put back"

OF_STORES: Final[Mapping[str, str]] = {
    "test_a_body_is_found_without_its_note": INSIDE,
    "test_a_claim_refuses_to_delete_a_topic": CLAIMS,
    "test_a_claim_refuses_to_unsubscribe": CLAIMS,
    "test_a_clock_before_1970": REFUSED,
    "test_a_clock_that_goes_back_while_somebody_waits": WALL,
    "test_a_commit_after_which_the_store_holds_no_more_is_not_refused": REFUSED,
    "test_a_commit_that_fails_changes_nothing": REFUSED,
    "test_a_commit_that_goes_beyond_is_refused_whole": REFUSED,
    "test_a_forked_child_is_refused": FORKED,
    "test_a_message_too_large_is_refused": AT_ONCE,
    "test_a_refused_commit_leaves_its_claims": REFUSED,
    "test_a_store_in_which_a_body_waits_for_its_message_is_not_idle": BODIES,
    "test_a_store_that_fails_keeps_what_is_whole": INSIDE,
    "test_a_transaction_holds_it_without_an_end": CLAIMED,
    "test_an_ack_that_fails_later": INSIDE,
    "test_an_id_of_the_librarys_own_is_shown_to_nobody": IDS,
    "test_browse_counts_what_it_gives": PAGES,
    "test_browse_holds_no_lock_between_two": PAGES,
    "test_browse_leaves_out_what_is_acked_meanwhile": PAGES,
    "test_claimed_messages_refuse_a_delete": CLAIMS,
    "test_groups_a_lease_taken_up_again_holds_it": CALLS,
    "test_groups_a_watch_hears_of_the_next_one": CALLS,
    "test_in_place_of_as_many_messages_bodies_alone_count": REFUSED,
    "test_nothing_is_read_of_a_closed_store": RETIRED,
    "test_on_a_full_disk_they_are_handed_out_uncounted": INSIDE,
    "test_others_write_while_the_keys_are_walked": PAGES,
    "test_purge_and_delete": CLAIMS,
    "test_retire": RETIRED,
    "test_sends_of_many_callers_are_stored_or_refused_each": OWNERS,
    "test_the_ack_of_one_subscription_of_several_makes_no_room": REFUSED,
    "test_what_a_crash_leaves_half_written_is_removed": INSIDE,
    "test_what_a_watch_finds_again_is_counted": CALLS,
    "test_what_can_never_fit_is_refused_at_once": ROOM,
    "test_what_cannot_be_counted_is_not_handed_out": INSIDE,
    "test_what_is_not_sent_is_gone": BODIES,
    "test_what_failed_leaves_its_room_though_its_error_is_kept": AT_ONCE,
    "test_what_was_leased_again_and_acked_is_not_received": CALLS,
    "test_who_still_holds_it_when_its_store_is_closed_keeps_nothing": INSIDE,
    "test_who_waits_gives_up_in_time": REFUSED,
    **{name: MARKS for name in vars(MarkingContract) if name.startswith("test")},
}
"""Tests of tests/contract."""

OF_ROUTERS: Final[Mapping[str, Mapping[str, str]]] = {
    "messages.test_codecs": {},
    "messages.test_consuming": {},
    "messages.test_dead_letters": {
        "test_a_clock_before_1970_refuses_what_would_have_no_time": CLOCK,
        "test_what_is_deleted_for_want_of_a_dead_letter_queue_is_told": INSIDE,
        "test_whatever_fails_there_is_a_next_time": INSIDE,
    },
    "messages.test_events": {
        "test_of_a_topic": IDS,
        "test_what_becomes_of_messages": IDS,
        "test_what_becomes_of_stores": INSIDE,
        "test_what_is_dropped": IDS,
    },
    "messages.test_groups": {
        "test_groups_go_along_with_their_queue": MOVES,
        "test_whoever_is_killed_a_group_comes_in_order_one_by_one": INSIDE,
    },
    "messages.test_handles": {
        "test_equal_ones_keep_an_idle_queue_each": INSIDE,
    },
    "messages.test_hosting": {
        "test_a_queue_that_is_deleted_keeps_its_listeners": INSIDE,
        "test_a_send_that_must_not_wait_opens_no_store": INSIDE,
        "test_a_token_opens_no_store": INSIDE,
        "test_one_message_for_200_who_wait_is_received_once": INSIDE,
        "test_what_is_deferred_when_the_router_closes_says_so": INSIDE,
    },
    "messages.test_large": {
        "test_a_composite_is_read_once": INSIDE,
        "test_a_dead_letter_goes_and_comes_back_with_its_body": INSIDE,
        "test_a_destination_moves_with_its_bodies_while_it_is_used": MOVES,
        "test_a_destination_moves_with_its_bodies_while_nobody_is_there": MOVES,
        "test_a_savepoint_lets_go_of_what_came_after": INSIDE,
        "test_a_transaction_goes_on_though_its_destination_has_moved": MOVES,
        "test_a_transaction_over_three_stores_sends_and_acks": INSIDE,
        "test_a_transaction_that_is_rolled_back_leaves_nothing": INSIDE,
        "test_what_a_transaction_refuses_leaves_nothing": INSIDE,
        "test_what_expires_goes_to_the_dead_letters": INSIDE,
    },
    "messages.test_limits": {
        "test_a_disk_that_is_nearly_full": DISK,
        "test_a_transaction_over_two_stores_waits_for_room_in_both": INSIDE,
        "test_closing_the_router_wakes_who_waits": INSIDE,
        "test_transactions_that_wait_for_each_others_stores_get_through_once_one_does": INSIDE,
        "test_two_stores_on_one_disk_do_not_take_the_same_space": INSIDE,
        "test_who_waits_goes_on_in_the_store_that_its_destination_has_moved_to": INSIDE,
    },
    "messages.test_maps": {
        "test_a_map_moves_with_all_that_it_has": MOVES,
        "test_keys_are_walked_while_their_store_closes_for_being_idle": INSIDE,
    },
    "messages.test_listening_to_many": {},
    "messages.test_pattern_consumers": {
        "test_a_store_that_cannot_be_opened_is_tried_again": INSIDE,
        "test_a_store_that_fails_holds_up_no_other": INSIDE,
        "test_ctrl_c_anywhere_loses_no_queue": LATER,
        "test_no_more_patterns_are_kept_than_a_few": INSIDE,
        "test_stores_are_opened_one_after_the_other_and_may_be_closed": INSIDE,
        "test_what_is_left_in_a_store_that_was_closed_is_found": INSIDE,
        "test_what_waits_for_its_time_comes_then": INSIDE,
        "test_while_queues_move": MOVES,
    },
    "messages.test_requeue": {
        "test_a_dead_letter_that_was_sent_on_comes_from_where_it_fails_next": IDS,
        "test_a_sender_may_use_the_names_of_the_labels": IDS,
        "test_one_as_large_as_may_be_goes_back_all_the_same": IDS,
        "test_requeue_goes_on_where_a_full_store_has_stopped_it": INSIDE,
        "test_requeue_of_a_queue_leaves_what_comes_back_meanwhile": INSIDE,
        "test_so_many_messages_of_a_topic_are_remembered": INSIDE,
        "test_what_a_subscription_gives_up_meanwhile_is_no_copy": INSIDE,
    },
    "messages.test_requeue_many": {},
    "messages.test_settled_twice": {
        "test_so_many_tokens_are_remembered": INSIDE,
    },
    "messages.test_topics": {},
    "messages.test_transient": {
        "test_a_commit_that_unsubscribes_succeeds_whoever_has_claimed_a_message_of_no_importance": CLAIMS,
        "test_a_memory_store_forgets_transactions_that_nobody_asks_about": INSIDE,
        "test_a_store_in_which_nothing_persistent_is_done_needs_no_second_phase": SYNCS,
        "test_a_transaction_over_them_is_seen_as_one": SYNCS,
        "test_the_durable_store_is_closed_for_being_idle_before_they_are_committed": INSIDE,
        "test_they_keep_their_place_among_the_others_and_go_with_the_process": SYNCS,
    },
    "messages.test_waiting": {
        "test_a_queue_that_moves_keeps_what_waits": MOVES,
        "test_a_transaction_that_rolls_back_waits": CLOCK,
        "test_all_ways_to_send": CLOCK,
    },
    "transactions.test_data_manager": {
        "test_of_a_store_whose_commit_is_carried_out_later": DISK,
        "test_of_the_decision_log": DISK,
        "test_of_the_decision_log_that_had_failed_before": DISK,
        "test_of_the_decision_log_that_had_failed_before_an_external_one": DISK,
    },
    "transactions.test_kinds": {
        "test_killed_at_any_step_it_is_all_or_nothing": INSIDE,
        "test_prepared_for_a_manager_it_is_committed_after_a_restart": INSIDE,
        "test_prepared_for_a_manager_it_is_rolled_back_after_a_restart": INSIDE,
    },
    "transactions.test_outcomes": {
        "test_a_failed_store_does_not_hold_up_what_others_hear": DISK,
        "test_a_participant_fails_in_prepare": DISK,
        "test_a_participant_fails_with_the_outcome": DISK,
        "test_an_outcome_by_hand_is_recorded": DISK,
        "test_it_is_held_until_told": INSIDE,
        "test_it_is_kept_until_all_stores_have_it": DISK,
        "test_one_that_is_in_use": INSIDE,
        "test_opposite_outcomes_by_8_threads": INSIDE,
        "test_said_again_it_changes_nothing": INSIDE,
        "test_the_log_fails_in_prepare": DISK,
        "test_the_log_fails_with_the_outcome": DISK,
    },
    "transactions.test_overlaps": {
        "test_an_outcome_waits_for_no_store_of_others": INSIDE,
        "test_and_opened_again_between_prepare_and_decision": INSIDE,
        "test_by_threads": INSIDE,
        "test_nobody_is_rolled_back_before_it_is_read": DISK,
        "test_one_that_commits": DISK,
        "test_one_that_sends_while_its_thread_begins_a_transaction": INSIDE,
        "test_what_is_being_rolled_back_is_not_committed_by_hand": DISK,
        "test_what_is_held_stays_held": INSIDE,
        "test_what_was_looked_up_before_counts_for_nothing": INSIDE,
        "test_who_was_about_to_begin_makes_no_log": INSIDE,
    },
    "transactions.test_transactions": {
        "test_a_forked_child_ends_nothing": FORKED,
        "test_a_message_received_before_its_store_was_reopened": CLAIMS,
        "test_a_store_that_is_reopened_meanwhile": CLAIMS,
        "test_acked_messages_belong_to_it": CLAIMS,
        "test_an_interrupted_rollback_to_a_savepoint_ends_the_transaction": INSIDE,
        "test_open_ones_prepared_ones_included": OPEN,
        "test_two_latencies_whatever_the_number_of_stores": SYNCS,
    },
    "transactions.test_vote": {
        "test_closing_the_router_rolls_it_back": CLOSED,
    },
}
"""Modules of tests/messages and tests/transactions, all of whose tests run so but these."""


def leave_out(contract: type, names: Mapping[str, str]) -> None:
    """Take these tests out of a class. Raises AssertionError for one that no class has."""
    for name in names:
        assert hasattr(StoreContract, name), f"there is no {name}"
        setattr(contract, name, None)
