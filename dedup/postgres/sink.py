"""Rows into a table of the user's: columns matched by name, everything that can be judged is judged before a row is sent.

What only the server can judge (CHECK, UNIQUE, foreign keys, triggers) it judges during the COPY; the refusal is translated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.rows import class_row, dict_row

from checkpoint.advice import command
from checkpoint.errors import ConfigError, PublicationStuck, RowsMisfit, RowsRefused, SinkMismatch, StoreError
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.errors import ends_transaction, text_of, translate
from checkpoint.postgres.sqlfiles import Statements, quoted
from dedup.postgres import encode, fit
from dedup.postgres.names import type_for

_ROWS_FAULT = ("21", "22", "23", "44", "54", "P0")
"""Data exception, integrity constraint, check option of a view, limits (an index entry too long), RAISE in a trigger: the rows' doing.
Source: PostgreSQL 16 manual, appendix A."""

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "i": "an index", "c": "a type"}


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
        SinkMismatch: the name is of no table, or of one whose rows do not commit or last with the decision.
        PublicationStuck: it is of another table than before.

    Crash: the note is undone with the transaction.
    """
    try:
        with _handler_aside(connection, sql, table) if writer.handled else nullcontext(table) as found:
            return _described(connection, sql, found, writer)
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


def _described(connection: Connection, sql: Statements, table: str, writer: Writer) -> Sink:
    """As `describe`, under our own settings. Raises psycopg.Error for what is no name, too."""
    asked = {"table": table, "consumer": writer.id, "generation": writer.generation}
    with connection.transaction():
        row = connection.execute(sql["sink"], asked).fetchone()
    if row is None:
        raise _no_table(table)
    oid, schema, name, kind, persistence, fleeting, before = row
    full = f"{quoted(schema)}.{quoted(name)}"
    if kind not in ("r", "p"):
        raise SinkMismatch(f"{full} is {_KINDS.get(kind, 'not a table')}, and COPY writes to tables only. Write to the table behind it.")
    _refuse_fleeting(full, fleeting)
    if writer.id and persistence == "p":
        _note(connection, sql, full, oid, before, writer)
    with connection.cursor(row_factory=class_row(fit.Column)) as cursor:
        return Sink(full, tuple(cursor.execute(sql["sink_columns"], {"oid": oid}).fetchall()), oid)


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
            f"then run {command('publish', writer.name, '--accept-sink', full)}."
        )


def accept(connection: Connection, sql: Statements, table: str, writer: Writer) -> None:
    """Remember the table that is under this name now. Raises SinkMismatch, or ConfigError where the writer has never written to it.

    Crash: undone with the transaction.
    """
    sink = describe(connection, sql, table)
    noted = {"consumer": writer.id, "generation": writer.generation, "oid": sink.oid}
    if connection.execute(sql["accept_sink"], noted).fetchone() is None:
        raise ConfigError(f"Consumer {writer.name!r} has never written to {sink.name}: there is nothing to accept.")


def plans_for(sink: Sink, schema: pa.Schema, *, converted: bool = False) -> dict[str, fit.Plan]:
    """How each column of the rows goes into the sink, judged by types alone. Raises SinkMismatch naming everything that does not fit.

    Args:
        converted: the rows were Python objects, and have the types of targets.py.
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
        type_of: the type of a column that the sink lacks, for the message.
    """
    _refuse(sink, _wrong_columns(sink, names, type_of), _misfit_of(sink, names))


def _wrong_columns(sink: Sink, names: Sequence[str], type_of: Callable[[str], pa.DataType]) -> list[str]:
    wrong = [f"column {name!r} occurs twice in the rows" for name in sorted({n for n in names if names.count(n) > 1})]
    by_name = {column.name: column for column in sink.columns}
    for name in names:
        if name not in by_name:
            added = _alter(sink, f"ADD COLUMN {quoted(name)} {type_for(type_of(name))}")
            wrong.append(f"it has no column {name!r}: {added}{_hint(sink, name)}")
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


def fitted(sink: Sink, plans: dict[str, fit.Plan], rows: pa.Table) -> pa.Table:
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


def send(connection: Connection, sink: Sink, plans: dict[str, fit.Plan], rows: pa.Table) -> int:
    """COPY rows that `fitted` returned. Raises RowsRefused where the server refuses or drops some; nothing of them is kept then.

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
        raise refused(sink.name, error) from error
    return kept


def copy(connection: Connection, sink: Sink, plans: dict[str, fit.Plan], rows: pa.Table) -> int:
    """COPY rows that `fitted` returned; returns how many the table kept. Raises psycopg.Error.

    Crash: undone with the transaction.
    """
    kinds = {column.name: column.base for column in sink.columns}
    if all(plans[name].fast for name in rows.column_names):
        jsonb = frozenset(name for name in rows.column_names if kinds[name] == "jsonb")
        return encode.copy_in(connection, sink.name, rows, jsonb)
    return encode.copy_text(connection, sink.name, rows, kinds)


def refused(sink: str, error: psycopg.Error) -> StoreError:
    """What to raise where the server refused rows for `sink`."""
    state = error.sqlstate or ""
    ours = RowsRefused if state.startswith(_ROWS_FAULT) else SinkMismatch
    if ends_transaction(error) or isinstance(error, psycopg.errors.InsufficientPrivilege) or not state.startswith((*_ROWS_FAULT, "42")):
        return translate(error, f"Writing to {sink}")
    told = error.diag
    table = f"{quoted(told.schema_name)}.{quoted(told.table_name)}" if told.schema_name and told.table_name else sink
    remedy = (
        f" To take them as they are: ALTER TABLE {table} DROP CONSTRAINT {quoted(told.constraint_name)};" if told.constraint_name else ""
    )
    where = f" ({told.context.splitlines()[0][:200]})" if told.context else ""
    return ours(f"{sink} refused the rows: {text_of(error)}{where}. Nothing of them was written.{remedy}")


def _alter(sink: Sink, what: str) -> str:
    return f"ALTER TABLE {sink.name} {what};"


def _misfit(sink: Sink, column: fit.Column, misfit: fit.Misfit) -> str:
    change = _alter(sink, f"ALTER COLUMN {quoted(column.name)} TYPE {misfit.wanted}") if misfit.wanted else ""
    return f"column {column.name!r}: {misfit}: {change}"


def _hint(sink: Sink, name: str) -> str:
    near = [column.name for column in sink.columns if column.name.lower() == name.lower()]
    return f" (or rename it in the rows: the table has {near[0]!r})" if near else ""


def _refuse(sink: Sink, wrong: list[str], error: type[SinkMismatch] = RowsMisfit) -> None:
    if wrong:
        raise error(f"The rows do not fit {sink.name}; nothing was sent.\n- " + "\n- ".join(wrong))
