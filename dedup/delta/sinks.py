"""A sink table as it is now: what its name means, its columns, its identity, whether delta-rs may write to it, and merges into it.

A name is a path, an entry of the store's `tables`, or a table of Spark's catalog; Spark is asked only where this process already has a
session. Promises that a table with any feature not known to be safe takes the row path (Spark appends).

Rows of a merge are staged before the decision and merged after it. Promises that the sink ends as if the rows of all decisions had been
merged in the order of seq, each once: the merge is made on the very snapshot whose transaction id was looked at, and fails if any other
commit came in between. Called by the transaction and the publisher.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable

from checkpoint.errors import ConfigError, RowsRefused, SinkMismatch
from dedup.core.envelope import POSITION
from dedup.core.near import listed, meant
from dedup.core.rows import PlainRows, Rows
from dedup.core.steps import Merge
from dedup.core.values import Target
from dedup.delta import tables
from dedup.delta.engine import Engine, Handle, spark_side
from dedup.delta.features import BY_DELTA_RS, BY_PUT, EVERY_COLUMN, is_on
from dedup.delta.files import INDEXED_COLUMNS, Add, FileWriter, indexed_columns
from dedup.delta.fit import (
    UnknownType,
    check_schema,
    conform,
    refuse_unwritable,
    required_part,
    sql_name,
    sql_type,
    widening,
    widens,
    writable,
)
from dedup.delta.ledger import FORBIDDEN
from dedup.delta.lengths import is_padded, length_rule
from dedup.delta.storage import SPARK, StorageOptions, absolute, require_put_if_absent

_APPEND_ONLY = "delta.appendOnly"

_LENGTHS = "__CHAR_VARCHAR_TYPE_STRING"
"""Where Delta keeps that a text is CHAR or VARCHAR."""

_SPECIAL_COLUMN = {
    "delta.generationExpression": "a generated column",
    "delta.identity.start": "an identity column",
    "delta.invariants": "an invariant",
    "CURRENT_DEFAULT": "a default value",
    _LENGTHS: "a length limit",
}

_COMPUTED = frozenset({"delta.generationExpression", "delta.identity.start", "CURRENT_DEFAULT"})

_PARTITION_TYPES = (pa.types.is_integer, pa.types.is_string, pa.types.is_boolean, pa.types.is_date, pa.types.is_decimal)

_EMPTIED = ("string", "binary")
"""Types of partition columns in which Delta takes an empty value for NULL."""

_LIMIT = "the length limit of {}"
"""The name of a constraint of one column."""

DELETE = "_dedup_delete"
"""Column of staged rows: true deletes the sink's row."""

_PLAIN_FEATURES = frozenset({"appendOnly", "invariants", "checkConstraints", "generatedColumns", "timestampNtz", "changeDataFeed"})
"""Writer features under which delta-rs may rewrite files, as long as no column or property uses them."""

_KINDS: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_string, "text"),
    (pa.types.is_integer, "int"),
    (pa.types.is_float64, "double"),
    (pa.types.is_float32, "float"),
    (pa.types.is_boolean, "bool"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_date, "date"),
    (pa.types.is_timestamp, "timestamp"),
    (pa.types.is_decimal, "decimal"),
    (pa.types.is_struct, "struct"),
    (pa.types.is_map, "map"),
    (pa.types.is_list, "list"),
)
"""By Arrow type of the sink the kind of dedup/core/values.py."""


class NoTable(SinkMismatch):
    """There is no Delta table where the sink should be."""


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
    if_there: dict[str, str] = field(default_factory=dict)  # constraint that counts only for rows with this column -> column
    defaults: dict[str, str] = field(default_factory=dict)  # column that rows may lack -> SQL
    indexed: int = INDEXED_COLUMNS
    unwritable: dict[str, str] = field(default_factory=dict)  # columns that rows leave out -> their type
    padded: frozenset[str] = frozenset()  # columns of type CHAR

    def columns(self, rows: pa.Schema, *, guessed: bool = False, deleted: bool = False) -> list[str]:
        """Which columns of such rows are taken, in the sink's order. Raises SinkMismatch; see fit.check_schema.

        Args:
            deleted: they only delete, and may lack any column.
        """
        refuse_unwritable(rows.names, self.unwritable, self.name)
        computed = self.schema.names if deleted else self.computed
        return check_schema(rows, self.schema, self.name, computed, uri=self.uri, guessed=guessed)

    def travelling(self) -> Sink:
        """A copy for tasks, which write rows by it: without the handle of the table, which stays here."""
        return replace(self, table=None)  # type: ignore[arg-type]

    @property
    def table_id(self) -> str:
        """Identity of the table: a re-created one has another."""
        return str(self.table.metadata().id)

    @property
    def emptied(self) -> tuple[str, ...]:
        """Columns in which Delta takes an empty text for NULL."""
        return tuple(n for n in self.partition_by if sql_type(self.schema.field(n).type).lower() in _EMPTIED)

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
            NoTable: there is none (with the statement that would create it for these rows).
            SinkMismatch: its catalog manages it, it requires a column of an unknown type, or it has a property under which it forgets what
                was published.
        """
        table = self.table(uri)
        if table is None:
            raise NoTable(f"The sink {name!r} has no Delta table at {uri}. {_creation(uri, rows)}")
        if FORBIDDEN in table.metadata().configuration:
            raise SinkMismatch(
                f"{FORBIDDEN} is set on the sink {name!r}: Delta would forget what was published there, and rows would be published twice. "
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
    settings, partition_by, features = (
        dict(metadata.configuration),
        tuple(metadata.partition_columns),
        table.protocol().writer_features or (),
    )
    fields = json.loads(schema_json)["fields"]
    special = [*reasons, *_protocol_reasons(table), *_setting_reasons(settings, features), *_column_reasons(fields)]
    try:
        schema, unwritable = writable(schema_json)
    except UnknownType as error:
        raise SinkMismatch(
            f"The sink {name!r} has a column of type {error} that is NOT NULL, and dedup cannot write that type. Drop the NOT NULL "
            f"(ALTER TABLE {sql_name(uri)} ALTER COLUMN ... DROP NOT NULL), or write into another table."
        ) from error
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
        _constraints(settings, fields, partition_by),
        {_LIMIT.format(f["name"]): f["name"] for f in fields if _LENGTHS in f["metadata"]},
        {f["name"]: f["metadata"]["CURRENT_DEFAULT"] for f in fields if "CURRENT_DEFAULT" in f["metadata"]},
        EVERY_COLUMN if "clustering" in features else indexed_columns(settings),
        unwritable,
        frozenset(f["name"] for f in fields if is_padded(f["metadata"].get(_LENGTHS, ""))),
    )


def _protocol_reasons(table: DeltaTable) -> list[str]:
    protocol = table.protocol()
    if protocol.min_writer_version < 7:
        return ["writer version 6 (identity columns)"] if protocol.min_writer_version == 6 else []
    known = BY_DELTA_RS | (BY_PUT if getattr(table, "puts", False) else frozenset())
    unknown = sorted(set(protocol.writer_features or ()) - known)
    return [f"table feature {name}" for name in unknown] + (
        [] if protocol.min_writer_version == 7 else [f"writer version {protocol.min_writer_version}"]
    )


def _setting_reasons(settings: dict[str, str], features: Collection[str]) -> list[str]:
    reasons = [f"CHECK constraint {k.removeprefix('delta.constraints.')}" for k in sorted(settings) if k.startswith("delta.constraints.")]
    if settings.get("delta.columnMapping.mode", "none") != "none":
        reasons.append("column mapping")
    if is_on(settings, "delta.enableRowTracking") and "rowTracking" not in features:
        reasons.append("row tracking without its table feature")
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


def _constraints(settings: dict[str, str], fields: list[dict[str, Any]], partition_by: Sequence[str]) -> dict[str, str]:
    found = {k.removeprefix("delta.constraints."): v for k, v in settings.items() if k.startswith("delta.constraints.")}
    for f in fields:
        name, metadata = f["name"], f["metadata"]
        if text := metadata.get("delta.invariants"):
            found[f"the invariant of {name}"] = json.loads(text)["expression"]["expression"]
        if expression := metadata.get("delta.generationExpression"):
            found[f"the generated column {name}"] = f"`{name}` <=> ({expression})"
        of_spark = "delta.generationExpression" in metadata or (name in partition_by and f["type"] in _EMPTIED)
        if of_spark and not f["nullable"]:  # of rows that lack the column only Spark knows what it is; an empty one is NULL
            found[f"NOT NULL of {name}"] = f"`{name}` IS NOT NULL"
        if _LENGTHS in metadata and (rule := _length_rule(name, metadata[_LENGTHS])):
            found[_LIMIT.format(name)] = rule
    return found


def _length_rule(column: str, kind: str) -> str:
    try:
        return length_rule(column, kind)
    except ValueError as error:
        raise SinkMismatch(f"The sink's column {column} is {kind}, and dedup cannot tell which lengths that allows: {error}.") from error


def needs_spark(sink: Sink) -> bool:
    """Whether only Spark may merge into this sink."""
    settings = sink.table.metadata().configuration
    features = set(sink.table.protocol().writer_features or ())
    in_use = is_on(settings, "delta.enableChangeDataFeed") or is_on(settings, "delta.enableDeletionVectors")
    return bool(sink.special) or bool(features - _PLAIN_FEATURES) or in_use


def refuse_append_only(sink: Sink) -> None:
    """Raise SinkMismatch where no merge can ever change or delete a row."""
    if is_on(sink.table.metadata().configuration, _APPEND_ONLY):
        raise SinkMismatch(
            f"The sink {sink.name!r} is append-only ({_APPEND_ONLY}), and tx.merge changes rows. Use tx.write, or run "
            f"ALTER TABLE {sql_name(sink.uri)} SET TBLPROPERTIES ('{_APPEND_ONLY}' = 'false')."
        )


def refuse_padded(sink: Sink, merge: Merge) -> None:
    """Raise SinkMismatch where the merge compares columns of type CHAR: Delta's MERGE fails there (tried with Delta 4.4)."""
    table = sql_name(sink.uri)
    for name in (*merge.keys, merge.newer_by):
        if name in sink.padded:
            raise SinkMismatch(
                f"{name} of the sink {sink.name!r} is of type CHAR, which no MERGE can compare. "
                f"Run ALTER TABLE {table} ALTER COLUMN `{name}` TYPE STRING, and take off the spaces that Spark has put there: "
                f"UPDATE {table} SET `{name}` = rtrim(`{name}`)."
            )


def split(rows: pa.Table, merge: Merge, sink: Sink) -> tuple[pa.Table, pa.Table]:
    """(rows to insert or update, rows to delete): of the latter only the keys and `newer_by`. Without positions that the sink lacks.

    Raises:
        SinkMismatch: the rows do not fit.
        RowsRefused: a key is null.
    """
    lost = [n for n in rows.column_names if n in POSITION and n not in sink.schema.names]
    flag = [merge.delete_when] if merge.delete_when and merge.delete_when not in sink.schema.names else []
    kept = rows.drop_columns([*lost, *flag])
    upserts, deletes = kept, kept.slice(0, 0)
    if merge.delete_when is not None:
        gone = pc.fill_null(rows[merge.delete_when].cast(pa.bool_()), False)
        named = list(dict.fromkeys([*merge.keys, *([merge.newer_by] if merge.newer_by else [])]))
        upserts, deletes = kept.filter(pc.invert(gone)), kept.filter(gone).select(named)
    sink.columns(kept.schema, deleted=not upserts.num_rows and deletes.num_rows > 0)
    _check_keys(kept, merge, sink)
    for part in (upserts, deletes):
        _check_emptied(part, merge, sink)
    return upserts, deletes


def _check_keys(rows: pa.Table, merge: Merge, sink: Sink) -> None:
    for name in merge.keys:
        if nulls := rows[name].null_count:
            raise RowsRefused(f"{nulls} of {rows.num_rows} rows for {sink.name!r} have no {name!r}, which is a key of tx.merge.")


def _check_emptied(rows: pa.Table, merge: Merge, sink: Sink) -> None:
    """Raise RowsRefused for an empty text that Delta takes for NULL, where NULL is none."""
    for name in sink.emptied:
        needed = name in merge.keys or not sink.schema.field(name).nullable
        if needed and name in rows.column_names and pc.any(pc.equal(pc.binary_length(rows[name]), 0)).as_py():
            raise RowsRefused(
                f"A row for {sink.name!r} has an empty {name!r}, by which the table is partitioned: Delta takes it for NULL there, and "
                + ("a key of tx.merge is not NULL." if name in merge.keys else "the column is NOT NULL.")
            )


def stage(writer: FileWriter, rows: pa.Table, *, deletes: bool) -> list[Add]:
    """Write rows into a file that no commit names yet. Raises RowsRefused.

    Crash: the file stays invisible; `upkeep.clear_staged` removes it after some days.
    """
    return writer.write(rows.append_column(DELETE, pa.repeat(deletes, rows.num_rows)))


def staged_schema(sink: Sink, names: Sequence[str]) -> pa.Schema:
    """The schema of staged rows that have these columns of the sink."""
    return pa.schema([*(sink.schema.field(n) for n in sink.schema.names if n in names), pa.field(DELETE, pa.bool_(), nullable=False)])


def staged_rows(sink: Sink, system: pafs.FileSystem, adds: Sequence[Add]) -> pa.Table:
    """Staged rows with the types that the sink has now: delta-rs would cast values with loss, and leave out columns that the sink lacks.

    Raises:
        SinkMismatch: they do not fit this snapshot of the sink.
        OSError: a file cannot be read.
    """
    parts = [_as_now(pq.read_table(add.path, filesystem=system), sink) for add in adds]
    everywhere = set(parts[0].column_names).intersection(*(part.column_names for part in parts))
    return pa.concat_tables([_with_nulls(part, everywhere) for part in parts], promote_options="default")


def _with_nulls(rows: pa.Table, everywhere: Collection[str]) -> pa.Table:
    """The rows beside others that lack columns, as those that delete do: also columns that are NOT NULL in the sink are null there."""
    return rows.cast(pa.schema([field if field.name in everywhere else field.with_nullable(True) for field in rows.schema]))


def _as_now(rows: pa.Table, sink: Sink) -> pa.Table:
    schema = staged_schema(sink, rows.column_names)
    check_schema(rows.schema, schema, sink.name, uri=sink.uri)
    return conform(rows, schema, sink.name, uri=sink.uri)


def merge_staged(sink: Sink, system: pafs.FileSystem, adds: Sequence[Add], merge: Merge, transactions: Mapping[str, int]) -> None:
    """Merge staged rows into exactly this snapshot of the sink, with transaction ids.

    Raises:
        SinkMismatch: the rows do not fit this snapshot.
        CommitFailedError, DeltaError, OSError: as delta-rs gives them; the outcome has to be read back.

    Crash: the sink shows all of it, with the ids, or nothing of it.
    """
    rows = staged_rows(sink, system, adds)
    before = sink.table.version()
    tables.merge(sink.table, rows, _match(merge.keys), _clauses(rows, merge), transactions)
    if sink.table.version() == before:  # nothing to change, and then delta-rs commits nothing, not even the ids
        tables.commit(sink.table, [], transactions, exact=True)


def _match(keys: Sequence[str]) -> str:
    return " AND ".join(f"t.{_quoted(k)} = s.{_quoted(k)}" for k in keys)


def _clauses(rows: pa.Table, merge: Merge) -> tables.MergeClauses:
    flag = f"s.{_quoted(DELETE)}"
    newer = "true"
    if merge.newer_by is not None:
        t, s = (f"{side}.{_quoted(merge.newer_by)}" for side in "ts")
        newer = f"({t} < {s} OR ({t} IS NULL AND {s} IS NOT NULL))"
    values = {_quoted(n): f"s.{_quoted(n)}" for n in rows.column_names if n != DELETE}
    return tables.MergeClauses(f"{flag} AND {newer}", f"NOT {flag} AND {newer}", f"NOT {flag}", values)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True)
class SinkNames:
    """Names as one store knows them."""

    tables: Mapping[str, str]
    options: StorageOptions
    engine: Engine

    @classmethod
    def of(cls, tables: Mapping[str, str], options: StorageOptions, engine: Engine) -> SinkNames:
        """Make names from the tables that a person gave. Raises ConfigError if their storage cannot decide between two writers."""
        by_name = {n: str(u) for n, u in tables.items() if engine.name == SPARK and "/" not in str(u)}
        by_path = {n: absolute(str(u)) for n, u in tables.items() if n not in by_name}
        for uri in by_path.values():
            require_put_if_absent(uri, options)
        return cls({**by_path, **by_name}, options, engine)

    def uri(self, name: str) -> str:
        """The absolute URI of a sink. Raises ConfigError where the name means nothing, or the storage cannot decide between two writers."""
        if name in self.tables:
            return self.tables[name]
        if "/" in name:
            uri = absolute(name)
        elif self.engine.name == SPARK:
            return name  # the catalog may not let anybody in by the path
        elif (side := spark_side()) is not None:
            uri = absolute(self._in_catalog(side, name))
        else:
            raise ConfigError(
                f"The sink {name!r} is not a path, not in tables=, and there is no Spark session to ask for a table of that name. "
                f"Name it in DeltaStore(..., tables={{{name!r}: '/path/of/the/table'}}), or write to its path."
            )
        require_put_if_absent(uri, self.options)
        return uri

    def _in_catalog(self, side: Any, name: str) -> str:
        try:
            return str(side.location(name))
        except ConfigError as error:
            if not self.tables:
                raise
            raise ConfigError(f"{error} {meant([name], self.tables)}The names in tables= are {listed(self.tables)}.") from error

    def spark(self) -> Any:
        """The Spark side, for sinks that only Spark may write. Raises ConfigError where this process has no session."""
        return self.engine.side()


@dataclass(frozen=True)
class SinkColumns:
    """The columns of a sink, for rows of Python objects."""

    sink: Sink

    @property
    def shown(self) -> str:
        """Its name in quotes."""
        return repr(self.sink.name)

    def targets(self) -> dict[str, Target]:
        """By column."""
        return {field.name: target_of(field) for field in self.sink.schema}

    def require(self, names: Sequence[str], rows: PlainRows, *, deleted: bool) -> None:
        """Raise RowsMisfit for columns that the sink lacks, or requires and the rows lack, unless they only delete."""
        known = {field.name: field for field in self.sink.schema}
        fields = [known.get(name) or rows.schema.field(str(name)) for name in names]
        self.sink.columns(pa.schema(fields), guessed=True, deleted=deleted)

    def alter(self, column: str, wanted: pa.DataType) -> str:
        """What to do so that the column takes this type; empty where Delta cannot widen its own to it."""
        schema = self.sink.schema
        if column not in schema.names or not widens(schema.field(column).type, wanted):
            return ""
        return widening(self.sink.uri, {column: wanted})


def target_of(field: pa.Field, *, in_items: bool = False) -> Target:
    """The target of one column, or of a part of one. Raises AssertionError for a type that no sink has.

    Args:
        in_items: it is below an array or a map, where a null struct is no null of its parts (see fit.required_part).
    """
    kind = next(name for is_it, name in _KINDS if is_it(field.type))
    parts = {name: target_of(part, in_items=in_items or kind != "struct") for name, part in _parts(field.type)} or None
    target = Target(kind, field.type, sql_type(field.type), field.nullable, parts=parts)
    if field.nullable and not in_items and (part := required_part(field)):
        return replace(target, nullable=False, no_null=f"{part} is NOT NULL, and Spark refuses a null struct there, too")
    return target


def _parts(kind: pa.DataType) -> list[tuple[str, pa.Field]]:
    if pa.types.is_struct(kind):
        return [(part.name, part) for part in kind]
    if pa.types.is_map(kind):
        return [("key", pa.field("key", kind.key_type, nullable=False)), ("value", kind.item_field)]
    return [("element", kind.value_field)] if pa.types.is_list(kind) else []
