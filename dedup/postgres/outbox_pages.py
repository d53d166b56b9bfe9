"""Pages of messages: many of one topic and lane in one row of PostgreSQL, each kind of value as an array.

Storing and marking a page costs what a single row costs. The n-th message of a page has the number 1000 * page + n - 1. Pure. Called by
outbox.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dedup.index import Ints
from dedup.outbox.message import Message, Messages

NUMBERS = 1_000
"""Numbers of a page; more than it ever has messages."""

PER_PAGE = 500
"""Messages of a page at most: what has to be unpacked where something happens to one of them."""

PER_BATCH = 16
"""Pages that are made while the server takes those before them."""

BYTES = 1 << 20
"""Bytes of a page's bodies, about: one more body may be in it."""


PAGES = pa.schema(
    [
        ("consumer_id", pa.int32()),
        ("topic", pa.string()),
        ("lane", pa.int16()),
        ("messages", pa.int32()),
        ("size", pa.int64()),
        ("keys", pa.list_(pa.binary())),
        ("ids", pa.list_(pa.string())),
        ("bodies", pa.list_(pa.binary())),
        ("header_ends", pa.list_(pa.int32())),
        ("header_names", pa.list_(pa.string())),
        ("header_values", pa.list_(pa.binary())),
    ]
)
"""Columns of `outbox_page` that are written; one row per page."""


class Page(NamedTuple):
    """A page as it is read."""

    page: int
    topic: str
    keys: list[bytes | None]
    ids: list[str]
    bodies: list[bytes | None]
    header_ends: list[int] | None
    header_names: list[str] | None
    header_values: list[bytes | None] | None

    @property
    def numbers(self) -> range:
        """The numbers of its messages."""
        return range(NUMBERS * self.page, NUMBERS * self.page + len(self.ids))

    def messages(self) -> list[Message]:
        """Its messages, in order."""
        columns = (self.numbers, repeat(self.topic), self.keys, self.ids, self.bodies)
        if self.header_ends is None:
            return list(map(Message, *columns))
        pairs = list(zip(self.header_names or (), self.header_values or (), strict=True))
        return list(map(Message, *columns, [tuple(pairs[first:end]) for first, end in pairwise([0, *self.header_ends])]))


Texts = Callable[[pa.Array], pa.Array]
"""Texts -> texts that the database can hold."""


def pages_of(consumer_id: int, messages: Messages, texts: Texts | None = None) -> tuple[int, pa.Schema, Iterator[pa.RecordBatch]]:
    """Messages as rows of `outbox_page`, a few at a time: those of a lane together, in their order. How many rows, and their schema."""
    lanes, sizes = messages.rows["lane"].to_numpy(), _sizes(messages.rows["body"])
    order = np.argsort(lanes, kind="stable")
    ends = np.append(_cuts(lanes[order], sizes[order]), len(order))
    headers = messages.rows["headers"].null_count < len(order)
    schema = PAGES if headers else pa.schema([f for f in PAGES if not f.name.startswith("header_")])

    def batches() -> Iterator[pa.RecordBatch]:
        for begin in range(0, len(ends) - 1, PER_BATCH):
            some = ends[begin : begin + PER_BATCH + 1]
            at = order[some[0] : some[-1]]
            rows = messages.rows.take(pa.array(at))
            columns = _columns(consumer_id, messages.topic, rows, sizes[at], (some - some[0]).astype(np.int32))
            if texts is not None:
                columns = {name: _texts(column, texts) for name, column in columns.items()}
            yield pa.RecordBatch.from_pydict({name: columns[name] for name in schema.names}, schema)

    return len(ends) - 1, schema, batches()


def _texts(column: pa.Array, texts: Texts) -> pa.Array:
    """A column with what `texts` makes of its texts, also in lists."""
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        return pa.ListArray.from_arrays(column.offsets, texts(column.values))
    return texts(column) if pa.types.is_string(column.type) else column


def _columns(consumer_id: int, topic: str, rows: pa.Table, sizes: Ints, ends: Any) -> dict[str, pa.Array]:
    first, at, count = ends[:-1], pa.array(ends), len(ends) - 1
    lists = {name: pa.ListArray.from_arrays(at, _flat(rows[of])) for name, of in (("keys", "key"), ("ids", "id"), ("bodies", "body"))}
    return {
        "consumer_id": pa.repeat(pa.scalar(consumer_id, pa.int32()), count),
        "topic": pa.repeat(pa.scalar(topic, pa.string()), count),
        "lane": pa.array(rows["lane"].to_numpy()[first]),
        "messages": pa.array(np.diff(ends)),
        "size": pa.array(np.add.reduceat(sizes, first)),
        **lists,
        **_headers(rows["headers"], ends),
    }


def _sizes(bodies: pa.ChunkedArray) -> Ints:
    return np.asarray(pc.binary_length(bodies).fill_null(0).cast(pa.int64()).to_numpy())


def _cuts(lanes: Any, sizes: Ints) -> Ints:
    """Where pages begin."""
    new = np.append(True, lanes[1:] != lanes[:-1])
    begun = np.flatnonzero(new)
    within = np.arange(len(lanes)) - np.repeat(begun, np.diff(np.append(begun, len(lanes))))
    before = (np.cumsum(sizes) - sizes) // BYTES
    return np.flatnonzero(new | (within % PER_PAGE == 0) | np.append(False, before[1:] != before[:-1]))


def _headers(headers: pa.ChunkedArray, ends: Any) -> dict[str, pa.Array]:
    """Flat over the messages of each page, and where those of each message end in it."""
    column = _flat(headers)
    counts = pc.list_value_length(column).fill_null(0).to_numpy()
    total = np.append(0, np.cumsum(counts))
    at = pa.array(total[ends].astype(np.int32))
    within = total[1:] - np.repeat(total[ends[:-1]], np.diff(ends))
    pairs = column.flatten()
    names = pc.replace_substring(pairs.field("key"), "\0", "\u2400") if len(pairs) else pa.array([], pa.string())  # text holds no NUL
    return {
        "header_ends": pa.ListArray.from_arrays(pa.array(ends), pa.array(within.astype(np.int32))),
        "header_names": pa.ListArray.from_arrays(at, names),
        "header_values": pa.ListArray.from_arrays(at, pairs.field("value")),
    }


def _flat(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
