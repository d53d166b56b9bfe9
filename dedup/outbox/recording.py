"""What `tx.publish` recorded, and how its rows become messages with ids. Pure, but for random ids.

Messages are made in a thread while the store takes the rows of sinks: ids and lanes of many take as long as writing them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import HandlerError, RowsMisfit, RowsRefused
from checkpoint.position import KEY_ONLY, Ints
from dedup.core.envelope import POSITION
from dedup.core.index import Index
from dedup.core.keys import key_bytes
from dedup.core.messages import MESSAGES, Messages, hex_text, lanes, random_ids
from dedup.core.rows import Rows, named
from dedup.core.value_rules import Wrong, plainly
from dedup.core.values import shown

ORDER = "_order"
"""Numbers the messages of one event, where the events are handled one by one."""

MANY = 1_000
"""Rows from which on a thread is worth it."""


@dataclass(frozen=True)
class Names:
    """Which columns of the rows are what."""

    key: str | None
    id: str | None
    body: str
    headers: str | None
    order: str | None

    def columns(self) -> list[str]:
        """All of them."""
        return [name for name in (self.key, self.id, self.body, self.headers, self.order) if name is not None]

    def own(self) -> Names:
        """Those of rows that `of_event` made."""
        return Names(self.key and "_key", self.id and "_id", "_body", self.headers and "_headers", ORDER)


def of_event(rows: Any, names: Names, position: Mapping[str, Any], first: int) -> list[dict[str, Any]]:
    """The rows that a handler of one event publishes, with the event's position and numbered from `first`; their columns are `names.own()`.

    Raises HandlerError for rows that are neither a dict nor a list of dicts, RowsRefused where one lacks a column, or has a value that no
    message can have there.
    """
    rows = named(rows)
    given: Sequence[Any] = [rows] if isinstance(rows, Mapping) else list(map(named, rows)) if isinstance(rows, list | tuple) else rows
    if not isinstance(given, list | tuple) or not all(isinstance(row, Mapping) for row in given):
        raise HandlerError(f"In a handler of events tx.publish takes a dict or a list of dicts, not {type(rows).__name__}.")
    asked = [name for name in names.columns() if name != names.order]
    for row in given:
        if missing := [name for name in asked if name not in row]:
            raise RowsRefused(f"tx.publish: the row has no {', '.join(missing)}. It has {', '.join(map(str, row)) or 'nothing'}.")
    parts = [(ours, theirs, *_PARTS[ours]) for ours, theirs in zip(astuple(names.own()), astuple(names), strict=True) if ours in _PARTS]
    return [
        {**{ours: _part(row[name], make, name) for ours, name, make, _ in parts}, **position, ORDER: first + number}
        for number, row in enumerate(given)
    ]


def rows_of(recorded: list[dict[str, Any]]) -> pa.Table:
    """Rows of `of_event`, of many events, as a table."""
    return pa.table({name: pa.array([row[name] for row in recorded], _PARTS[name][1] if name in _PARTS else None) for name in recorded[0]})


def arrow_of(rows: Rows, names: Names) -> pa.Table:
    """Rows that are to become messages; each Python value of a message is converted by itself. Raises RowsRefused."""
    plain = rows.plain()
    if plain is None:
        return rows.arrow()
    parts = {theirs: _PARTS[ours] for ours, theirs in zip(astuple(names.own()), astuple(names), strict=True) if ours in _PARTS}
    read = {*POSITION, names.order, *parts}
    return pa.table({n: _column(plain.column(n), parts.get(n), n) if n in read else pa.nulls(len(plain.rows)) for n in plain.names})


def _column(values: Sequence[Any], part: tuple[Callable[[Any], Any], pa.DataType] | None, name: str) -> pa.Array:
    try:
        return pa.array(values) if part is None else pa.array([_part(value, part[0], name) for value in values], part[1])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise RowsRefused(f"tx.publish: column {name!r}: {error}") from error


def _part(value: Any, make: Callable[[Any], Any], name: str) -> Any:
    try:
        plain = plainly(value)
        return None if plain is None else make(plain)
    except (Wrong, UnicodeError) as wrong:
        raise RowsRefused(f"tx.publish: column {name!r} of a row is {shown(value)} ({type(value).__name__}): {wrong}.") from wrong


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise Wrong("it must be bytes or text; for JSON, json.dumps(...)")


def _id_of(value: Any) -> str:
    if isinstance(value, str | UUID) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise Wrong("an id is a text")


def _headers_of(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple) or not all(isinstance(header, Mapping) for header in value):
        raise Wrong('headers are a list of {"key": text, "value": bytes}, as the column properties')
    return [_header(header) for header in value]


def _header(header: Mapping[str, Any]) -> dict[str, Any]:
    if not {"key"} <= header.keys() <= {"key", "value"} or not isinstance(header["key"], str | bytes):
        raise Wrong('a header is {"key": text, "value": bytes}')
    key, value = header["key"], plainly(header.get("value"))
    return {"key": key.decode() if isinstance(key, bytes) else key, "value": None if value is None else _bytes_of(value)}


_PARTS: dict[str, tuple[Callable[[Any], Any], pa.DataType]] = {
    "_key": (_bytes_of, pa.binary()),
    "_id": (_id_of, pa.string()),
    "_body": (_bytes_of, pa.binary()),
    "_headers": (_headers_of, MESSAGES.field("headers").type),
}
"""Parts of a message, by the columns of `Names.own`: what makes them of Python values, each of its own, and their types."""


def messages_of(topic: str, rows: pa.Table, names: Names, index: Index, given: Ints) -> Messages:
    """The rows as messages: in the order of their positions where they have them, because Spark keeps none, else in their own.

    Args:
        rows: with the columns that `names` names; with those of POSITION where ids are to be made of incoming keys.
        index: the events of the chunk; `given`: those that the handler was given.

    Raises:
        RowsMisfit: a column is missing or of a type that no message can have.
        HandlerError: an id is null or comes twice, or a row's position is not one that the handler was given.
    """
    if missing := [name for name in names.columns() if name not in rows.column_names]:
        raise RowsMisfit(
            f"tx.publish to {topic!r}: the rows have no column {', '.join(missing)}. They have {', '.join(rows.column_names)}. "
            "Name the column of the message with body=, that of its key with key=."
        )
    at = None
    if set(POSITION) <= set(rows.column_names) and index.partitions != (KEY_ONLY,):
        rows, at = _in_position_order(topic, rows, names.order, index, given)
    keys = _bytes(rows, names.key, topic)
    ids, derived = _ids(topic, rows, names, index, at)
    headers = _headers(rows, names.headers, topic)
    table = pa.table([ids, keys, _bytes(rows, names.body, topic), headers, lanes(topic, keys)], schema=MESSAGES)
    return Messages(topic, table, derived)


def _in_position_order(topic: str, rows: pa.Table, order: str | None, index: Index, given: Ints) -> tuple[pa.Table, Ints]:
    """The rows, and the event of each."""
    at = index.locate(rows.select(list(POSITION)))
    if not np.isin(at, given).all():
        raise HandlerError(f"tx.publish to {topic!r}: a row has the position of an event that the handler was not given.")
    numbers = np.arange(len(at)) if order is None else _numbers(topic, rows, order).to_numpy()
    ranks = np.lexsort((numbers, at))
    return (rows, at) if bool((ranks[1:] > ranks[:-1]).all()) else (rows.take(pa.array(ranks)), at[ranks])


def _ids(topic: str, rows: pa.Table, names: Names, index: Index, at: Ints | None) -> tuple[pa.Array, bool]:
    """The ids, and whether they are made of the incoming keys."""
    if names.id is not None:
        ids = _text(rows[names.id], topic)
        if ids.null_count:
            raise RowsRefused(f"tx.publish to {topic!r}: {ids.null_count} of {len(ids)} rows have no id. Leave id= out to get random ones.")
        return ids, False
    if names.order is None or at is None:
        return random_ids(rows.num_rows), False
    numbers = _numbers(topic, rows, names.order)
    ids = _derived(topic, numbers, index, at)
    return ids if _told_apart(at, numbers.to_numpy(), index) else _distinct(ids, topic), True


def _derived(topic: str, numbers: pa.Array, index: Index, at: Ints) -> pa.Array:
    """(consumer, incoming key, ordinal) as text: the key is a hash over both already. The topic is in it to tell two topics apart."""
    keys = hex_text(_raw(key_bytes(index.high[at], index.low[at])), 16)
    place = pa.scalar(f"{hashlib.sha256(topic.encode()).hexdigest()[:8]}-")
    return pc.binary_join_element_wise(keys, place, numbers.cast(pa.string()), "")


def _told_apart(at: Ints, numbers: Ints, index: Index) -> bool:
    """Whether no event has a number twice and no two events have a key with the same first half: quicker to see than distinct ids."""
    new = np.append(True, at[1:] != at[:-1])
    halves = np.sort(index.high[at[new]])
    return bool((new[1:] | (numbers[1:] != numbers[:-1])).all() and (halves[1:] != halves[:-1]).all())


def _numbers(topic: str, rows: pa.Table, order: str) -> pa.Array:
    try:
        numbers = _flat(rows[order]).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise RowsMisfit(f"tx.publish to {topic!r}: order={order!r} must be whole numbers ({error}).") from error
    if numbers.null_count:
        raise HandlerError(
            f"tx.publish to {topic!r}: order={order!r} is null in {numbers.null_count} rows; it numbers an event's messages."
        )
    return numbers


def require_told_apart(calls: Sequence[Messages]) -> None:
    """Raise HandlerError where two calls of `tx.publish` for one topic have made one id of an event's key and a number."""
    by_topic = defaultdict[str, list[pa.ChunkedArray]](list)
    for messages in calls:
        if messages.derived:
            by_topic[messages.topic].append(messages.rows["id"])
    for topic, ids in by_topic.items():
        if len(ids) > 1:
            _distinct(pa.chunked_array([chunk for column in ids for chunk in column.chunks]), topic)


def _distinct(ids: pa.Array | pa.ChunkedArray, topic: str) -> Any:
    if pc.count_distinct(ids).as_py() != len(ids):
        counts = ids.value_counts()
        twice = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"].as_py()
        raise HandlerError(
            f"tx.publish to {topic!r}: the id {twice!r} comes twice; the receiver would take the second for a duplicate of the first. "
            "Let order= number all messages of one event to this topic, over all calls."
        )
    return ids


def _raw(keys: pa.Array) -> bytes:
    return keys.buffers()[1].to_pybytes() if len(keys) else b""


def _flat(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _bytes(rows: pa.Table, name: str | None, topic: str) -> pa.Array:
    """A column as bytes: text is UTF-8."""
    if name is None:
        return pa.nulls(rows.num_rows, pa.binary())
    column = _flat(rows[name])
    if pa.types.is_null(column.type):
        return column.cast(pa.binary())
    if not _is_text(column.type) and not _is_bytes(column.type):
        raise RowsMisfit(
            f"tx.publish to {topic!r}: {name!r} is of type {column.type}; it must be bytes or text. JSON: to_json(struct(...))."
        )
    return column.cast(pa.binary())


def _text(column: pa.ChunkedArray, topic: str) -> pa.Array:
    flat = _flat(column)
    if not (_is_text(flat.type) or pa.types.is_integer(flat.type) or pa.types.is_null(flat.type)):
        raise RowsMisfit(f"tx.publish to {topic!r}: ids are text, not {flat.type}.")
    return flat.cast(pa.string())


def _headers(rows: pa.Table, name: str | None, topic: str) -> pa.Array:
    kind = MESSAGES.field("headers").type
    if name is None:
        return pa.nulls(rows.num_rows, kind)
    try:
        return _flat(rows[name]).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RowsMisfit(f"tx.publish to {topic!r}: {name!r} must be a list of (key, value), as the column properties: {error}") from error


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


class Ahead:
    """Makes messages beside what the block does; the block ends once they are made, also where it raises."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Ahead:
        return self

    def begin(self, rows: int, job: Callable[[], Messages]) -> Callable[[], Messages]:
        """Begin where there are many rows; returns what waits for the messages and raises what the job raised."""
        if rows < MANY:
            return job
        self._pool = self._pool or ThreadPoolExecutor(1, "dedup-messages")
        return self._pool.submit(job).result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown()
