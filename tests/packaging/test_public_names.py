"""The names that users can rely on: one that comes, goes or changes is seen here, and told in CHANGELOG.md."""

from __future__ import annotations

import builtins
import enum
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from pydantic import BaseModel

import anabranch

BASES = (BaseModel, BaseException, dict, tuple, enum.Enum, object)
"""What names of theirs say nothing of ours."""

NAMES = {
    "Codec": "content_type decode encode",
    "Config": "bindings directory_of file routes",
    "Connection": (
        "Error OperationalError ProgrammingError ack close commit put remove rollback send tpc_begin "
        "tpc_commit tpc_prepare tpc_recover tpc_rollback xid"
    ),
    "Counts": "delayed expired leased oldest_ready_seconds ready",
    "DeadLetter": "deliveries error_text error_type message message_id reason requeued source subscription",
    "Destination": "kind map name parse parse_composite queue restored topic",
    "Durations": "BOUNDS counts quantile seconds",
    "Event": "at_ms store",
    "EventListener": "close dropped",
    "Health": "decision_log for_operator in_doubt ok stores",
    "Heuristic": "outcome transaction xid",
    "InDoubt": "acks outcome reason sends stores transaction xid",
    "Kind": "MAP QUEUE TOPIC scheme",
    "KindOptions": "journal kind memory options sql",
    "LargeBody": "open size",
    "Listener": "add_credit close withdraw_credit",
    "Map": (
        "compare_and_set compare_and_set_nowait count declare delete destination get get_many get_many_nowait "
        "get_nowait increment increment_nowait items pop pop_nowait put put_if_absent put_if_absent_nowait put_nowait "
        "touch touch_nowait wait"
    ),
    "Match": "pattern reason target",
    "Message": (
        "ack ack_nowait body content deliveries destination expires_at_ms extend group headers is_large leased "
        "message_id open persistent priority raw_body read redelivered reject reject_nowait release "
        "release_nowait seq size subscription timestamp_ms token"
    ),
    "MessageDeadLettered": "at_ms dead_letter_queue deliveries destination message_id reason seq store",
    "MessageDropped": "at_ms deliveries destination message_id reason seq store",
    "MessageEvent": "at_ms destination message_id seq store",
    "MessageExpired": "at_ms destination message_id seq store",
    "MissingExtraError": "msg name path",
    "Move": "bytes destination messages source subscriptions target",
    "OnCorruption": "REFUSE SALVAGE",
    "Outgoing": "body deliver_at_ms expires_at_ms group headers message_id persistent priority requeued",
    "Pattern": "exact kinds matches parse text",
    "Problem": "line message of_variable",
    "Queue": (
        "browse consume counts dead_letters declare delete depth destination find listen listen_nowait purge receive "
        "receive_many send send_leased send_many send_nowait wait_empty"
    ),
    "Readable": "read",
    "Receipt": "destination dropped duplicate seq",
    "Redelivery": "seconds",
    "Repartitioned": "moves removed",
    "RouteTable": "matches nearest route",
    "Router": (
        "ack ack_nowait close commit compact config connection consume delete destinations exists forget health "
        "heuristics in_doubt join listen listen_nowait map on_event open queue receive reclaim recover reject release "
        "release_nowait reopen reopen_decisions repartition requeue resolve rollback send serve settle settle_nowait "
        "start_usage_log stats stop_usage_log subscriptions sweep topic transaction usage_stats"
    ),
    "RouterStats": "dead_lettered decision_syncs dropped stores unresponsive",
    "Serving": "failure stop wait",
    "Savepoint": "rollback",
    "SendOptions": "deliver_at deliver_in expires_in group persistent priority size",
    "Settlement": "ACK REJECT RELEASE",
    "StoreFailed": "at_ms reason store",
    "StoreOpened": "after_failure at_ms store",
    "StoreLockedError": "path",
    "StoreHealth": "dead free_bytes messages name oldest_ready_seconds reason state sync_seconds",
    "StoreStats": (
        "acks batches capacity_bytes compactions delayed destinations dropped failed held_bytes index_bytes "
        "journal_bytes kind large_bytes large_messages leased live_bytes live_percent memory_bytes messages name "
        "pool_bytes redelivered segments sends subscriptions swap_bytes sync_durations sync_seconds syncs waiting"
    ),
    "Subscriber": (
        "browse consume counts dead_letters depth destination listen listen_nowait purge receive receive_many "
        "subscription unsubscribe wait_empty"
    ),
    "Subscription": "client_id key name no_local selector topic",
    "Sync": "ALWAYS NEVER PERIODIC",
    "Topic": (
        "browse dead_letters declare delete depth destination send send_many send_nowait subscribe subscriptions"
    ),
    "Transaction": (
        "ack commit commit_nowait is_empty prepare put reject release remove remove_range rollback savepoint send "
        "state subscribe unsubscribe vote"
    ),
    "UsageStats": "failed lost recorded",
    "WhenFull": "BLOCK DROP_NEW DROP_OLD FAIL",
    "Xid": "branch format_id global_id",
}
"""Of each class, beside its special methods; of a model, beside its fields."""
BARE = {
    "AnabranchError", "ClockError", "ClosedError", "ConfigError", "CorruptionError", "DeadLetterError", "DecodeError",
    "DestinationError", "LargeMessageError", "MessageTooLargeError",
    "NoRouteError", "OutOfDescriptorsError", "OutcomeUnknownError", "PlacementError", "ProgrammingError", "SparkError",
    "StoreConfig", "StoreFailedError", "StoreFullError", "SubscriptionError",
    "TraceError", "TransactionError", "TransactionInDoubt", "UnknownMessageError",
    "UnknownSubscriptionError",
}  # fmt: skip
"""Classes without any."""

OPTIONS = {
    "JournalOptions", "LimitOptions", "MemoryOptions", "SqlOptions", "TransactionOptions", "UsageOptions",
}  # fmt: skip
"""Models, which have a hook that third parties' may replace."""

ATTRIBUTES = {"Transaction": "receipts xid", "Queue": "destination", "Topic": "destination",
              "Map": "destination", "Subscriber": "destination subscription"}  # fmt: skip
"""What an object of some has, beside the names of its class."""


def public(cls: type) -> list[str]:
    """What a class of ours has beside what Python or pydantic gives it, without the fields of models, which
    docs/configuration.md lists."""
    theirs: set[str] = set().union(*(dir(base) for base in BASES if issubclass(cls, base)))
    own: Iterable[str] = {*dir(cls), *getattr(cls, "__annotations__", ())}
    fields = set(cls.model_fields) if issubclass(cls, BaseModel) else set()
    return sorted(name for name in {*own} - theirs - fields if not name.startswith("_"))


def test_the_classes_have_the_names_that_are_listed_here() -> None:
    found = {name: cls for name in anabranch.__all__ if isinstance(cls := getattr(anabranch, name), type)}
    assert {name: " ".join(public(cls)) for name, cls in found.items()} == {
        **dict.fromkeys(BARE, ""), **dict.fromkeys(OPTIONS, "may_be_shown"), **NAMES,
    }  # fmt: skip


def test_so_have_their_objects(tmp_path: Path) -> None:
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"])])
    with anabranch.open(config) as router, router.transaction() as tx:
        queue, topic = router.queue("q"), router.topic("t")
        queue.send(b"1")
        message = queue.receive()
        assert message is not None
        given = [router, tx, queue, topic, router.map("m"), topic.subscribe("s"), tx.savepoint(), message,
                 router.connection(), router.on_event(print)]  # fmt: skip
        for one in given:
            name = "Message" if isinstance(one, anabranch.Message) else type(one).__name__
            names = {name for name in dir(one) if not name.startswith("_")}
            assert names == {*NAMES[name].split(), *ATTRIBUTES.get(name, "").split()}, name


def test_the_package_shows_what_is_public_alone(tmp_path: Path) -> None:
    assert {name for name in dir(anabranch) if not name.startswith("__")} == {*anabranch.__all__, "open"}
    assert not {*anabranch.__all__} & {*dir(builtins)}
    program = "before = open\nfrom anabranch import *\nassert open is before\nopen('here', 'w').write(Queue.__name__)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    assert (tmp_path / "here").read_text() == "Queue"
    with pytest.raises(AttributeError):
        anabranch.CodedQueue  # type: ignore[attr-defined]  # noqa: B018


def test_the_version() -> None:
    assert anabranch.__version__ == metadata.version("anabranch")
    assert "__version__" in dir(anabranch)
