"""Batch records as documents of the ledger, and back as one table. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from dedup.delta.header import Header
from dedup.store import BATCHES

_COLUMNS = ("source", "topic", "partition")
_RANGES = ("seen", "duplicates", "skipped", "late")

ALL_BATCHES = pa.schema(
    [
        *BATCHES,
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("committed_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""What `Store.batches` returns."""


def batch_docs(batches: pa.Table | None) -> Iterator[tuple[str, str, int, str]]:
    """(source, topic, partition, document) of each batch record; ranges become pairs."""
    for row in batches.to_pylist() if batches is not None else ():
        doc: dict[str, Any] = {k: v for k, v in row.items() if k not in _COLUMNS}
        doc |= {k: [[r["first"], r["last"]] for r in doc[k]] for k in _RANGES}
        yield row["source"], row["topic"], row["partition"], json.dumps(doc, separators=(",", ":"))


def batch_table(rows: Iterable[Mapping[str, Any]], headers: Mapping[int, Header]) -> pa.Table:
    """ALL_BATCHES from ledger rows of kind `batch` and the headers of their decisions, in seq order."""
    found = []
    for row in sorted(rows, key=lambda r: (r["seq"], r["source"], r["topic"], r["partition"])):
        doc, header = json.loads(row["doc"]), headers[row["seq"]]
        doc |= {k: [{"first": first, "last": last} for first, last in doc[k]] for k in _RANGES}
        told = {"generation": header.head.generation, "epoch": header.head.epoch, "seq": header.seq, "committed_at": header.committed_at}
        found.append({**{c: row[c] for c in _COLUMNS}, **doc, **told})
    return pa.Table.from_pylist(found, schema=ALL_BATCHES)
