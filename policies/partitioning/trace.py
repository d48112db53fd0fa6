"""The usage trace as an Arrow table: its columns, where it is read from and written to, what may be wrong with it.

    seq           int64    required   position in the global order, no two alike
    ts            double              seconds since the epoch; without it only `clock="seq"` works
    op            string   required   send or ack
    destination   string   required   queue://name or topic://name; a bare name is a queue
    message_id    string   required   unique within its destination
    size          int64               bytes that the operation put into the journal it was read from
    tx            string              equal text, same transaction
    acks_needed   int32               how many acks end a send's life; 1 unless it says otherwise
    subscription  string              of a topic message's ack
    body_size     int64               bytes of a send's body alone

Files are Parquet (`.parquet`, or a directory of them), Arrow IPC (`.arrow`, `.feather`) or CSV (`.csv`, `.csv.gz`).
What cannot be used at all is a TraceError. What can, but says less than it seems to, is a `Finding` with a count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet

from ..destination import Destination
from ..errors import DestinationError, TraceError
from .events import UsageEvent

SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("ts", pa.float64()),
        pa.field("op", pa.string(), nullable=False),
        pa.field("destination", pa.string(), nullable=False),
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("size", pa.int64()),
        pa.field("tx", pa.string()),
        pa.field("acks_needed", pa.int32()),
        pa.field("subscription", pa.string()),
        pa.field("body_size", pa.int64()),
    ]
)
REQUIRED = ("seq", "op", "destination", "message_id")
_BATCH_ROWS = 65536


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a trace does not tell, or tells wrongly, and how often. `code` is stable, `message` for people."""

    code: str
    count: int
    message: str


def from_events(events: Iterable[UsageEvent]) -> pa.Table:
    """A table from any source of events, taken in batches so that memory holds the columns only."""
    batches = list(_batches(iter(events)))
    return pa.Table.from_batches(batches, schema=SCHEMA)


def _batches(events: Iterator[UsageEvent]) -> Iterator[pa.RecordBatch]:
    while rows := list(islice(events, _BATCH_ROWS)):
        columns = list(zip(*rows, strict=True))
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def read_trace(path: str | Path) -> pa.Table:
    """The whole trace in `SCHEMA`'s columns and types, in the file's own order. Raises TraceError."""
    path = Path(path)
    if not path.exists():
        raise TraceError(f"there is no trace at {path}; give a .parquet, .arrow or .csv file or a directory of Parquet")
    try:
        table = _read(path)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path} cannot be read as a trace: {error}") from error
    return conform(table, str(path))


def _read(path: Path) -> pa.Table:
    name = path.name.lower()
    if path.is_dir():
        files = sorted(str(p) for p in path.rglob("*.parquet"))
        if not files:
            raise TraceError(f"directory {path} holds no .parquet file; give a trace file or a directory of Parquet")
        return pyarrow.dataset.dataset(files, format="parquet").to_table()
    if name.endswith((".csv", ".csv.gz")):
        # Columns that are empty throughout would otherwise be read as null, and ids made of digits as numbers.
        types = {field.name: field.type for field in SCHEMA}
        convert = pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True)
        return pyarrow.csv.read_csv(path, convert_options=convert)
    if name.endswith((".arrow", ".feather", ".ipc")):
        return pyarrow.feather.read_table(path)
    if name.endswith((".parquet", ".pq")):
        return pyarrow.parquet.read_table(path)
    raise TraceError(f"{path} has no suffix of a trace; .parquet, .arrow, .feather, .csv and .csv.gz are read")


def write_trace(table: pa.Table, path: str | Path) -> None:
    """Write by suffix: .parquet, .arrow, .feather or .csv."""
    path = Path(path)
    name = path.name.lower()
    if name.endswith((".parquet", ".pq")):
        pyarrow.parquet.write_table(table, path, compression="zstd")
    elif name.endswith((".arrow", ".feather", ".ipc")):
        pyarrow.feather.write_feather(table, path, compression="uncompressed")
    elif name.endswith(".csv"):
        pyarrow.csv.write_csv(table, path)
    else:
        raise TraceError(f"{path} has no suffix of a trace; .parquet, .arrow, .feather and .csv are written")


def conform(table: pa.Table, source: str = "the trace") -> pa.Table:
    """The table in `SCHEMA`: missing optional columns added as nulls, types cast. Raises TraceError."""
    missing = [name for name in REQUIRED if name not in table.column_names]
    if missing:
        have = ", ".join(table.column_names) or "none"
        raise TraceError(f"{source} lacks the columns {', '.join(missing)}; it has {have}")
    if table.num_rows == 0:
        raise TraceError(f"{source} holds no operation; record one that covers some days of ordinary use")
    columns: list[Any] = []
    for field in SCHEMA:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            column = table.column(field.name).cast(field.type)
        except pa.ArrowException as error:
            raise TraceError(f"{source}: column {field.name} cannot be read as {field.type}: {error}") from error
        if field.name in REQUIRED and column.null_count:
            raise TraceError(f"{source}: column {field.name} is empty in {column.null_count} rows; it must be given")
        columns.append(column)
    nullable = pa.schema([pa.field(field.name, field.type) for field in SCHEMA])
    result = pa.table(columns, schema=nullable)
    _check_ops(result, source)
    return result


def _check_ops(table: pa.Table, source: str) -> None:
    known = pc.is_in(table.column("op"), value_set=pa.array(["send", "ack"]))
    if not pc.all(known).as_py():
        strange = pc.unique(table.column("op").filter(pc.invert(known))).to_pylist()[:5]
        raise TraceError(f"{source}: column op holds {strange}; only 'send' and 'ack' are known")
    negative = pc.sum(pc.less(pc.fill_null(table.column("size"), 0), 0)).as_py()
    if negative:
        raise TraceError(f"{source}: column size is negative in {negative} rows")


def canonical_destination(text: str, source: str = "the trace") -> str:
    """`queue://name` or `topic://name` for what a trace calls a destination. Raises TraceError."""
    try:
        return str(Destination.parse(text))
    except DestinationError as error:
        raise TraceError(f"{source}: {error}") from error
