"""From an input table to events with keys, without Spark: envelope, decode, keys, as dedup/spark/prepare.py does it.

For code that runs without Spark and for tests. Same columns, same keys, same verdicts; SQL expressions and column functions are
Spark's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError
from deadletter.letter import PROPERTIES
from dedup import arrow_decode, arrow_keys, arrow_registry, keys
from dedup.decode import Decoder
from dedup.envelope import APPENDED, EARLIEST, ENVELOPE, LATEST, Constant, Expression, Named, Origin, Prepare, does_not_fit, layout

Frame = dict[str, pa.Array]

_KEY, _KEY_TEXT, _PAYLOAD_HASH, _UNDECODABLE = keys.INTERNAL


def prepare(table: pa.Table, spec: Prepare) -> pa.Table:
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
    """What `prepare` returns but for `_key_text` and `_payload_hash`, which can wait.

    Args:
        beside: compute `_payload_hash` of bodies by a thread while they are decoded, which is mostly not Python's work; then it is there.

    Raises:
        ConfigError: as `prepare`.
    """
    plan = layout(table.column_names, spec)
    columns: Frame = {name: _one(table, origin, name) for name, origin in plan.envelope.items()}
    columns |= {name: _whole(table[name]) for name in plan.extras}
    undecodable = pa.repeat(pa.scalar(False), table.num_rows)
    hashing = _hash_bodies(columns["body"], spec) if beside else None
    if isinstance(spec.decoder, Decoder):
        columns["data"], undecodable = _decoded(columns, spec.decoder)
    elif spec.decoder is not None:
        raise ConfigError("A function as decode= computes a Spark column; without Spark use one of dedup.decode.")
    columns |= {keys.LOG_TIME: _log_time(table, plan.log_time), _KEY: _keys(columns, spec), _UNDECODABLE: undecodable}
    if spec.keys.sequence:
        columns |= dict(zip(keys.SEQUENCE, _sequence(columns, spec), strict=True))
    return pa.table(columns if hashing is None else columns | {_PAYLOAD_HASH: hashing.result()})


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


def _decoded(columns: Frame, decoder: Decoder) -> tuple[pa.Array, pa.Array]:
    if decoder.registry is not None:
        return arrow_registry.decode(columns["body"], columns["properties"], decoder)
    return arrow_decode.decode(columns["body"], decoder)


def complete(rows: pa.Table, spec: Prepare, hashes: pa.Array | None = None) -> pa.Table:
    """Some rows that `prepare_keys` returned, with all columns of `prepare`.

    Args:
        hashes: their `_payload_hash`, where it is known already.
    """
    at = rows.column_names.index(_KEY) + 1
    with_text = rows.add_column(at, _KEY_TEXT, key_texts(rows, spec))
    return with_text.add_column(at + 1, _PAYLOAD_HASH, payload_hashes(rows, spec) if hashes is None else hashes)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _one(table: pa.Table, origin: Origin, name: str) -> pa.Array:
    kind = ENVELOPE.field(name).type
    if isinstance(origin, Constant):
        return pa.repeat(pa.scalar(origin.value, kind), table.num_rows)
    if isinstance(origin, Expression):
        raise ConfigError(f"{name} is the SQL expression {origin.sql!r}, which needs Spark. Name a column.")
    return _fit(_whole(table[origin.column]), kind, name, origin)


def _fit(column: pa.Array, kind: pa.DataType, name: str, origin: Named) -> pa.Array:
    types, given = pa.types, column.type
    text = types.is_string(given) or types.is_large_string(given)
    if types.is_timestamp(kind) and types.is_timestamp(given) and given.tz:
        return _times(column, kind)
    if given == kind or types.is_null(given):
        return column.cast(kind)
    if types.is_integer(kind) and (text or types.is_integer(given) or (types.is_decimal(given) and given.scale == 0)):
        return _numbers(column, kind)
    if types.is_string(kind) and (text or (name == "offset" and types.is_integer(given))):
        return column.cast(kind)
    if types.is_binary(kind) and (text or types.is_large_binary(given) or types.is_fixed_size_binary(given)):
        return column.cast(kind)
    if kind == PROPERTIES and (pairs := _properties(column)) is not None:
        return pairs
    raise does_not_fit(name, repr(origin.column), str(given), _WANTED.get(name, str(kind)))


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
    limit = 1 << (kind.bit_width - 1)
    whole = column.cast(pa.string())
    digits = pc.match_substring_regex(whole, r"^\s*[+-]?[0-9]{1,30}\s*$")
    found = [None if value is None else int(value) for value in pc.if_else(digits, whole, None).to_pylist()]
    return pa.array([None if value is None or not -limit <= value < limit else value for value in found], kind)


def _properties(column: pa.Array) -> pa.Array | None:
    types, kind = pa.types, column.type
    if types.is_map(kind):
        pair = {"key": kind.key_type, "value": kind.item_type}
    elif types.is_list(kind) and types.is_struct(kind.value_type):
        pair = {f.name: f.type for f in kind.value_type}
    else:
        return None
    texts = (pa.string(), pa.large_string())  # large: spark.sql.execution.arrow.useLargeVarTypes
    fits = list(pair) == ["key", "value"] and pair["key"] in texts and pair["value"] in (*texts, pa.binary(), pa.large_binary())
    return column.cast(PROPERTIES) if fits else None


def _keys(columns: Frame, spec: Prepare) -> pa.Array:
    settings = spec.keys
    named = _parts(columns, settings.columns or (keys.MESSAGE_ID,), "idempotence_key")
    before = [keys.prefix(spec.consumer, spec.keyspace), *arrow_keys.pieces(_parts(columns, settings.scope_columns, "key_scope"))]
    absent = arrow_keys.all_null(named)
    encoded = arrow_keys.encode(named, [*before, keys.USER_KEY])
    if settings.falls_back and spec.positions and absent.true_count:
        encoded = pc.if_else(absent, arrow_keys.encode(_place(columns, spec), [*before, keys.POSITION_KEY]), encoded)
        absent = pa.repeat(pa.scalar(False), len(absent))
    return arrow_keys.key_hash(encoded, absent)


def key_texts(rows: pa.Table, spec: Prepare) -> pa.Array:
    """The readable keys of prepared rows; null where there is none."""
    columns: Frame = {name: _whole(rows[name]) for name in rows.column_names}
    named = _parts(columns, spec.keys.columns or (keys.MESSAGE_ID,), "idempotence_key")
    absent, shown = arrow_keys.all_null(named), arrow_keys.text(named)
    if spec.keys.falls_back and spec.positions:
        return pc.if_else(absent, arrow_keys.text(_place(columns, spec)), shown) if absent.true_count else shown
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
    encoded = arrow_keys.encode(chosen or _parts(columns, ("body",), "payload"))
    if chosen and (absent := arrow_keys.all_null(chosen)).true_count:
        # As in what does not decode: only the body tells such events apart.
        encoded = pc.if_else(absent, arrow_keys.encode(_parts(columns, ("body",), "payload")), encoded)
    return arrow_keys.payload_hash(encoded)


def _sequence(columns: Frame, spec: Prepare) -> tuple[pa.Array, pa.Array]:
    named = _parts(columns, spec.keys.sequence, "sequence_key")
    place = _parts(columns, keys.SEQUENCE_PLACE, "sequence_key")
    absent = arrow_keys.all_null(named)
    encoded = arrow_keys.encode([*place, *named], [keys.prefix(spec.consumer, spec.keyspace), keys.SEQUENCE_KEY])
    return arrow_keys.key_hash(encoded, absent), pc.if_else(absent, None, arrow_keys.text(named))


def _place(columns: Frame, spec: Prepare) -> list[pa.Array]:
    number = arrow_keys.incarnations(columns["source"], columns["topic"], spec.incarnations)
    return _parts(columns | {"incarnation": number}, spec.keys.position_columns, "position")


def _parts(columns: Frame, names: Sequence[str], what: str) -> list[pa.Array]:
    missing = [name for name in names if name not in columns and name != keys.MESSAGE_ID and name.split(".")[0] not in columns]
    if missing:
        raise ConfigError(
            f"{what} names {', '.join(map(repr, missing))}, which the events do not have; they have {', '.join(columns)}. "
            "SQL expressions need Spark."
        )
    return [arrow_keys.canonical(name, _part(columns, name)) for name in names]


def _part(columns: Frame, name: str) -> pa.Array:
    if name in columns:
        return columns[name]
    if name == keys.MESSAGE_ID:
        return arrow_keys.message_id(columns["properties"])
    first, *path = name.split(".")
    return arrow_keys.field(columns[first], path, name)
