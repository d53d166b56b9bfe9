"""The envelope: the columns every event has, whatever it was read from, and what names an input's columns.

dedup/decode/prepare.py maps them: it recognises Spark's Kafka source and this project's own schema by column names; anything else is mapped
by `Columns`. Pure: pyarrow only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from checkpoint import given
from checkpoint.errors import ConfigError
from checkpoint.position import LAST
from deadletter.letter import PROPERTIES

ENVELOPE = pa.schema(
    [
        pa.field("source", pa.string()),  # which broker
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("sequence_number", pa.int64()),  # Event Hubs sequence number, or Kafka offset
        pa.field("part", pa.int64()),  # tells the rows of one exploded event apart; else 0
        pa.field("offset", pa.string()),  # opaque, as the broker gave it
        pa.field("enqueued_time", pa.timestamp("us", tz="UTC")),
        pa.field("key", pa.binary()),  # the broker's partition key
        pa.field("body", pa.binary()),
        pa.field("properties", PROPERTIES),
    ]
)
"""One row per event, or per part of one."""

EARLIEST, LATEST = -62_135_510_400, 253_402_214_399
"""Seconds since 1970: from the second day of year 1 to the last but one of year 9999. Producers can claim any time; what lies outside
is no date in Python nor, further out, in PostgreSQL, and is taken as null."""

POSITION = ("source", "topic", "partition", "sequence_number", "part")
"""The columns that together say where an event stands; never null."""

KEY_ONLY: Mapping[str, str | int] = {"source": "", "topic": "", "partition": -1, "sequence_number": -1, "part": 0}
"""The position of every row in key-only mode."""

KAFKA = ("key", "value", "topic", "partition", "offset", "timestamp")
"""What Spark's Kafka source always has, with TIMESTAMP_TYPE; `headers` may be there."""

TIMESTAMP_TYPE = "timestampType"
"""What the times of Spark's Kafka source are, for each event: see APPENDED."""

APPENDED = 1
"""LogAppendTime: the broker's clock, which only goes forward in a partition. 0 is CreateTime: whatever the producer has said.

Source: org.apache.kafka.common.record.TimestampType."""

OWN = ("source", "topic", "partition", "sequence_number", "body")
"""What an input with the envelope's own names must have."""

_COLUMN = given.text("a column, or on Spark a SQL expression", '"shard"')

COLUMNS: given.Settings = {
    **dict.fromkeys(("topic", "partition", "sequence_number"), _COLUMN),
    **dict.fromkeys(("source", "offset", "enqueued_time", "key", "body", "properties"), _COLUMN.or_none),
}
"""What each field of `Columns` takes."""


@dataclass(frozen=True)
class Columns:
    """Where an input that is not recognised keeps its envelope: column names or, on Spark, SQL expressions (`"'flights'"`).

    A column named here moves to its envelope name; one used inside an expression stays as well.
    """

    topic: str
    partition: str
    sequence_number: str
    source: str | None = None
    offset: str | None = None
    enqueued_time: str | None = None
    key: str | None = None
    body: str | None = None
    properties: str | None = None

    def __post_init__(self) -> None:
        given.check(COLUMNS, vars(self), "Columns")


def check_positions(table: pa.Table) -> None:
    """Make sure that every row of prepared events has a whole position.

    Raises:
        ConfigError: a position column is null, or its value did not fit the type; names up to five of the rows.
    """
    bad = {name: column for name in POSITION if (column := table[name]).null_count}
    if not bad:
        return _check_last(table)
    rows = [row for row in range(table.num_rows) if any(not column[row].is_valid for column in bad.values())]
    shown = "; ".join(_row(table, row) for row in rows[:5]) + ("; ..." if len(rows) > 5 else "")
    raise ConfigError(
        f"{len(rows)} of {table.num_rows} rows have no complete position: {', '.join(bad)} is null in the input, or what it comes from is "
        f"not a whole number in range (a text that is no number counts as null). {shown}. Repair the columns that they come from, or use "
        "positions=None if the rows have no position."
    )


def _check_last(table: pa.Table) -> None:
    last = table["sequence_number"].to_numpy().max(initial=-1)
    if last >= LAST:
        raise ConfigError(
            f"Sequence number {last} is the largest possible one, so no checkpoint can follow it. Check that this column holds positions."
        )


def _row(table: pa.Table, row: int) -> str:
    values = ((name, table[name][row].as_py()) for name in POSITION)
    return f"row {row}: " + " ".join(f"{name}={'null' if value is None else value}" for name, value in values)
