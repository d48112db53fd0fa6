"""Every record of two real journals, compared with what ActiveMQ's own classes read from them."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from anabranch.adapters.kahadb import commands as c
from anabranch.adapters.kahadb.entries import Entry, read_entries
from anabranch.adapters.kahadb.files import Damage, find_stores
from anabranch.adapters.kahadb.journal import FileSummary, Journal
from anabranch.adapters.kahadb.openwire import LocalTransaction, XaTransaction, read_message

DATA = Path(__file__).parent / "data"
NAMES = {
    c.Trace: "TRACE",
    c.AddMessage: "ADD_MESSAGE",
    c.RemoveMessage: "REMOVE_MESSAGE",
    c.Prepare: "PREPARE",
    c.Commit: "COMMIT",
    c.Rollback: "ROLLBACK",
    c.RemoveDestination: "REMOVE_DESTINATION",
    c.Subscription: "SUBSCRIPTION",
    c.ProducerAudit: "PRODUCER_AUDIT",
    c.AckMessageFileMap: "ACK_MESSAGE_FILE_MAP",
    c.UpdateMessage: "UPDATE_MESSAGE",
    c.RewrittenDataFile: "REWRITTEN_DATA_FILE",
}
KINDS = ("QUEUE", "TOPIC", "TEMP_QUEUE", "TEMP_TOPIC")


def render(entry: Entry) -> str:
    """An entry as a line of the dump."""
    record, command = entry.record, entry.command
    head = f"{record.file}:{record.offset}:{record.length} KAHA_{NAMES[type(command)]}_COMMAND"
    if isinstance(command, c.Trace):
        return f"{head} {_word(command.message is not None)}"
    if isinstance(command, c.AddMessage):
        return f"{head} {_added(command)}"
    if isinstance(command, c.RemoveMessage):
        return (
            f"{head} {command.destination.name} {command.message_id} sub={command.subscription_key or '-'} "
            f"acklen={len(command.ack or b'')} tx={_word(command.transaction is not None)}"
        )
    return head


def _added(command: c.AddMessage) -> str:
    info = read_message(command.message)
    return (
        f"{KINDS[command.destination.type]} {command.destination.name} {command.message_id} prio={command.priority} "
        f"ts={info.timestamp} exp={info.expiration} mprio={info.priority} pers={_word(info.persistent)} "
        f"corr={_null(info.correlation_id)} type={_null(info.jms_type)} group={_null(info.group_id)} "
        f"brokerIn={info.broker_in_time} brokerOut={info.broker_out_time} comp={_word(info.compressed)} "
        f"cls={info.type} body={info.body_size} tx={_transaction(info.transaction)}"
    )


def _transaction(found: LocalTransaction | XaTransaction | None) -> str:
    if found is None:
        return "null"
    if isinstance(found, LocalTransaction):
        return f"TX:{found.connection}:{found.number}"
    return f"XID:[{found.format_id},globalId={_java_hex(found.global_id)},branchId={_java_hex(found.branch)}]"


def _java_hex(data: bytes) -> str:
    """Java's Integer.toHexString of each signed byte."""
    return "".join(f"{(b - 256) & 0xFFFFFFFF if b > 127 else b:x}" for b in data)


def _word(value: bool) -> str:
    return "true" if value else "false"


def _null(value: str | None) -> str:
    return "null" if value is None else value


@pytest.mark.parametrize(("name", "records"), [("kinds", 44), ("mixed", 691)])
def test_every_record_equals_the_dump(name: str, records: int, request: pytest.FixtureRequest) -> None:
    damages: list[Damage] = []
    journal = Journal(find_stores(request.getfixturevalue(name)).stores[0])
    entries = sorted(read_entries(journal, damages.append), key=lambda entry: entry.record[:2])
    lines = [render(entry) for entry in entries]  # the dump is by file, compaction's copies included
    expected = lzma.decompress((DATA / f"{name}-kahadb.dump.txt.xz").read_bytes()).decode().splitlines()
    assert len(expected) == records
    assert lines == expected
    assert not damages


def test_record_sizes_and_header_shares_are_every_byte_written(mixed: Path) -> None:
    summaries: dict[int, FileSummary] = {}
    sizes: dict[int, int] = {}
    for record in Journal(find_stores(mixed).stores[0]).records(lambda _: None, summaries):
        sizes[record.file] = sizes.get(record.file, 0) + record.length + record.share
    assert sizes == {number: summary.used_bytes for number, summary in summaries.items()}
    for file in find_stores(mixed).stores[0].files:
        data = file.path.read_bytes()
        assert data[sizes[file.number] :].startswith(b"-qMa4")
