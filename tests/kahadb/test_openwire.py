"""What stored OpenWire objects say, and bytes that are none."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.adapters.kahadb.commands import AddMessage, RemoveMessage, Subscription
from anabranch.adapters.kahadb.entries import read_entries
from anabranch.adapters.kahadb.files import find_stores
from anabranch.adapters.kahadb.journal import Journal
from anabranch.adapters.kahadb.openwire import (
    AckInfo,
    OpenWireError,
    SubscriptionInfo,
    read_ack,
    read_message,
    read_subscription,
)

from . import writer as w


def test_acks_and_subscriptions_of_a_real_broker(kinds: Path) -> None:
    commands = [e.command for e in read_entries(Journal(find_stores(kinds).stores[0]), lambda _: None)]
    acks = [read_ack(c.ack) for c in commands if isinstance(c, RemoveMessage) and c.ack]
    assert [ack.type_name for ack in acks] == ["standard"] * 5
    subscriptions = [read_subscription(c.info) for c in commands if isinstance(c, Subscription) and c.info]
    assert subscriptions == [
        SubscriptionInfo("cid1", "sub1", "price > 5", False),
        SubscriptionInfo("cid1", "sub2", None, False),
    ]


def test_all_message_classes_of_a_real_broker(kinds: Path) -> None:
    commands = [e.command for e in read_entries(Journal(find_stores(kinds).stores[0]), lambda _: None)]
    infos = [read_message(c.message) for c in commands if isinstance(c, AddMessage)]
    assert {info.type for info in infos} == {24, 25, 26, 28}
    assert [info.body_size for info in infos if info.compressed] == [25]
    assert all(info.persistent for info in infos)


def test_a_message() -> None:
    info = read_message(w.message(b"x" * 70_000, broker_in=5, timestamp=4))
    assert (info.type, info.body_size, info.broker_in_time, info.timestamp) == (24, 70_000, 5, 4)


def test_a_store_from_before_version_10_has_no_text_view() -> None:
    producer = b"\x01\x7b" + b"\x01\x00\x02id" + bytes(16)
    old_id = b"\x01\x6e" + producer + bytes(16)
    data = w.message(b"abc", broker_in=77)
    # type, command id, response, then producer, destination, transaction, original destination, message id
    at = 4 + 1 + 5 + 4
    data = data[4:at] + old_id + data[at + 1 : -1]
    info = read_message(struct.pack(">i", len(data)) + data)
    assert (info.body_size, info.broker_in_time) == (3, 77)


def test_modified_utf8() -> None:
    java = b"a\xc0\x80\xed\xa0\xbd\xed\xb8\x80"  # a, NUL, an emoji as two surrogates
    data = b"\x37" + b"\x01" + struct.pack(">H", len(java)) + java + bytes(3)
    assert read_subscription(struct.pack(">i", len(data)) + data).client_id == "a\0\U0001f600"


@pytest.mark.parametrize("read", [read_message, read_ack, read_subscription])
@given(data=st.binary(max_size=80))
@settings(max_examples=60)
def test_any_bytes_are_read_or_refused(read: object, data: bytes) -> None:
    assert callable(read)
    for candidate in (data, struct.pack(">i", len(data)) + data):
        try:
            read(candidate)
        except OpenWireError as error:
            assert str(error)


@given(st.data())
@settings(max_examples=100)
def test_a_cut_or_changed_message_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(w.message(b"some body"))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        read_message(bytes(whole))
    except OpenWireError as error:
        assert str(error)


def test_ack_types_have_names() -> None:
    assert AckInfo(6, 1).type_name == "expired"
    assert AckInfo(99, 1).type_name == "type 99"
