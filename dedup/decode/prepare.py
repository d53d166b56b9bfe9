"""From an input table to events with keys: the envelope's columns, `data`, keys. The one preparation of rows, in Arrow.

Runs wherever the rows are: in this process, on Spark's driver, in Spark's tasks (dedup/spark/prepare.py). What only Spark can compute - SQL
expressions, functions of columns - is there as columns already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError
from checkpoint.position import KAFKA_SOURCE
from deadletter.letter import PROPERTIES
from dedup.core import keys
from dedup.core.envelope import APPENDED, EARLIEST, ENVELOPE, KAFKA, KEY_ONLY, LATEST, OWN, POSITION, TIMESTAMP_TYPE, Columns
from dedup.core.keys import INTERNAL, LOG_TIME, MESSAGE_ID, SEQUENCE, KeySettings
from dedup.decode import Decoder, hashing
from dedup.decode.bodies import decode

Frame = dict[str, pa.Array]

_KEY, _KEY_TEXT, PAYLOAD_HASH, _UNDECODABLE = INTERNAL

BY_SPARK = "__dedup_data"
"""What a function as decode= made of the bodies: Spark computes that, in front of this preparation."""


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
            raise ConfigError(
                "sequence_key= keeps events in the order of their positions, and positions=None gives them none. Take one of them out."
            )
        if self.keys.columns and self.keys.null_key == "position":
            raise ConfigError('null_key="position" needs positions; with positions=None an event without a key can only be a dead letter.')
        if self.part or isinstance(self.columns, Columns):
            raise ConfigError(
                "part= and positions=Columns(...) describe positions, and with positions=None events have none. Take one of the two out."
            )


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
    _refuse_no_message_id(envelope, extras, spec.keys)
    return Layout(envelope, extras, _whose_clock(names, envelope["enqueued_time"]))


def _refuse_no_message_id(envelope: Mapping[str, Origin], extras: Sequence[str], keys: KeySettings) -> None:
    """Raise ConfigError where the key is the producer's message id and no event can have one: each would be a letter of the kind NO_KEY."""
    no_headers = envelope["properties"] == Constant(None)
    if keys.columns == (MESSAGE_ID,) and keys.null_key == "dead_letter" and no_headers and MESSAGE_ID not in extras:
        raise ConfigError(
            "idempotence_key='message_id' is the header of that name, and the input has no headers: no event would have a key. If the id "
            "is in the body, write idempotence_key='data.message_id'. Else read the headers: option('includeHeaders', 'true') of Spark's "
            "Kafka source, properties= of Columns."
        )


def _whose_clock(names: Sequence[str], origin: Origin) -> str | bool:
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


def prepare_events(table: pa.Table, spec: Prepare) -> pa.Table:
    """The input's rows, in their order, as events with keys.

    Returns:
        ENVELOPE columns, the input's other columns, `data` (with a decoder), `_log_time`, `_key`, `_key_text`, `_payload_hash`,
        `_undecodable`;
        with a sequence key also `_sequence` and `_sequence_text`.

    Raises:
        ConfigError: the input is not recognised, a column is missing or of a type that cannot fit, or a setting needs Spark.
    """
    return complete(prepare_keys(table, spec), spec)


def prepare_keys(table: pa.Table, spec: Prepare, *, beside: bool = False) -> pa.Table:
    """What `prepare_events` returns but for `_key_text` and `_payload_hash`, which can wait.

    Args:
        beside: compute `_payload_hash` of bodies by a thread while they are decoded, which is mostly not Python's work; then it is there.

    Raises:
        ConfigError: as `prepare_events`.
    """
    columns = _mapped(table, spec)
    hashing = _hash_bodies(columns["body"], spec) if beside else None
    found = _keyed(_decoded(columns, spec), spec)
    return found if hashing is None else found.append_column(PAYLOAD_HASH, hashing.result())


def events(table: pa.Table, spec: Prepare) -> pa.Table:
    """What keys are made of: the columns of `prepare_events` but for those of keys and `_undecodable`. Raises ConfigError."""
    return pa.table(_decoded(_mapped(table, spec), spec))


def add_keys(rows: pa.Table, spec: Prepare) -> pa.Table:
    """What `prepare_events` returns, of rows that `events` returned. Behind them stand parts of keys that Spark computed."""
    computed = rows.column_names[rows.column_names.index(LOG_TIME) + 1 :]
    columns: Frame = {name: _whole(rows[name]) for name in rows.column_names}
    return complete(_keyed(columns, spec), spec).drop_columns(computed)


def positions(table: pa.Table, plan: Layout) -> pa.Table:
    """The columns of POSITION alone."""
    return pa.table({name: _one(table, plan.envelope[name], name) for name in POSITION})


def _mapped(table: pa.Table, spec: Prepare) -> Frame:
    plan = layout([name for name in table.column_names if name != BY_SPARK], spec)
    columns: Frame = {name: _one(table, origin, name) for name, origin in plan.envelope.items()}
    columns |= {name: _whole(table[name]) for name in plan.extras}
    if callable(spec.decoder):
        if BY_SPARK not in table.column_names:
            raise ConfigError(
                "A function as decode= computes a column of Spark, and this runs without Spark. Use decode.json(...) or decode.avro(...)."
            )
        columns["data"] = _whole(table[BY_SPARK])
    return columns | {LOG_TIME: _log_time(table, plan.log_time)}


def _decoded(columns: Frame, spec: Prepare) -> Frame:
    if not isinstance(spec.decoder, Decoder):
        return columns
    data = decode(columns["body"], columns["properties"], spec.decoder)
    return {name: c for name, c in columns.items() if name != LOG_TIME} | {"data": data, LOG_TIME: columns[LOG_TIME]}


def _keyed(columns: Frame, spec: Prepare) -> pa.Table:
    body = columns["body"]
    wrong = pa.repeat(pa.scalar(False), len(body)) if spec.decoder is None else pc.and_(body.is_valid(), columns["data"].is_null())
    found = columns | {_KEY: _keys(columns, spec), _UNDECODABLE: wrong}
    if spec.keys.sequence:
        found |= dict(zip(SEQUENCE, _sequence(columns, spec), strict=True))
    return pa.table(found)


def _log_time(table: pa.Table, said: str | bool) -> pa.Array:
    if isinstance(said, bool):
        return pa.repeat(pa.scalar(said), table.num_rows)
    kinds = _whole(table[said])
    if not pa.types.is_integer(kinds.type):
        return pa.repeat(pa.scalar(False), table.num_rows)
    return pc.fill_null(pc.equal(kinds, APPENDED), False)


def _hash_bodies(bodies: pa.Array, spec: Prepare) -> Future[pa.Array] | None:
    if spec.keys.payload or not isinstance(spec.decoder, Decoder):
        return None
    thread = ThreadPoolExecutor(1, "dedup payloads")
    hashing = thread.submit(payload_hashes, pa.table({"body": bodies}), spec)
    thread.shutdown(wait=False)
    return hashing


def complete(rows: pa.Table, spec: Prepare, hashes: pa.Array | None = None) -> pa.Table:
    """Some rows that `prepare_keys` returned, with all columns of `prepare_events`.

    Args:
        hashes: their `_payload_hash`, where it is known already.
    """
    at = rows.column_names.index(_KEY) + 1
    with_text = rows.add_column(at, _KEY_TEXT, key_texts(rows, spec))
    return with_text.add_column(at + 1, PAYLOAD_HASH, payload_hashes(rows, spec) if hashes is None else hashes)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _one(table: pa.Table, origin: Origin, name: str) -> pa.Array:
    kind = ENVELOPE.field(name).type
    if isinstance(origin, Constant):
        return _fit(pa.repeat(pa.scalar(origin.value), table.num_rows), kind, name, repr(origin.value))
    if isinstance(origin, Expression):
        raise ConfigError(f"{name} is the SQL expression {origin.sql!r}, which needs Spark. Name a column.")
    return _fit(_whole(table[origin.column]), kind, name, repr(origin.column))


def _fit(column: pa.Array, kind: pa.DataType, name: str, origin: str) -> pa.Array:
    types, given = pa.types, column.type
    text = types.is_string(given) or types.is_large_string(given)
    if types.is_timestamp(kind) and types.is_timestamp(given) and given.tz:
        return _times(column, kind)
    if given == kind or types.is_null(given):
        return column if given == kind else pa.nulls(len(column), kind)
    if types.is_integer(kind) and (text or types.is_integer(given) or (types.is_decimal(given) and given.scale == 0)):
        return _numbers(column, kind)
    if types.is_string(kind) and (text or (name == "offset" and types.is_integer(given))):
        return column.cast(kind)
    if types.is_binary(kind) and (text or types.is_large_binary(given) or types.is_fixed_size_binary(given)):
        return column.cast(kind)
    if kind == PROPERTIES and (pairs := _properties(column)) is not None:
        return pairs
    wanted = _WANTED.get(name, str(kind))
    raise ConfigError(f"{name} comes from {origin} of type {given}; it must be {wanted}. Cast or rename it before the consumer.")


_WANTED = {
    "partition": "an integer",
    "sequence_number": "an integer",
    "part": "an integer",
    "enqueued_time": "a timestamp with time zone",
    "properties": "a map or a list of (key, value)",
}


def _times(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Those that are dates; others are null."""
    limit, ticks = 2**63 - 1, {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
    numbers = column.cast(pa.int64())
    dates = pc.and_(pc.greater_equal(numbers, max(EARLIEST * ticks, -limit)), pc.less(numbers, min((LATEST + 1) * ticks, limit)))
    return pc.if_else(dates, column, None).cast(kind, safe=False)


def _numbers(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Whole numbers of texts, decimals and other integers; null where one is none, or does not fit."""
    wide = pa.decimal256(76, 0)
    if not (pa.types.is_integer(column.type) or pa.types.is_decimal(column.type)):
        text = column.cast(pa.string())
        digits = pc.match_substring_regex(text, r"^\s*[+-]?[0-9]{1,30}\s*$")
        column = pc.utf8_trim_whitespace(pc.if_else(digits, text, None))
    numbers, limit = column.cast(wide), 1 << (kind.bit_width - 1)
    lowest, highest = (pa.scalar(Decimal(limit), wide) for limit in (-limit, limit - 1))
    fits = pc.and_(pc.greater_equal(numbers, lowest), pc.less_equal(numbers, highest))
    return pc.if_else(fits, numbers, None).cast(kind)


def _properties(column: pa.Array) -> pa.Array | None:
    types, kind = pa.types, column.type
    if types.is_map(kind):
        pair = {"key": kind.key_type, "value": kind.item_type}
    elif types.is_list(kind) and types.is_struct(kind.value_type):
        pair = {f.name: f.type for f in kind.value_type}
    elif types.is_list(kind) and types.is_null(kind.value_type) and not len(column.flatten()):
        return column.cast(PROPERTIES)  # of rows as dicts, none of which has a header
    else:
        return None
    texts = (pa.string(), pa.large_string())  # large: spark.sql.execution.arrow.useLargeVarTypes
    fits = set(pair) == {"key", "value"} and pair["key"] in texts and pair["value"] in (*texts, pa.binary(), pa.large_binary())
    return column.cast(PROPERTIES) if fits else None


def _keys(columns: Frame, spec: Prepare) -> pa.Array:
    settings = spec.keys
    named = _parts(columns, settings.columns or (MESSAGE_ID,), "idempotence_key")
    before = [keys.prefix(spec.consumer, spec.keyspace), *hashing.pieces(_parts(columns, settings.scope_columns, "key_scope"))]
    absent = hashing.all_null(named)
    encoded = hashing.encode(named, [*before, keys.USER_KEY])
    if settings.falls_back and spec.positions and absent.true_count:
        encoded = pc.if_else(absent, hashing.encode(_place(columns, spec), [*before, keys.POSITION_KEY]), encoded)
        absent = pa.repeat(pa.scalar(False), len(absent))
    return hashing.key_hash(encoded, absent)


def key_texts(rows: pa.Table, spec: Prepare) -> pa.Array:
    """The readable keys of prepared rows; null where there is none."""
    columns: Frame = {name: _whole(rows[name]) for name in rows.column_names}
    named = _parts(columns, spec.keys.columns or (MESSAGE_ID,), "idempotence_key")
    absent, shown = hashing.all_null(named), hashing.text(named)
    if spec.keys.falls_back and spec.positions:
        return pc.if_else(absent, hashing.text(_place(columns, spec)), shown) if absent.true_count else shown
    return pc.if_else(absent, None, shown)


def payload_hashes(rows: pa.Table, spec: Prepare) -> pa.Array:
    """The payload hashes of prepared rows."""
    columns: Frame = {name: _whole(rows[name]) for name in rows.column_names}
    slices = [{name: c.slice(at, _HASHED) for name, c in columns.items()} for at in range(0, max(rows.num_rows, 1), _HASHED)]
    return pa.concat_arrays([_payload_hashes(part, spec) for part in slices])


_HASHED = 8_192
"""Rows whose payloads are encoded at once: what fits a cache is quicker than fifty thousand bodies joined."""


def _payload_hashes(columns: Frame, spec: Prepare) -> pa.Array:
    chosen = _parts(columns, spec.keys.payload, "payload")
    encoded = hashing.encode(chosen or _parts(columns, ("body",), "payload"))
    if chosen and (unknown := _payload_unknown(columns, chosen, spec)).true_count:
        encoded = pc.if_else(unknown, hashing.encode(_parts(columns, ("body",), "payload")), encoded)
    return hashing.payload_hash(encoded)


def _payload_unknown(columns: Frame, chosen: Sequence[pa.Array], spec: Prepare) -> pa.Array:
    """Rows that only the body tells apart: they have no value that counts, and did not decode.

    A decoded event may have null in all of them: that is what counts of it. Without a decoder nobody knows which of the two it is.
    """
    absent = hashing.all_null(chosen)
    return absent if spec.decoder is None else pc.and_(absent, columns["data"].is_null())


def _sequence(columns: Frame, spec: Prepare) -> tuple[pa.Array, pa.Array]:
    named = _parts(columns, spec.keys.sequence, "sequence_key")
    place = _parts(columns, keys.SEQUENCE_PLACE, "sequence_key")
    absent = hashing.all_null(named)
    encoded = hashing.encode([*place, *named], [keys.prefix(spec.consumer, spec.keyspace), keys.SEQUENCE_KEY])
    return hashing.key_hash(encoded, absent), pc.if_else(absent, None, hashing.text(named))


def _place(columns: Frame, spec: Prepare) -> list[pa.Array]:
    number = hashing.incarnations(columns["source"], columns["topic"], spec.incarnations)
    return _parts(columns | {"incarnation": number}, spec.keys.position_columns, "position")


def _parts(columns: Frame, names: Sequence[str], what: str) -> list[pa.Array]:
    missing = [name for name in names if name not in columns and name != MESSAGE_ID and name.split(".")[0] not in columns]
    if missing:
        raise ConfigError(
            f"{what} names {', '.join(map(repr, missing))}, which the events do not have; they have {', '.join(columns)}. "
            "SQL expressions need Spark."
        )
    return [hashing.canonical(name, _part(columns, name)) for name in names]


def _part(columns: Frame, name: str) -> pa.Array:
    if name in columns:
        return columns[name]
    if name == MESSAGE_ID:
        return hashing.message_id(columns["properties"])
    first, *path = name.split(".")
    return hashing.field(columns[first], path, name)


def resolves(name: str, columns: pa.Schema) -> bool:
    """Whether a part of a key is a column or a field of one, spelled exactly so: what is none is an expression, which Spark computes."""
    if name in columns.names or name == MESSAGE_ID:
        return True
    first, *path = name.split(".")
    kind = columns.field(first).type if first in columns.names else None
    for step in path:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(step) < 0:
            return False
        kind = kind.field(step).type
    return kind is not None
