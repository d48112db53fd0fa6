"""The usage trace as an Arrow table: its columns, where it is read and written, what may be wrong.

    seq           int64    required   position in the global order, no two alike
    ts            double              seconds since the epoch; without it only the clock seq works
    op            string   required   send or ack
    destination   string   required   queue://name or topic://name; a bare name is a queue
    message_id    string   required   unique within its destination
    size          int64               bytes that the operation put into the journal it was read from
    tx            string              equal text, same transaction
    acks_needed   int32               how many acks end a send's life; 1 unless it says otherwise
    subscription  string              of a topic message's ack
    body_size     int64               bytes of a send's body alone
    node          string              where it happened: in a trace of several nodes, and only there

Files are Parquet (`.parquet`, or a directory of them), Arrow IPC (`.arrow`, `.feather`) or CSV (`.csv`, `.csv.gz`). A
value that cannot be used at all is a TraceError. A usable value that says less than it seems to is a `Finding` with a
count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet

from ...errors import ConfigError, DestinationError, TraceError
from ...names.destination import Destination
from ...outputs import local_path
from ...text import count_of
from .arrays import Ints
from .events import SIZE_BYTES_MAX, UsageEvent

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
NODE_SCHEMA = SCHEMA.append(pa.field("node", pa.string(), nullable=False))
"""The columns of a trace of several nodes."""
SQL_TYPES = {"int64": "bigint", "int32": "int", "double": "double", "string": "string"}
"""Spark's names of the columns' types."""
REQUIRED = ("seq", "op", "destination", "message_id")
SECONDS_MAX = 1e11
"""The year 5138. Milliseconds since the epoch have been above this number since 1973, so they are recognised by it."""
AMOUNTS = (("size", SIZE_BYTES_MAX), ("body_size", SIZE_BYTES_MAX), ("acks_needed", None))
"""Columns of amounts, and the most of each."""
MUST_BE_GIVEN = "it must be given"
NODE_OF_ALL = "give the node of every operation, or of none"
OPS = "only 'send' and 'ack' are known"
LEAST_AMOUNT = "it is 0 or more, or empty where it is not known"
MOST_AMOUNT = f"it is in bytes, and {SIZE_BYTES_MAX} (1 TiB) at most"
BY_ORDER = "choose the clock seq (--clock seq) to go by order alone"
NO_TIME = f"expected seconds since the epoch, such as 1767571200.5 (divide milliseconds by 1000); or {BY_ORDER}"
"""What is told of columns that break a rule."""
_BATCH_ROWS = 65536
_NOT_NUMBERS = ["nan", "NaN", "-nan", "-NaN", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"]
"""Texts that some programs write for a number that is none. Empty in every column but `ts`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a trace does not tell, or tells wrongly, and how often. `code` is stable, `message` for people."""

    code: str
    count: int
    message: str


def backwards_finding(count: int, most: float) -> list[Finding]:
    """Tell that so many operations are timed before an earlier one's, by `most` seconds at most; or nothing."""
    what = "time that lies" if count == 1 else "times that lie"
    message = f"{what} before an earlier operation's, by {most:.6g} s at most; the latest so far is used"
    return [Finding("clock-backwards", count, message)] if count else []


def from_events(events: Iterable[UsageEvent]) -> pa.Table:
    """Make a table from any source of events, taken in batches so that memory holds the columns only."""
    events = iter(events)
    first = list(islice(events, 1))
    schema = NODE_SCHEMA if first and first[0].node is not None else SCHEMA
    return pa.Table.from_batches(list(_batches(chain(first, events), schema)), schema=schema)


def _batches(events: Iterator[UsageEvent], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while rows := list(islice(events, _BATCH_ROWS)):
        columns = list(zip(*rows, strict=True))[: len(schema)]
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def trace_path(path: str | Path) -> Path:
    """Return where on this machine a trace lies; `file:` URLs are paths too. Raises TraceError for any other URL."""
    try:
        return local_path(path, "the trace")
    except ConfigError as error:
        raise TraceError(str(error)) from None


def read_trace(path: str | Path) -> pa.Table:
    """Read the whole trace in `SCHEMA`'s columns and types, in the file's own order. Raises TraceError."""
    path = trace_path(path)
    if not path.exists():
        raise TraceError(f"there is no trace at {path}; give a .parquet, .arrow or .csv file or a directory of Parquet")
    try:
        table = _read(path)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path} cannot be read as a trace: {_one_line(error)}") from error
    return conform(table, str(path))


def _read(path: Path) -> pa.Table:
    name = path.name.lower()
    if path.is_dir():
        files = [str(file) for file in parquet_files(path)]
        if not files:
            raise TraceError(f"directory {path} holds no .parquet file; give a trace file or a directory of Parquet")
        return pyarrow.dataset.dataset(files, format="parquet").to_table()
    if name.endswith((".csv", ".csv.gz")):
        return _read_csv(path)
    if name.endswith((".arrow", ".feather", ".ipc")):
        return pyarrow.feather.read_table(path)
    if name.endswith((".parquet", ".pq")):
        return pyarrow.parquet.read_table(path)
    raise TraceError(f"{path} has no suffix of a trace; .parquet, .arrow, .feather, .csv and .csv.gz are read")


def parquet_files(directory: Path) -> list[Path]:
    """List the Parquet files of a directory, at any depth, in the order in which they are read."""
    return sorted(directory.rglob("*.parquet"), key=str)


def _read_csv(path: Path) -> pa.Table:
    # As text, so that what is no number can be named with its line.
    types = {field.name: pa.string() for field in NODE_SCHEMA}
    convert = pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True)
    convert.null_values = [text for text in convert.null_values if text not in _NOT_NUMBERS]
    table = pyarrow.csv.read_csv(path, convert_options=convert)
    if len(table.column_names) == 1 and ";" in table.column_names[0]:
        raise TraceError(f"{path} is separated by semicolons; separate its columns by commas")
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name in types:
            if name != "ts":  # there it is told as what it is, no number
                column = pc.if_else(pc.is_in(column, value_set=pa.array(_NOT_NUMBERS)), None, column)
            column = _typed(column, NODE_SCHEMA.field(name), path)
        columns.append(column)
    return pa.table(columns, names=table.column_names)


def _typed(column: pa.ChunkedArray, field: pa.Field, path: Path) -> pa.ChunkedArray:
    """Return texts as a field's type. Raises TraceError, which names the first that is none."""
    try:
        return column.cast(field.type)
    except pa.ArrowException:
        row = _first_misfit(column, field.type)
        place = f"{path}: line {row + 2}, column {field.name}"
        raise TraceError(f"{place} is {column[row].as_py()!r}; expected {expected(field.type)}") from None


def _first_misfit(column: pa.ChunkedArray, kind: pa.DataType) -> int:
    """Find the first row whose value is none of this type, in a column that has one."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        if _can_cast(column.slice(low, middle - low), kind):
            low = middle
        else:
            high = middle
    return low


def _can_cast(column: pa.ChunkedArray, kind: pa.DataType) -> bool:
    try:
        column.cast(kind)
    except pa.ArrowException:
        return False
    return True


def expected(kind: pa.DataType) -> str:
    """Say what a column of this type holds, for an error."""
    if pa.types.is_floating(kind):
        return "seconds since the epoch, such as 1767571200.5"
    return "a whole number" if pa.types.is_integer(kind) else "text"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
    """Return the table in `SCHEMA`, or `NODE_SCHEMA`: missing optional columns added as nulls, types cast. Raises
    TraceError."""
    check_columns(table.column_names, source)
    if table.num_rows == 0:
        raise no_operation(source)
    columns: list[Any] = []
    has_nodes = "node" in table.column_names and table.column("node").null_count < table.num_rows
    schema = NODE_SCHEMA if has_nodes else SCHEMA
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        given = table.column(field.name)
        try:
            column = given.cast(field.type)
        except pa.ArrowException as error:
            row, told = _first_misfit(given, field.type), f"expected {expected(field.type)}"
            raise _misfit(given, field.name, row, source, told) from error
        if field.name in REQUIRED:
            _refuse_empty(column, field.name, source, MUST_BE_GIVEN)
        if field.name == "node":
            _refuse_empty(column, field.name, source, NODE_OF_ALL)
        columns.append(column)
    result = pa.table(columns, schema=pa.schema([pa.field(field.name, field.type) for field in schema]))
    op = result.column("op")
    _refuse(op, "op", pc.invert(pc.is_in(op, value_set=pa.array(["send", "ack"]))), source, OPS)
    for name, largest in AMOUNTS:
        column = result.column(name)
        _refuse(column, name, pc.less(column, 0), source, LEAST_AMOUNT)
        if largest is not None:
            _refuse(column, name, pc.greater(column, largest), source, MOST_AMOUNT)
    _check_destinations(result, source)
    return result


def _misfit(column: pa.ChunkedArray, name: str, row: int, source: str, told: str) -> TraceError:
    value = column[row].as_py()
    return TraceError(f"{source}: row {row_of(source, row)}: column {name} is {value!r}; {told}")


def _refuse(column: pa.ChunkedArray, name: str, wrong: pa.ChunkedArray, source: str, told: str) -> None:
    """Raise TraceError for the first row of which this is true."""
    first = pc.index(wrong, True).as_py()
    if first >= 0:
        raise _misfit(column, name, first, source, told)


def _refuse_empty(column: pa.ChunkedArray, name: str, source: str, told: str) -> None:
    """Raise TraceError for a column that is empty in a row."""
    if column.null_count:
        first = row_of(source, pc.index(pc.is_null(column), True).as_py())
        empty = count_of(column.null_count, "row")
        raise TraceError(f"{source}: column {name} is empty in {empty}, first in row {first}; {told}")


def check_columns(names: Sequence[str], source: str) -> None:
    """Raise TraceError where a required column is missing, or one is there twice."""
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        have = ", ".join(names) or "none"
        folded = {name.strip().lower() for name in names}
        hint = "; names are written in small letters, without blanks" if folded.intersection(missing) else ""
        what = "column" if len(missing) == 1 else "columns"
        raise TraceError(f"{source} lacks the {what} {', '.join(missing)}; it has {have}{hint}")
    twice = [name for name in NODE_SCHEMA.names if list(names).count(name) > 1]
    if twice:
        raise TraceError(f"{source} has the column {twice[0]} more than once; leave one of them")


def no_operation(source: str) -> TraceError:
    """Return the error that a trace is empty."""
    return TraceError(f"{source} holds no operation; record one that covers some days of ordinary use")


def check_times(table: pa.Table, source: str) -> None:
    """Raise TraceError for a `ts` that is empty or cannot be a time. Only the clock `ts` reads it."""
    column = table.column("ts")
    _refuse_empty(column, "ts", source, BY_ORDER)
    # NaN is not below anything.
    _refuse(column, "ts", pc.invert(pc.less_equal(pc.abs(column), SECONDS_MAX)), source, NO_TIME)


def _check_destinations(table: pa.Table, source: str) -> None:
    column = table.column("destination")
    for text in pc.unique(column).to_pylist():
        try:
            Destination.parse(text)
        except DestinationError as error:
            first = pc.index(column, text).as_py()
            raise TraceError(f"{source}: row {row_of(source, first)}: {error}") from error


def codes(column: pa.ChunkedArray) -> tuple[pa.Array, Ints]:
    """Find the distinct texts and, for each row, the number of its text, -1 for null."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    return encoded.dictionary, encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def row_of(source: str, row: int) -> str:
    """Tell people a row that is counted from 0: from 1, and in a directory of Parquet with its file."""
    directory = Path(source)
    if directory.is_dir():
        before = 0
        for path in parquet_files(directory):
            rows = pyarrow.parquet.read_metadata(path).num_rows
            if row < before + rows:
                return f"{row - before + 1} of {path.relative_to(directory)}"
            before += rows
    return str(row + 1)


def canonical_destination(text: str, source: str = "the trace") -> str:
    """Return `queue://name` or `topic://name` for what a trace calls a destination. Raises TraceError."""
    try:
        return str(Destination.parse(text))
    except DestinationError as error:
        raise TraceError(f"{source}: {error}") from error
