"""Rows into a table of the user's: columns are matched by name, and everything that can be judged is judged before a row is sent.

The server judges the rest during the COPY (CHECK, UNIQUE, foreign keys, triggers); this module translates its refusal. The table's columns
are the targets of Python values (dedup/core/values.py). Called by merges.py and the transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.pq import TransactionStatus
from psycopg.rows import class_row, dict_row

from checkpoint.errors import ConfigError, PublicationStuck, RowsMisfit, RowsRefused, SinkMismatch, StoreError, StoreUnavailable, command
from checkpoint.postgres.connection import Connection, ends_transaction, text_of, translate
from checkpoint.postgres.sql import Statements, quoted
from deadletter.redact import redact
from dedup.core.near import GUESSED, meant
from dedup.core.rows import PlainRows, refusal, told
from dedup.core.value_rules import ValueLimits
from dedup.core.values import Fault, Faults, Target, shown
from dedup.postgres import fit, wire
from dedup.postgres.fit import type_for

_ROWS_FAULT = ("09", "20", "21", "22", "23", "27", "2F", "38", "39", "44", "54", "P0")
"""Data exception, integrity constraint, check option of a view, limits (an index entry too long), RAISE in a trigger, in whatever language:
the rows' doing. Source: PostgreSQL 16 manual, appendix A."""

_OTHERS = re.compile("0[01238ABFLPZ]|10|2[4568BD]|3[4BDF]|4[02]|5[3578]|72|F0|HV|XX")
"""The other classes that the server has. Of any further one a trigger has raised the error: `RAISE ... USING ERRCODE = 'OR001'`."""

_POLICY = "ExecWithCheckOptions"
"""The function of the server that refuses a row by a policy of row-level security, with the SQLSTATE of a missing right."""

_COPY = "DoCopy"
"""The function that refuses COPY to a table whose policies hold for this role, with the SQLSTATE of what is not supported.
Source: PostgreSQL 16, copy.c."""

_ONE_KEY = "23505"
"""Unique violation."""

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "i": "an index", "c": "a type"}

_MOST = 1_000
"""Rows with values that the server cannot read, found at once; the next try finds more."""

_NO_VALUES_FAULT = ("08", "25", "40", "53", "55", "57", "58", "72", "F0", "XX001", "XX002")
"""SQLSTATEs of what no value of a row is the cause of, whatever was being read. Source: PostgreSQL 16 manual, appendix A.
XX000, an internal error, is what hstore says to a bad text before PostgreSQL 16."""

_TEMPORARY = re.compile(r'"?pg_temp(_\d+)?"?\.', re.IGNORECASE)
"""A name with the schema of the session's temporary tables."""

Unread = dict[int, tuple[str, psycopg.Error]]
"""Row -> column whose value the server cannot read, and what it says."""

_FORBIDDEN = "42501"
"""Insufficient privilege: a value's fault only where the value names something of the database."""

_SIMPLE: Mapping[str, tuple[str, pa.DataType]] = {
    "bool": ("bool", pa.bool_()),
    "int2": ("int", pa.int16()),
    "int4": ("int", pa.int32()),
    "int8": ("int", pa.int64()),
    "float4": ("float", pa.float32()),
    "float8": ("double", pa.float64()),
    "json": ("json", pa.string()),
    "jsonb": ("json", pa.string()),
    "bytea": ("bytes", pa.binary()),
    "uuid": ("uuid", pa.binary(16)),
    "date": ("date", pa.date32()),
    "timestamp": ("timestamp", pa.timestamp("us")),
    "timestamptz": ("timestamp", pa.timestamp("us", tz="UTC")),
    "time": ("time", pa.time64("us")),
    "interval": ("interval", pa.duration("us")),
}
"""Base type -> kind of dedup/core/values.py, and what fit.py takes for it."""


@dataclass(frozen=True)
class Writer:
    """Who writes: a sink is remembered for a consumer and a generation. The consumer 0 is nobody."""

    id: int
    generation: int = 0
    name: str = ""
    handled: bool = False  # a handler may have changed the session: its path and roles hold for the sink, not for our tables


NOBODY = Writer(0)


@dataclass(frozen=True)
class Sink:
    """A table that rows go to."""

    name: str  # quoted, with its schema
    columns: tuple[fit.Column, ...]
    oid: int = 0


def describe(connection: Connection, sql: Statements, table: str, writer: Writer = NOBODY) -> Sink:
    """The table as the catalog has it, noted for its writer.

    Raises:
        SinkMismatch: the name is of no table, of one whose rows do not commit or last with the decision, or of a temporary one that was
            there before the transaction.
        PublicationStuck: it is of another table than before.

    Crash: the note is undone with the transaction.
    """
    try:
        with _handler_aside(connection, sql, table) if writer.handled else nullcontext(table) as found:
            return _described(connection, sql, found, writer, table)
    except (psycopg.errors.SyntaxError, psycopg.errors.InvalidName, psycopg.errors.FeatureNotSupported) as error:
        raise SinkMismatch(
            f'{table!r} is not a table name. Write table or schema.table; names with capitals or spaces in double quotes: "My Table".'
        ) from error


@contextmanager
def _handler_aside(connection: Connection, sql: Statements, table: str) -> Iterator[str]:
    """Put our settings in the place of a handler's for a while; afterwards its path, its roles and what we do not depend on hold again.

    Yields the full name of the table as the handler finds it. What fails inside leaves the session as it is: the attempt is undone.
    """
    with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
        session = cursor.execute(sql["handler_session"], {"table": table}).fetchone()
    if session is None or session["sink"] is None:
        raise _no_table(table)
    connection.execute(sql["handler_aside"] + b";" + sql["own_settings"])
    yield session["sink"]
    connection.execute(sql["handler_again"], {name: session[name] for name in ("login", "role", "search_path")})


def _no_table(table: str) -> SinkMismatch:
    return SinkMismatch(f"There is no table {table!r} on this connection's search_path. Create it, or write schema.table.")


def _hidden(given: str, name: str) -> SinkMismatch:
    return SinkMismatch(
        f"A temporary table of that name, which this transaction has not made, hides the table {given!r}: a pooler gives sessions on with "
        f"what another client left in them. Write schema.table; or pg_temp.{name}, if the rows are for that table."
    )


def _described(connection: Connection, sql: Statements, table: str, writer: Writer, given: str) -> Sink:
    """As `describe`, under our own settings. Raises psycopg.Error for what is no name, too.

    Args:
        given: the name as the handler wrote it.
    """
    asked = {"table": table, "consumer": writer.id, "generation": writer.generation}
    with connection.transaction():
        row = connection.execute(sql["sink"], asked).fetchone()
    if row is None:
        raise _no_table(table)
    oid, schema, name, kind, persistence, left_behind, fleeting, before = row
    full = f"{quoted(schema)}.{quoted(name)}"
    if left_behind and not _TEMPORARY.match(given):
        raise _hidden(given, quoted(name))
    if kind not in ("r", "p"):
        raise SinkMismatch(f"{full} is {_KINDS.get(kind, 'not a table')}, and COPY writes to tables only. Write to the table behind it.")
    _refuse_fleeting(full, fleeting)
    if writer.id and persistence == "p":
        _note(connection, sql, full, oid, before, writer)
    return Sink(full, _columns(connection, sql, oid), oid)


def _columns(connection: Connection, sql: Statements, oid: int) -> tuple[fit.Column, ...]:
    with connection.cursor(row_factory=class_row(fit.Column)) as cursor:
        return tuple(cursor.execute(sql["sink_columns"], {"oid": oid}).fetchall())


@contextmanager
def unaltered(connection: Connection, sql: Statements, sink: Sink) -> Iterator[None]:
    """The block writes rows that were made for these columns of the sink. Behind it, it holds a lock, so that they stay as they are.

    An ALTER TABLE that others had begun before is over then. The server reads the bytes of an old type as the new one's: it takes what is
    none of the rows' values, or refuses them.

    Raises:
        StoreUnavailable: the columns are others now, whatever the block raised.

    Crash: undone with the transaction.
    """
    try:
        yield
    except StoreError as error:
        if connection.info.transaction_status == TransactionStatus.INTRANS and _is_other(connection, sql, sink):
            raise _altered(sink) from error
        raise
    if _is_other(connection, sql, sink):
        raise _altered(sink)


def _is_other(connection: Connection, sql: Statements, sink: Sink) -> bool:
    """Whether its columns are others now. How a type is written says nothing: that hangs on the path, which may be the handler's here."""
    known, now = ([replace(column, type="") for column in columns] for columns in (sink.columns, _columns(connection, sql, sink.oid)))
    return known != now


def _altered(sink: Sink) -> StoreUnavailable:
    return StoreUnavailable(f"{sink.name} was altered while rows were written to it. Nothing of them was committed; try again.")


def _refuse_fleeting(full: str, fleeting: str | None) -> None:
    if fleeting is None:
        return
    if fleeting.endswith("UNLOGGED"):
        raise SinkMismatch(
            f"{full} cannot be a sink: {fleeting}. PostgreSQL empties such a table after a crash and on a standby, and the state would "
            f"go on as if its rows were there. Run ALTER TABLE ... SET LOGGED."
        )
    raise SinkMismatch(
        f"{full} cannot be a sink: its partition {fleeting}. Another server commits its rows by itself, so they and the decision are "
        f"not one transaction. Write to a table of this database, and send them on with tx.publish."
    )


def _note(connection: Connection, sql: Statements, full: str, oid: int, before: int | None, writer: Writer) -> None:
    """Remember the table, or compare it with the one that is remembered."""
    if before is None:
        connection.execute(sql["note_sink"], {"consumer": writer.id, "generation": writer.generation, "oid": oid})
    elif before != oid:
        raise PublicationStuck(
            f"{full} is another table than the one that {writer.name!r} has written to before: it was dropped and created again, loaded "
            f"from a dump, or another one was renamed. Rows that were written before may be missing. Put them back if they are wanted, "
            f"then run {command('sink', 'accept', writer.name, full)}."
        )


def refuse_address(at: str | None) -> None:
    """Raise ConfigError for the address of a sink, which Delta tables have."""
    if at is not None:
        raise ConfigError(f"A sink on PostgreSQL is found by its name; it has no address such as {at!r}. Leave --at out.")


def accept(connection: Connection, sql: Statements, table: str, writer: Writer, *, dry_run: bool = False) -> None:
    """Remember the table that is under this name now. Raises SinkMismatch, or ConfigError where the writer has never written to it.

    Args:
        dry_run: raise the same, and remember nothing.

    Crash: undone with the transaction.
    """
    connection.execute(sql["own_settings"])
    known: dict[str, int | None] = dict(connection.execute(sql["sinks_of"], {"consumer": writer.id}).fetchall())
    names = ", ".join(known) or "none"
    never = ConfigError(f"Consumer {writer.name!r} has never written to {table}: there is nothing to accept. It has written to: {names}.")
    try:
        sink = describe(connection, sql, table)
    except SinkMismatch as error:
        if any(f".{name}".endswith(f".{table}") for name in known):
            raise
        raise never from error
    if sink.oid not in known.values():
        raise never
    if not dry_run:
        connection.execute(sql["accept_sink"], {"consumer": writer.id, "generation": writer.generation, "oid": sink.oid})


def plans_for(sink: Sink, schema: pa.Schema, *, converted: bool = False) -> dict[str, fit.CastPlan]:
    """How each column of the rows goes into the sink, judged by types alone. Raises SinkMismatch naming everything that does not fit.

    Args:
        converted: the rows were Python objects, and have the types of sinks.py.
    """
    wrong = _wrong_columns(sink, schema.names, lambda name: schema.field(name).type)
    by_name = {column.name: column for column in sink.columns}
    plans = {}
    for field in schema:
        column = by_name.get(field.name)
        if column is not None and not column.generated and schema.names.count(field.name) == 1:
            try:
                plans[field.name] = fit.as_text() if converted and fit.is_numeric_text(field.type, column) else fit.plan(field.type, column)
            except fit.Misfit as misfit:
                wrong.append(_misfit(sink, column, misfit))
    _refuse(sink, wrong, _misfit_of(sink, schema.names))
    return plans


def require_columns(sink: Sink, names: Sequence[str], type_of: Callable[[str], pa.DataType]) -> None:
    """Raise RowsMisfit unless rows with these columns can go into the sink, whatever their values are.

    Args:
        type_of: the type of a column that the sink lacks, for the message: it is guessed, since the rows are Python objects.
    """
    _refuse(sink, _wrong_columns(sink, names, type_of, GUESSED), _misfit_of(sink, names))


def without_not_null(sink: Sink, names: Container[str] | None = None) -> Sink:
    """The sink, or these columns of it, as if none were NOT NULL: for rows that are only looked at, or that only delete."""
    return replace(sink, columns=tuple(replace(c, not_null=False) for c in sink.columns if names is None or c.name in names))


def _wrong_columns(sink: Sink, names: Sequence[str], type_of: Callable[[str], pa.DataType], note: str = "") -> list[str]:
    wrong = [f"column {name!r} occurs twice in the rows" for name in sorted({n for n in names if names.count(n) > 1})]
    by_name = {column.name: column for column in sink.columns}
    for name in names:
        if name not in by_name:
            added = _alter(sink, f"ADD COLUMN {quoted(name)} {type_for(type_of(name))}")
            hint = meant([name], by_name)
            wrong.append(f"it has no column {name!r}{f'. {hint}If not' if hint else ''}: {added}{note}")
        elif by_name[name].generated:
            wrong.append(f"column {name!r} is generated by the table: leave it out of the rows")
    for column in sink.columns:
        if column.name not in names and column.not_null and not (column.has_default or column.generated):
            dropped = _alter(sink, f"ALTER COLUMN {quoted(column.name)} DROP NOT NULL")
            wrong.append(f"the rows lack {column.name!r}, which is NOT NULL: {dropped}")
    return wrong if names else [*wrong, "the rows have no columns"]


def _misfit_of(sink: Sink, names: Sequence[str]) -> type[SinkMismatch]:
    """What rows with these columns are refused by: columns that the table lacks are the handler's, whoever wrote them, and no event's."""
    return RowsMisfit if {*names} <= {column.name for column in sink.columns} else SinkMismatch


def fitted(sink: Sink, plans: dict[str, fit.CastPlan], rows: pa.Table) -> pa.Table:
    """The rows with the types of the sink, judged by their values. Raises RowsRefused."""
    wrong, columns = [], {}
    for column in sink.columns:
        if column.name not in plans:
            continue
        values = rows[column.name]
        if column.not_null and values.null_count:
            first = pc.index(pc.is_null(values), True).as_py()
            alter = _alter(sink, f"ALTER COLUMN {quoted(column.name)} DROP NOT NULL")
            wrong.append(f"{values.null_count} rows have no {column.name!r} (the first is row {first}), which is NOT NULL: {alter}")
        try:
            columns[column.name] = plans[column.name].cast(values)
        except fit.Misfit as misfit:
            wrong.append(_misfit(sink, column, misfit))
    _refuse(sink, wrong, RowsRefused)
    return pa.table(columns)


def send(connection: Connection, sink: Sink, plans: dict[str, fit.CastPlan], rows: pa.Table, plain: PlainRows | None = None) -> int:
    """COPY rows that `fitted` returned; returns their number. Nothing of them is kept where it raises.

    Args:
        plain: the same rows as Python objects, where they were that.

    Raises:
        ValuesRefused: the server cannot read some values of Python.
        RowsRefused: it refuses or drops some rows.

    Crash: undone with the transaction.
    """
    try:
        with connection.transaction():
            kept = copy(connection, sink, plans, rows)
            if kept != rows.num_rows:
                raise RowsRefused(
                    f"{sink.name} kept {kept} of {rows.num_rows} rows; nothing of them was written. A BEFORE INSERT trigger returns NULL "
                    f"for the others, or puts them into another table. Leave them out in the handler, or write to that table; psql's \\d "
                    f"{sink.name} lists the triggers."
                )
    except psycopg.Error as error:
        raise refused_rows(sink, error, unread(connection, sink, plans, rows, error, plain), plain) from error
    return kept


def copy(connection: Connection, sink: Sink, plans: dict[str, fit.CastPlan], rows: pa.Table, into: str | None = None) -> int:
    """COPY rows that `fitted` returned; returns how many the table kept.

    Args:
        into: the table that takes them in place of the sink, quoted.

    Raises:
        RowsRefused: the client cannot send a value.
        psycopg.Error: the server refuses something.

    Crash: undone with the transaction.
    """
    kinds = {column.name: f"_{column.element}" if column.element else column.base for column in sink.columns}
    try:
        if all(plans[name].fast for name in rows.column_names):
            jsonb = frozenset(name for name in rows.column_names if kinds[name] == "jsonb")
            return wire.copy_in(connection, into or sink.name, rows, jsonb)
        return wire.copy_text(connection, into or sink.name, rows, kinds)
    except (ValueError, OverflowError) as error:  # pgpq at the ends of a type, Python behind the year 9999
        raise RowsRefused(f"A row for {sink.name} has a value that cannot be sent: {error}. Nothing of the rows was written.") from error


def unread(
    connection: Connection, sink: Sink, plans: dict[str, fit.CastPlan], rows: pa.Table, error: psycopg.Error, plain: PlainRows | None
) -> Unread:
    """The rows with a value that the server cannot read, where a COPY of all of them has failed: the server says which one it was.

    Each is believed when it fails alone, too: a text in an error may say anything. What fails in another way is not looked into.

    Args:
        plain: the rows as Python objects. Without them one row is looked for: nobody knows of which event a row is.

    Crash: nothing of these tries is kept.
    """
    found, first, size, tried = Unread(), 0, rows.num_rows, rows.num_rows
    at: tuple[int, str] | None = value_at(sink, error)
    while first < rows.num_rows and not ends_transaction(error):
        if at is not None and at[0] < tried:
            row = first + at[0]
            alone = _tried(connection, sink, plans, rows.slice(row, 1))
            if alone is None or value_at(sink, alone) != (0, at[1]):
                return found
            found[row] = at[1], alone
            first, size = row + 1, max(8, 2 * at[0])
        else:
            first, size = first + tried, 2 * size
        if not found or plain is None or len(found) >= _MOST:
            return found
        tried = min(size, rows.num_rows - first)
        said = _tried(connection, sink, plans, rows.slice(first, tried)) if tried else None
        at = None if said is None else value_at(sink, said)
    return found


def _tried(connection: Connection, sink: Sink, plans: dict[str, fit.CastPlan], rows: pa.Table) -> psycopg.Error | None:
    """What the server says to these rows, of which nothing is kept."""
    try:
        with connection.transaction(force_rollback=True):
            copy(connection, sink, plans, rows)
    except psycopg.Error as error:
        return error
    return None


def value_at(sink: Sink, error: psycopg.Error) -> tuple[int, str] | None:
    """(row, from 0 on, column) of the value that the server could not read in a COPY; None where the error is about something else.

    The context of an input function's error begins with the COPY, or with a line about the JSON. That of a trigger or a CHECK does not.
    """
    state, context = error.sqlstate or "", error.diag.context or ""
    columns = {column.name: column for column in sink.columns}
    names = "|".join(map(re.escape, sorted(columns, key=len, reverse=True)))
    place = re.compile(rf"^COPY {re.escape(_relation(sink.name))}, \w+ (\d+), \w+ ({names})(?:: |$)", re.MULTILINE)
    found = place.search(context)
    if found is None or not state or state.startswith(_NO_VALUES_FAULT):
        return None
    column = columns[found[2]]
    kind = column.element or column.base
    lines = context[: found.start()].count("\n")
    if lines > (kind in ("json", "jsonb")) or (state == _FORBIDDEN and not kind.startswith("reg")):
        return None
    return int(found[1]) - 1, found[2]


def _relation(name: str) -> str:
    """The last part of a quoted name, as it is."""
    quotes = re.findall(r'"((?:[^"]|"")*)"', name)
    return quotes[-1].replace('""', '"') if quotes else name.rpartition(".")[2]


def refused_rows(sink: Sink, error: psycopg.Error, unread: Unread, plain: PlainRows | None) -> StoreError:
    """What to raise where the server refused these rows: about values that it cannot read, where it names them."""
    if not unread or plain is None:
        return refused(sink.name, error, of_a_value=bool(unread))
    columns, wrong = {column.name: column for column in sink.columns}, {name: Faults() for name in plain.names}
    for row, (name, said) in unread.items():
        value = plain.rows[row].get(name)
        wrong[name][row] = Fault(name, shown(value), type(value).__name__, columns[name].type, redact(text_of(said)), None)
    return refusal(plain, wrong, sink.name, lambda fault: told(fault, sink.name, lambda name, wanted: ""))


def refused(sink: str, error: psycopg.Error, *, of_a_value: bool = False) -> StoreError:
    """What to raise where the server refused rows for `sink`.

    Args:
        of_a_value: the cause is a value that the server cannot read, whatever SQLSTATE its type has for that.
    """
    state = error.sqlstate or ""
    if isinstance(error, psycopg.errors.FeatureNotSupported) and error.diag.source_function == _COPY:
        return SinkMismatch(
            f"Row-level security of {sink} holds for this role, and COPY does not go by it. Write with tx.merge, which does; or let the "
            f"role pass it by: ALTER ROLE ... BYPASSRLS; or ALTER TABLE {sink} DISABLE ROW LEVEL SECURITY;"
        )
    of_rows = of_a_value or _is_of_rows(error, state)
    ours = RowsRefused if of_rows else SinkMismatch
    known = of_rows or (state.startswith("42") and state != _FORBIDDEN)
    if ends_transaction(error) or not known:
        return translate(error, f"Writing to {sink}")
    told = error.diag
    table = f"{quoted(told.schema_name)}.{quoted(told.table_name)}" if told.schema_name and told.table_name else sink
    remedy = _remedy(state, table, told.constraint_name)
    where = f" ({redact(told.context).splitlines()[0][:200]})" if told.context else ""
    made = ours(f"{sink} refused the rows: {redact(text_of(error))}{where}. Nothing of them was written.{remedy}")
    if isinstance(made, RowsRefused) and told.constraint_name:  # the text has values of a row
        made.brief = f"{sink} {told.constraint_name}"
    return made


def _is_of_rows(error: psycopg.Error, state: str) -> bool:
    by_trigger = state and not _OTHERS.match(state)
    return state.startswith(_ROWS_FAULT) or bool(by_trigger) or error.diag.source_function == _POLICY


def _remedy(state: str, table: str, constraint: str | None) -> str:
    """What to do about rows that a constraint refuses, the safest first. Nobody is told to drop a key: it protects the table."""
    if state == _ONE_KEY:
        return (
            " Two rows have one key, or the table has a row with this key already. Write one row for each key, or call tx.merge with the "
            "columns of this key as keys=: it updates the row that is there."
        )
    if constraint is None:
        return ""
    return (
        " Reject such events in the handler (tx.reject), or raise an error for them. If the table should take these rows: "
        f"ALTER TABLE {table} DROP CONSTRAINT {quoted(constraint)};"
    )


def _alter(sink: Sink, what: str) -> str:
    return f"ALTER TABLE {sink.name} {what};"


def _misfit(sink: Sink, column: fit.Column, misfit: fit.Misfit) -> str:
    change = _alter(sink, f"ALTER COLUMN {quoted(column.name)} TYPE {misfit.wanted}") if misfit.wanted else ""
    return f"column {column.name!r}: {misfit}: {change}"


def _refuse(sink: Sink, wrong: list[str], error: type[SinkMismatch] = RowsMisfit) -> None:
    if wrong:
        raise error(f"The rows do not fit {sink.name}; nothing was sent.\n- " + "\n- ".join(wrong))


@dataclass(frozen=True)
class SinkColumns:
    """The columns of a table, for rows of Python objects."""

    sink: Sink

    @property
    def shown(self) -> str:
        """Its name, quoted for SQL."""
        return self.sink.name

    def targets(self) -> dict[str, Target]:
        """By column."""
        return {column.name: target_of(column) for column in self.sink.columns}

    def require(self, names: Sequence[str], rows: PlainRows, *, deleted: bool) -> None:
        """Raise RowsMisfit for columns that the table lacks, or requires and the rows lack, unless they only delete."""
        require_columns(
            without_not_null(self.sink) if deleted else self.sink, list(map(str, names)), lambda name: rows.schema.field(name).type
        )

    def alter(self, column: str, wanted: pa.DataType) -> str:
        """The statement that changes the column's type; empty where it has that type already."""
        own = next((own for own in self.sink.columns if own.name == column), None)
        if own is not None and (type_for(wanted) == own.type or (type_for(wanted) == own.base and own.modifier < 0)):
            return ""
        return f"ALTER TABLE {self.sink.name} ALTER COLUMN {quoted(column)} TYPE {type_for(wanted)}"


def target_of(column: fit.Column) -> Target:
    """The target of one column."""
    if column.element is not None and column.base not in _SIMPLE:
        element = fit.element_of(column)
        part = target_of(element)
        if part.kind == "numeric":
            part = replace(part, kind="numeric in a list")
        arrow = pa.list_(pa.field("element", part.arrow))
        return Target("list", arrow, column.type, not column.not_null, parts={"element": part})
    kind, arrow, limits = _kind(column)
    return Target(kind, arrow, column.type, not column.not_null, limits)


def _kind(column: fit.Column) -> tuple[str, pa.DataType, ValueLimits]:
    if column.base in _SIMPLE:
        return (*_SIMPLE[column.base], ValueLimits(nul=False, step=fit.step_of(column)))
    if column.base == "numeric":
        return _number(*fit.size_of(column))
    if column.base in fit.TEXTS:
        return "text", pa.string(), ValueLimits(fit.length_of(column), nul=False)
    if column.base == "timetz":
        return "timetz", pa.string(), ValueLimits(step=fit.step_of(column))
    return "other", pa.string(), ValueLimits(nul=False, size=fit.BYTES.get(column.base), whole=fit.WHOLE.get(column.base))


def _number(precision: int | None, scale: int | None) -> tuple[str, pa.DataType, ValueLimits]:
    if precision is not None and scale is not None and 0 <= scale <= precision <= 38:
        return "decimal", pa.decimal128(precision, scale), ValueLimits()
    return "numeric", pa.string(), ValueLimits(precision=precision, scale=scale)
