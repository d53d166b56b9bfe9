"""The envelope: the columns every event has, whatever it was read from, and how an input's columns map to them.

Recognises Spark's Kafka source and this project's own schema by column names; anything else is mapped by `Columns`.
Decides on names only, so that both implementations (dedup/spark, dedup/arrow.py) decide alike. Pure: pyarrow only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pyarrow as pa

from checkpoint import given
from checkpoint.errors import ConfigError
from checkpoint.position import LAST
from deadletter.letter import PROPERTIES
from dedup.decode import Decoder
from dedup.keys import INTERNAL as INTERNAL
from dedup.keys import LOG_TIME as LOG_TIME
from dedup.keys import SEQUENCE as SEQUENCE
from dedup.keys import KeySettings

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

KAFKA_SOURCE = "kafka"
"""The source of its events where none is named."""

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


@dataclass(frozen=True)
class Prepare:
    """Everything that turns an input into events with keys. Picklable, so that it can go where the code runs."""

    consumer: str
    keys: KeySettings = field(default_factory=KeySettings)
    columns: Columns | Literal["auto"] | None = "auto"
    """The mapping; "auto" or None recognises it by names."""
    source: str | None = None
    """Name of the broker; wins over a `source` column."""
    part: str | None = None
    """Column (or SQL expression) that tells the rows of one exploded event apart."""
    positions: bool = True
    """False is the key-only mode: rows have no position of their own."""
    decoder: Decoder | Callable[[Any], Any] | None = None
    """`decode.json(...)`, `decode.avro(...)`, or on Spark a function from the body column to a column; adds `data`."""
    keyspace: int = 0
    """The life of the consumer's keys, from its head."""
    incarnations: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(source, topic) -> incarnation, from its head; 0 where not named."""

    def __post_init__(self) -> None:
        if self.positions:
            return
        if self.keys.sequence:
            raise ConfigError("sequence_key keeps the order of positions; with positions=None there is none to keep.")
        if self.keys.columns and self.keys.null_key == "position":
            raise ConfigError('null_key="position" needs positions; with positions=None an event without a key can only be a dead letter.')
        if self.part or isinstance(self.columns, Columns):
            raise ConfigError("positions=None takes no part=: such rows have no position to map.")


@dataclass(frozen=True)
class Named:
    """Taken from this column of the input."""

    column: str


@dataclass(frozen=True)
class Expression:
    """Computed by this SQL expression (Spark only)."""

    sql: str


@dataclass(frozen=True)
class Constant:
    """The same for every row; None is null."""

    value: str | int | None


Origin = Named | Expression | Constant


@dataclass(frozen=True)
class Layout:
    """How the output's columns come from the input's."""

    envelope: Mapping[str, Origin]
    """One origin for each ENVELOPE column, in its order."""
    extras: tuple[str, ...]
    """Columns of the input that pass through unchanged."""
    log_time: str | bool
    """Whether `enqueued_time` is the broker's, or the column that says so for each event."""


def layout(names: Sequence[str], spec: Prepare) -> Layout:
    """Map an input with these column names.

    Raises:
        ConfigError: the input is not recognised, a mapped column is missing, or a column that would pass through
            has the name of one that this project adds.
    """
    if isinstance(spec.columns, Columns):
        found, used = _explicit(names, spec.columns)
    else:
        found, used = _recognised(names, spec) if spec.positions else _key_only(names)
    if spec.source is not None and spec.positions:
        found["source"] = Constant(spec.source)
    if spec.part is not None:
        found["part"] = _origin(names, spec.part, "part")
        used |= {spec.part}
    defaults: dict[str, Origin] = {"source": Constant("input"), "part": Constant(0)}
    envelope = {name: found.get(name, defaults.get(name, Constant(None))) for name in ENVELOPE.names}
    extras = tuple(name for name in names if name not in used)
    _refuse_clashes(extras, spec)
    return Layout(envelope, extras, _log_time(names, envelope["enqueued_time"]))


def _log_time(names: Sequence[str], origin: Origin) -> str | bool:
    """Kafka says it for each event, Event Hubs has no other time; of what was mapped nobody knows."""
    if origin in (Named("timestamp"), Named("enqueued_time")) and TIMESTAMP_TYPE in names:
        return TIMESTAMP_TYPE
    return origin == Named("enqueued_time")


def _recognised(names: Sequence[str], spec: Prepare) -> tuple[dict[str, Origin], set[str]]:
    own = [name for name in OWN if name != "source" or spec.source is None]
    if set(own) <= set(names):
        found: dict[str, Origin] = {name: Named(name) for name in ENVELOPE.names if name in names}
        return found, set(found)
    if set(KAFKA) <= set(names):
        return _kafka(names), {*KAFKA, TIMESTAMP_TYPE, "headers"}
    missing = {"Spark's Kafka source": KAFKA, "dedup's own schema": own}
    lacks = "; ".join(f"for {what} it lacks {_list(n for n in need if n not in names)}" for what, need in missing.items())
    raise ConfigError(
        f"The input is not recognised. It has the columns {_list(names)}; {lacks}. Map it with "
        "positions=Columns(topic=..., partition=..., sequence_number=..., body=...), or use positions=None if its rows have no position."
    )


def _kafka(names: Sequence[str]) -> dict[str, Origin]:
    found: dict[str, Origin] = {
        "source": Constant(KAFKA_SOURCE),
        "topic": Named("topic"),
        "partition": Named("partition"),
        "sequence_number": Named("offset"),
        "offset": Named("offset"),
        "enqueued_time": Named("timestamp"),
        "key": Named("key"),
        "body": Named("value"),
    }
    return found | ({"properties": Named("headers")} if "headers" in names else {})


def _explicit(names: Sequence[str], columns: Columns) -> tuple[dict[str, Origin], set[str]]:
    given = {f.name: value for f in fields(columns) if (value := getattr(columns, f.name)) is not None}
    missing = [f"{value!r} (for {name})" for name, value in given.items() if value not in names and value.isidentifier()]
    if missing:
        raise ConfigError(f"positions= names what the input does not have: {_list(missing)}. It has the columns {_list(names)}.")
    return {name: _origin(names, value, name) for name, value in given.items()}, set(given.values())


def _key_only(names: Sequence[str]) -> tuple[dict[str, Origin], set[str]]:
    found: dict[str, Origin] = {name: Constant(value) for name, value in KEY_ONLY.items()}
    used = {name for name in ENVELOPE.names if name in names and name not in KEY_ONLY}
    found |= {name: Named(name) for name in used}
    if "value" in names and "body" not in names:
        found["body"] = Named("value")
        used.add("value")
    return found, used


def _origin(names: Sequence[str], value: str, wanted: str) -> Origin:
    if value in names:
        return Named(value)
    if value.isidentifier():
        raise ConfigError(f"{wanted}={value!r} names a column that the input does not have. It has the columns {_list(names)}.")
    if len(value) > 1 and value[0] == value[-1] == "'" and not {"'", "\\"} & set(value[1:-1]):
        return Constant(value[1:-1])
    return Expression(value)


def _refuse_clashes(extras: Sequence[str], spec: Prepare) -> None:
    ours = {*ENVELOPE.names, LOG_TIME, *INTERNAL, *SEQUENCE, *(["data"] if spec.decoder else [])}
    clashes = [name for name in extras if name.lower() in ours]
    if clashes:
        raise ConfigError(f"The input's columns {_list(clashes)} have the names of columns that are added to it. Map, rename or drop them.")
    twice = sorted({name for name in extras if [other.lower() for other in extras].count(name.lower()) > 1})
    if twice:
        raise ConfigError(f"The input has several columns of one name: {_list(twice)}. Rename or drop them.")


def _list(names: Sequence[str] | Iterator[str]) -> str:
    return ", ".join(names) or "none"


def does_not_fit(column: str, origin: str, kind: str, wanted: str) -> ConfigError:
    """The error for an input column whose type cannot become its envelope column."""
    return ConfigError(f"{column} comes from {origin} of type {kind}; it must be {wanted}. Cast or rename it before the consumer.")


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
        f"{len(rows)} of {table.num_rows} rows have no whole position ({_list(list(bad))} is null or did not fit its type): {shown}. "
        "Repair the columns they come from, or use positions=None if the rows have no position."
    )


def _check_last(table: pa.Table) -> None:
    last = table["sequence_number"].to_numpy().max(initial=-1)
    if last >= LAST:
        raise ConfigError(f"Sequence number {last} is the last there is: no checkpoint could go on behind it. Is it a position at all?")


def _row(table: pa.Table, row: int) -> str:
    values = ((name, table[name][row].as_py()) for name in POSITION)
    return f"row {row}: " + " ".join(f"{name}={'null' if value is None else value}" for name, value in values)
