"""A sink table as it is now: its columns, its identity, and whether delta-rs may write to it.

Promises that a table with any feature not known to be safe takes the row path (Spark appends). Called by the transaction and the publisher.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from checkpoint.errors import SinkMismatch
from dedup.delta.engine import Engine, Handle
from dedup.delta.ledger import FORBIDDEN
from dedup.delta.stats import INDEXED_COLUMNS
from dedup.delta.types import UnknownType, arrow_schema, sql_type
from dedup.store import Rows

SAFE_FEATURES = frozenset(
    {
        "appendOnly",
        "invariants",
        "checkConstraints",
        "changeDataFeed",
        "generatedColumns",
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "v2Checkpoint",
        "variantType",
    }
)
"""Writer features under which adding a file is all there is to an append - as long as no column or property uses them (checked).

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#valid-feature-names-in-table-features, read 2025-06; and each one tried.
"""

_SPECIAL_COLUMN = {
    "delta.generationExpression": "a generated column",
    "delta.identity.start": "an identity column",
    "delta.invariants": "an invariant",
    "CURRENT_DEFAULT": "a default value",
    "delta.typeChanges": "a widened type",
    "__CHAR_VARCHAR_TYPE_STRING": "a length limit",
}

_COMPUTED = frozenset({"delta.generationExpression", "delta.identity.start", "CURRENT_DEFAULT"})

_PARTITION_TYPES = (pa.types.is_integer, pa.types.is_string, pa.types.is_boolean, pa.types.is_date, pa.types.is_decimal)


@dataclass(frozen=True)
class Sink:
    """One snapshot of a sink."""

    name: str
    uri: str
    table: DeltaTable
    schema: pa.Schema
    partition_by: tuple[str, ...]
    fingerprint: str
    special: tuple[str, ...]  # why delta-rs must not write; empty: it may
    computed: frozenset[str] = frozenset()  # columns that the table fills where the rows lack them
    generated: dict[str, str] = field(default_factory=dict)  # generated column -> SQL
    always: frozenset[str] = frozenset()  # identity columns that rows must not bring
    constraints: dict[str, str] = field(default_factory=dict)  # what rows must satisfy besides types and NOT NULL: name -> SQL
    indexed: int = INDEXED_COLUMNS

    def travelling(self) -> Sink:
        """Without the handle of the table, which stays here: what tasks write rows by."""
        return replace(self, table=None)  # type: ignore[arg-type]

    @property
    def table_id(self) -> str:
        """Identity of the table: a re-created one has another."""
        return str(self.table.metadata().id)

    @property
    def mode(self) -> str:
        """`files` or `rows`."""
        return "rows" if self.special else "files"


class Sinks:
    """Sinks by URI, looked at again and again. Not picklable, not for two threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._handles: dict[str, Handle] = {}
        self.kept: set[object] = set()  # what restores.py has found to be there

    def open(self, name: str, uri: str, rows: Rows | None = None) -> Sink:
        """The sink now.

        Raises:
            SinkMismatch: there is none (with the statement that would create it for these rows), it has a column of an unknown type, or
                a property under which it forgets what was published.
        """
        table = self.table(uri)
        if table is None:
            raise SinkMismatch(f"The sink {name!r} has no Delta table at {uri}. {_creation(uri, rows)}")
        if FORBIDDEN in table.metadata().configuration:
            raise SinkMismatch(
                f"{FORBIDDEN} is set on the sink {name!r}: Delta would forget what was published there, and it would come twice. "
                f"Run ALTER TABLE delta.`{uri}` UNSET TBLPROPERTIES ('{FORBIDDEN}')."
            )
        if hidden := sorted(self.engine.hidden & set(table.protocol().writer_features or ())):
            raise SinkMismatch(
                f"The sink {name!r} has the table features {', '.join(hidden)}, and Spark does not tell which columns use them: rows "
                "cannot be checked before they are decided. Drop the features, or use another table, or DeltaStore(engine='delta-rs')."
            )
        return _describe(name, uri, table, self.engine.reasons)

    def table(self, uri: str) -> DeltaTable | None:
        """The table there now, if any."""
        if uri not in self._handles:
            self._handles[uri] = self.engine.handle(uri)
        return self._handles[uri].look()

    def forget(self, uri: str) -> None:
        """Open it anew next time."""
        self._handles.pop(uri, None)


def _creation(uri: str, rows: Rows | None) -> str:
    columns = ", ".join(f"`{f.name}` {sql_type(f.type)}" for f in rows.schema) if rows is not None else "..."
    return f"Create it: CREATE TABLE delta.`{uri}` ({columns}) USING delta; or deltalake.DeltaTable.create({uri!r}, schema=...)."


def _describe(name: str, uri: str, table: DeltaTable, reasons: tuple[str, ...]) -> Sink:
    schema_json, metadata = table.schema().to_json(), table.metadata()
    settings, partition_by = dict(metadata.configuration), tuple(metadata.partition_columns)
    fields = json.loads(schema_json)["fields"]
    special = [*reasons, *_protocol_reasons(table), *_setting_reasons(settings), *_column_reasons(fields)]
    try:
        schema = arrow_schema(schema_json)
    except UnknownType as error:
        raise SinkMismatch(f"The sink {name!r} has a column of type {error}, which dedup cannot write.") from error
    special += [
        f"partition column {c} is {sql_type(schema.field(c).type)}"
        for c in partition_by
        if not any(t(schema.field(c).type) for t in _PARTITION_TYPES)
    ]
    return Sink(
        name,
        uri,
        table,
        schema,
        partition_by,
        hashlib.sha256(json.dumps([fields, partition_by, special], sort_keys=True).encode()).hexdigest()[:16],
        tuple(special),
        frozenset(f["name"] for f in fields if _COMPUTED & set(f["metadata"])),
        {f["name"]: f["metadata"]["delta.generationExpression"] for f in fields if "delta.generationExpression" in f["metadata"]},
        frozenset(f["name"] for f in fields if f["metadata"].get("delta.identity.allowExplicitInsert") is False),
        _constraints(settings, fields),
        int(settings.get("delta.dataSkippingNumIndexedCols", INDEXED_COLUMNS)),
    )


def _protocol_reasons(table: DeltaTable) -> list[str]:
    protocol = table.protocol()
    if protocol.min_writer_version < 7:
        return ["writer version 6 (identity columns)"] if protocol.min_writer_version == 6 else []
    unknown = sorted(set(protocol.writer_features or ()) - SAFE_FEATURES)
    return [f"table feature {name}" for name in unknown] + (
        [] if protocol.min_writer_version == 7 else [f"writer version {protocol.min_writer_version}"]
    )


def _setting_reasons(settings: dict[str, str]) -> list[str]:
    reasons = [f"CHECK constraint {k.removeprefix('delta.constraints.')}" for k in sorted(settings) if k.startswith("delta.constraints.")]
    if settings.get("delta.columnMapping.mode", "none") != "none":
        reasons.append("column mapping")
    if settings.get("delta.enableRowTracking") == "true":
        reasons.append("row tracking")
    return reasons


def _column_reasons(fields: list[dict[str, Any]]) -> list[str]:
    found = []
    for f in fields:
        found += [f"{what} ({f['name']})" for key, what in _SPECIAL_COLUMN.items() if key in f["metadata"]]
        if isinstance(f["type"], dict):
            found += _column_reasons(_children(f["type"]))
    return found


def _children(kind: dict[str, Any]) -> list[dict[str, Any]]:
    if kind["type"] == "struct":
        return list(kind["fields"])
    inner = [kind[k] for k in ("elementType", "keyType", "valueType") if isinstance(kind.get(k), dict)]
    return [f for k in inner for f in _children(k)]


def _constraints(settings: dict[str, str], fields: list[dict[str, Any]]) -> dict[str, str]:
    found = {k.removeprefix("delta.constraints."): v for k, v in settings.items() if k.startswith("delta.constraints.")}
    for f in fields:
        name, metadata = f["name"], f["metadata"]
        if text := metadata.get("delta.invariants"):
            found[f"the invariant of {name}"] = json.loads(text)["expression"]["expression"]
        if expression := metadata.get("delta.generationExpression"):
            found[f"the generated column {name}"] = f"`{name}` <=> ({expression})"
        if limit := re.search(r"\((\d+)\)", metadata.get("__CHAR_VARCHAR_TYPE_STRING", "")):
            found[f"the length limit of {name}"] = f"`{name}` IS NULL OR length(rtrim(`{name}`)) <= {limit[1]}"
    return found
