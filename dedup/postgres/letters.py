"""Dead letters in PostgreSQL: changed by the steps of a decision, read by a selection, and kept in the order of their sequences.

The steps are planned elsewhere and executed inside the open transaction. Reads take no lock, except `locked`. Promises that no letter
overtakes another one of its sequence and none waits for ever: a transaction that parks behind a letter, or releases one, locks the row of
the sequence. Called by the transaction and by the store.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, StoreError
from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements, fill, quoted
from deadletter.letter import ERASED, GROUPS, HISTORY, LETTERS, SEQUENCES, Status
from deadletter.plans import parked_again
from deadletter.selection import Selection
from deadletter.store import Change, Erase, Free, Note, Park
from dedup.postgres import keys, wire
from dedup.postgres.charset import Charset, charset_of, unescape

_CHANGING: Mapping[str, str] = {
    "event_key": "bytea",
    "key": "uuid",
    "holds_key": "boolean",
    "idempotence_key": "text",
    "payload_hash": "bigint",
    "body": "bytea",
    "body_size": "bigint",
    "body_sha256": "bytea",
    "kind": "text",
    "reason": "text",
    "error_type": "text",
    "error_message": "text",
    "stack": "text",
    "fingerprint": "text",
    "attempts": "integer",
    "first_failed_at": "timestamptz",
    "last_failed_at": "timestamptz",
    "status": "text",
    "blocked_by": "text",
    "extras": "bytea",
}
"""Columns that may change, and their types. Position, headers and sequence are the event's."""

LETTERS_KEPT = pa.schema([*LETTERS, pa.field("duplicates", pa.int64(), nullable=False)])
"""Letters as they are read back."""

_CONDITIONS: Mapping[str, str] = {
    "consumer": "d.consumer = %(consumer)s",
    "source": "d.source = %(source)s",
    "topic": "d.topic = %(topic)s",
    "partition": "d.partition = %(partition)s",
    "first": "d.sequence_number >= %(first)s",
    "last": "d.sequence_number <= %(last)s",
    "kind": "d.kind = %(kind)s",
    "status": "d.status = %(status)s",
    "statuses": "d.status = any(%(statuses)s)",
    "fingerprint": "d.fingerprint = %(fingerprint)s",
    # Hex digits sort before g everywhere: the range is what an index understands.
    "id": "d.id >= %(id)s and d.id < %(id)s || 'g' and starts_with(d.id, %(id)s)",
    "ids": "d.id = any(%(ids)s)",
    "since": "d.last_failed_at >= %(since)s",
    "until": "d.last_failed_at < %(until)s",
    "key": "d.idempotence_key = %(key)s and left(d.idempotence_key, 100) = left(%(key)s, 100)",
    "text": "strpos(lower(concat_ws(E'\\x01', d.reason, d.error_message, d.stack)), lower(%(text)s)) > 0",
    "sequence_key": "d.sequence_key = %(sequence_key)s and left(d.sequence_key, 100) = left(%(sequence_key)s, 100)",
    "sequences": "d.sequence = any(%(sequences)s::uuid[])",
    "generation": "d.generation = %(generation)s",
}

_PLACE = ("consumer", "source", "topic", "incarnation", "partition", "sequence_number", "part", "id")
_LEAST = {"partition": "-2147483648", "sequence_number": "-9223372036854775808", "part": "-9223372036854775808"}

WAITING = {Status.OPEN, Status.BLOCKED}
WAITS = "d.status in ('OPEN', 'BLOCKED')"
"""What the partial indexes say of letters that wait for somebody."""
_COUNTED = {"consumer", "kind", "status", "statuses", "fingerprint"}
"""What letter_count tells letters apart by."""

_NAMES_AS_BYTES = """case when strpos(array_to_string(d.property_names, ''), chr(92)) = 0 and getdatabaseencoding() = 'UTF8'
    then d.property_names::bytea[]
    else array(select convert_to(p.name, 'UTF8') from unnest(d.property_names) with ordinality p (name, place) order by p.place) end"""
"""The cast is quicker; it takes a backslash for the beginning of an escape, and gives bytes of the database's encoding."""


def park(connection: Connection, sql: Statements, step: Park, consumer: str) -> None:
    """Keep these letters and their history; those that are there are opened again or left. Raises StoreError if rows are missing.

    Crash: undone with the transaction.
    """
    try:
        with connection.transaction():
            _copy_letters(connection, sql, step.letters)
    except psycopg.errors.UniqueViolation:  # which is rare: asking first would cost every flood a look at each letter
        step, again = parked_again(step, _there(connection, sql, step.letters["id"]))
        _copy_letters(connection, sql, step.letters)
        if again is not None:
            change(connection, sql, again, consumer)
    _copy(connection, sql, "letter_history", _kept(_clean(step.history), charset_of(connection)))
    parked(connection, sql, step.letters, consumer)


def _there(connection: Connection, sql: Statements, ids: pa.ChunkedArray) -> pa.Table:
    """Id, key and holds_key of those of these letters that are kept."""
    rows = _run(connection, sql["parked"], {"ids": ids.to_pylist()})
    return _table(rows, pa.schema([LETTERS.field(name) for name in ("id", "key", "holds_key")]), None)


def note(connection: Connection, sql: Statements, step: Note) -> None:
    """Count the duplicates of held keys. Waits for nobody.

    Crash: undone with the transaction.
    """
    if step.duplicates.num_rows:
        keys = wire.uuid_array(wire.keys_of(step.duplicates["key"]))
        connection.execute(sql["note"], {"keys": keys, "counts": wire.int8_array(step.duplicates["count"].to_numpy())})


def change(connection: Connection, sql: Statements, step: Change, consumer: str) -> None:
    """Set what changes of letters that are locked, keep why, and put their sequences in order.

    Raises StoreError for columns that are the event's own, and where a letter is gone.

    Crash: undone with the transaction.
    """
    ids = step.letters["id"].to_pylist()
    if ids:
        sequences = lock(connection, sql, ids, consumer)
        _set(connection, sql, _clean(step.letters))
        if "holds_key" in step.letters.column_names:
            keys.keep(connection, sql, ids)
        changed(connection, sql, ids, sequences)
    _copy(connection, sql, "letter_history", _kept(_clean(step.history), charset_of(connection)))
    if step.history["key"].null_count < step.history.num_rows:
        connection.execute(sql["note_payloads"], {"ids": ids})


def _set(connection: Connection, sql: Statements, letters: pa.Table) -> None:
    names = [name for name in letters.column_names if name != "id"]
    if wrong := [name for name in names if name not in _CHANGING]:
        raise StoreError(f"Letters keep their {', '.join(wrong)}: these are the event's own. Change the others only.")
    if not names:
        return
    statement = fill(
        sql["change_letters"],
        assignments=", ".join(f"{name} = u.{name}" for name in names),
        arrays=", ".join(f"%({name})s::{_CHANGING.get(name, 'text')}[]" for name in letters.column_names),
        names=", ".join(letters.column_names),
    )
    given = {name: _values(letters[name], _CHANGING.get(name)) for name in letters.column_names}
    count = connection.execute(statement, given).rowcount
    if count != letters.num_rows:
        raise StoreError(f"{letters.num_rows - count} of {letters.num_rows} letters are not there any more. Look for them and start again.")


def _values(column: pa.ChunkedArray, kind: str | None) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return [v and uuid.UUID(bytes=v) for v in values] if kind == "uuid" else values


def free(connection: Connection, sql: Statements, step: Free) -> None:
    """Forget these reservations.

    Crash: undone with the transaction.
    """
    if step.keys.num_rows:
        connection.execute(sql["free_keys"], {"keys": wire.uuid_array(wire.keys_of(step.keys["key"]))})


def erase(connection: Connection, sql: Statements, step: Erase) -> None:
    """Erase what letters that are locked hold, and their history, and keep who did it and why. Raises StoreError where a letter waits.

    Crash: undone with the transaction.
    """
    given = {"ids": step.letters["id"].to_pylist(), "reason": ERASED}
    done = connection.execute(sql["erase_letters"], given).rowcount
    if done != step.letters.num_rows:
        raise StoreError(f"{step.letters.num_rows - done} of {step.letters.num_rows} letters wait for somebody, or are gone. Start again.")
    connection.execute(sql["erase_history"], given)
    _copy(connection, sql, "letter_history", _kept(_clean(step.history), charset_of(connection)))


def named(connection: Connection, sql: Statements, consumer: str, key: str, hashes: Sequence[bytes]) -> list[str]:
    """Ids of the letters that show this key, or did, or had one of these hashes, before an edit."""
    asked = {"consumer": consumer, "key": key, "hashes": [uuid.UUID(bytes=value) for value in hashes]}
    return [str(row[0]) for row in connection.execute(sql["named"], asked)]


def _copy_letters(connection: Connection, sql: Statements, letters: pa.Table) -> None:
    """A few at a time: while the server takes them the next ones are made. Columns without any value are left out."""
    if not letters.num_rows:
        return
    given = letters.select([name for name in letters.column_names if letters[name].null_count < letters.num_rows])
    held = charset_of(connection)
    made = (_letter_columns(given.slice(first, wire.ROWS_PER_WRITE), held) for first in range(0, letters.num_rows, wire.ROWS_PER_WRITE))
    some = next(made)
    batches = (batch for table in chain([some], made) for batch in table.to_batches())
    kept = wire.copy_batches(connection, f"{quoted(sql.schema)}.dead_letter", some.schema, batches)
    _refuse_fewer("dead_letter", kept, letters.num_rows)


def _copy(connection: Connection, sql: Statements, table: str, rows: pa.Table) -> None:
    if rows.num_rows:
        _refuse_fewer(table, wire.copy_in(connection, f"{quoted(sql.schema)}.{table}", rows), rows.num_rows)


def _refuse_fewer(table: str, kept: int, given: int) -> None:
    if kept != given:
        raise StoreError(f"{table} kept {kept} of {given} rows. Remove the trigger that somebody has added to it.")


def _clean(rows: pa.Table) -> pa.Table:
    """PostgreSQL's text holds no NUL: readable texts show it as U+2400."""
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    return pa.table({n: pc.replace_substring(v, "\0", "\u2400") if pa.types.is_string(v.type) else v for n, v in columns.items()})


def _kept(rows: pa.Table, held: Charset | None) -> pa.Table:
    """What a COPY takes in place of texts that the database cannot hold; parameters of statements are changed by their cursor."""
    if held is None:
        return rows
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    return pa.table({n: held.escaped(v) if pa.types.is_string(v.type) else v for n, v in columns.items()})


def _letter_columns(letters: pa.Table, held: Charset | None) -> pa.Table:
    """LETTERS as the columns of dead_letter."""
    columns: dict[str, Any] = {}
    rows = _kept(_clean(letters), held)
    for name in rows.column_names:
        values = rows[name].combine_chunks()
        if name == "properties":
            columns |= property_arrays(values.chunk(0) if isinstance(values, pa.ChunkedArray) else values, held)
        else:
            columns["event_offset" if name == "offset" else name] = values
    return pa.table(columns)


def property_arrays(values: pa.ListArray, held: Charset | None = None) -> dict[str, pa.Array]:
    """`property_names` and `property_values`: two arrays side by side: names as text, values as exact bytes, in the order of the event."""
    items, mask = values.flatten(), values.is_null()
    offsets = pc.cumulative_sum(pc.fill_null(pc.list_value_length(values), 0))
    starts = pa.concat_arrays([pa.array([0], pa.int32()), offsets.cast(pa.int32())])
    names = pc.replace_substring(items.field("key"), "\0", "\u2400") if len(items) else pa.array([], pa.string())
    return {
        "property_names": pa.ListArray.from_arrays(starts, held.escaped(names) if held else names, mask=mask),
        "property_values": pa.ListArray.from_arrays(starts, items.field("value"), mask=mask),
    }


def letters(connection: Connection, sql: Statements, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
    """LETTERS_KEPT, or these columns of it, in position order. Raises ConfigError where `after` names no letter."""
    names = LETTERS_KEPT.names if columns is None else list(columns)
    chosen, parameters = _chosen(selection)
    place = {} if selection.after is None else _place(connection, sql, selection.after)
    if selection.topic is None and selection.source is None:
        found = fill(sql["letters_of_half"], chosen=f"{chosen} and {_behind(place, selection)}", half="{half}", needed="{needed}")
    else:
        of_place = f"{chosen} and {_behind_in_place(place, selection)}"
        found = fill(sql["letters_of_places"], chosen=of_place, places=_places(place, selection), half="{half}", needed="{needed}")
    halves = " union all ".join(f"({fill(found, half=half, needed=_needed(names)).decode()})" for half in _halves(selection))
    rows = _run(connection, fill(sql["letters"], columns=_columns(sql, names), found=halves), {**parameters, **place})
    return _table(rows, pa.schema([LETTERS_KEPT.field(n) for n in names]), charset_of(connection))


def _halves(selection: Selection) -> list[str]:
    """The conditions of the partial indexes by position that together hold what is selected."""
    wanted = set(Status) & (set(Status) if selection.statuses is None else set(selection.statuses))
    wanted &= set(Status) if selection.status is None else {selection.status}
    return [WAITS] * bool(wanted & WAITING) + [f"not ({WAITS})"] * bool(wanted - WAITING) or ["false"]


def _chosen(selection: Selection) -> tuple[str, dict[str, Any]]:
    given = {name: getattr(selection, name) for name in _CONDITIONS if getattr(selection, name) is not None}
    parameters = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    if "sequences" in given:
        parameters["sequences"] = [uuid.UUID(bytes=value) for value in given["sequences"]]
    return " and ".join(["true", *(_CONDITIONS[name] for name in given)]), {**parameters, "limit": selection.limit}


def _place(connection: Connection, sql: Statements, after: str) -> dict[str, Any]:
    row = connection.execute(sql["letter_place"], {"after": after}).fetchone()
    if row is None:
        raise ConfigError(f"There is no letter {after!r} to continue after. Begin with the first page again.")
    return {f"after_{name}": value for name, value in zip(_PLACE, row, strict=True)}


def _behind(place: Mapping[str, Any], selection: Selection) -> str:
    """The condition that an index in position order can begin at.

    Leading columns that are equal anyway are left out: PostgreSQL would begin at those alone. The id is in no index, so it is compared
    apart, in words that do not make the planner expect next to nothing.
    """
    if not place:
        return "true"
    names = list(_PLACE[:-1])
    while len(names) > 1 and getattr(selection, names[0], None) == place[f"after_{names[0]}"]:
        del names[0]
    columns, values = _both(names)
    return f"({columns}) >= ({values}) and (d.id > %(after_id)s or ({columns}) > ({values}))"


def _behind_in_place(place: Mapping[str, Any], selection: Selection) -> str:
    """The same among the letters of the topic `p`: those of a later topic are all behind."""
    if not place:
        return "true"
    names = [n for n in _PLACE[4:-1] if n != "partition" or selection.partition != place["after_partition"]]
    columns, values = _both(_PLACE[:4])
    here = f"({columns.replace('d.', 'p.')}) = ({values})"
    begin = ", ".join(f"case when {here} then %(after_{n})s else {_LEAST[n]} end" for n in names)
    whole, after = _both(_PLACE[:-1])
    return f"({', '.join(f'd.{n}' for n in names)}) >= ({begin}) and (d.id > %(after_id)s or ({whole}) > ({after}))"


def _places(place: Mapping[str, Any], selection: Selection) -> str:
    given = [f"p.{name} = %({name})s" for name in _PLACE[:3] if getattr(selection, name) is not None]
    columns, values = _both(_PLACE[:4])
    return " and ".join([*given, *([f"({columns.replace('d.', 'p.')}) >= ({values})"] if place else [])])


def _both(names: Sequence[str]) -> tuple[str, str]:
    return ", ".join(f"d.{name}" for name in names), ", ".join(f"%(after_{name})s" for name in names)


def _needed(names: Sequence[str]) -> str:
    """What the columns are made of, and what they are sorted by."""
    made_of = {"offset": ("event_offset",), "properties": ("property_names", "property_values")}
    return ", ".join(f"d.{n}" for n in dict.fromkeys([*_PLACE, *(n for name in names for n in made_of.get(name, (name,)))]))


def _columns(sql: Statements, names: Sequence[str]) -> str:
    return ", ".join(_expression(sql, LETTERS_KEPT.field(name)) for name in names)


def _expression(sql: Statements, field: pa.Field) -> str:
    """A column so that Arrow can take it: keys as bytes, times as microseconds, headers as two arrays."""
    name = "event_offset" if field.name == "offset" else field.name
    if name == "properties":
        return f"case when d.property_names is not null then array[{_NAMES_AS_BYTES}, d.property_values] end"
    if name == "duplicates":
        later = f"{quoted(sql.schema).replace('%', '%%')}.letter_duplicate c where c.letter_id = d.id"
        return f"d.duplicates + coalesce((select sum(c.duplicates) from {later}), 0)::bigint"
    if pa.types.is_timestamp(field.type):
        return f"(extract(epoch from d.{name}) * 1000000)::bigint"
    return f"uuid_send(d.{name})" if field.type == pa.binary(16) else f"d.{name}"


def _run(connection: Connection, statement: bytes, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    with connection.cursor(binary=True) as cursor:
        return cursor.execute(statement, parameters).fetchall()


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema, held: Charset | None) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    read = bytes.decode if held is None else lambda name: unescape(name.decode())
    return pa.table([_array(values, field, read) for values, field in zip(columns, schema, strict=True)], schema=schema)


def _array(values: Sequence[Any], field: pa.Field, read: Callable[[bytes], str]) -> pa.Array:
    if pa.types.is_timestamp(field.type):
        return pa.array(values, pa.int64()).cast(field.type)
    if field.name == "properties":
        values = [v and [{"key": read(k), "value": w} for k, w in zip(*v, strict=True)] for v in values]
    return pa.array(values, field.type)


def locked(connection: Connection, sql: Statements, ids: Sequence[str]) -> pa.Table:
    """LETTERS_KEPT of those of these letters that nobody else has locked, locked, in position order."""
    statement = fill(sql["lock_letters"], columns=_columns(sql, LETTERS_KEPT.names))
    rows = _table(_run(connection, statement, {"ids": list(ids)}), LETTERS_KEPT, charset_of(connection))
    return rows.sort_by([(name, "ascending") for name in _PLACE])


def groups(connection: Connection, sql: Statements, selection: Selection) -> pa.Table:
    """GROUPS of the selected letters: from counts that are kept where these can tell, else by reading the letters."""
    chosen, parameters = _chosen(selection)
    counted = parameters.keys() - {"limit"} <= _COUNTED
    # Said this way, each of the two indexes by position is of use for its half.
    statement = (
        fill(sql["groups"], chosen=chosen) if counted else fill(sql["groups_by_reading"], chosen=f"{chosen} and ({WAITS} or not ({WAITS}))")
    )
    with connection.transaction():
        connection.execute(sql["set_local"], {"name": "jit", "value": "off"})
        rows = connection.execute(statement, parameters).fetchall()
    return pa.Table.from_pylist([dict(zip(GROUPS.names, row, strict=True)) for row in rows], schema=GROUPS)


def history(connection: Connection, sql: Statements, letter_ids: Sequence[str]) -> pa.Table:
    """HISTORY of these letters, each one's oldest first."""
    rows = connection.execute(sql["history"], {"ids": list(letter_ids)}).fetchall()
    return pa.Table.from_pylist([dict(zip(HISTORY.names, row, strict=True)) for row in rows], schema=HISTORY)


def blocked(connection: Connection, sql: Statements, sequences: pa.Array | pa.ChunkedArray) -> pa.Table:
    """SEQUENCES of those that are blocked. Their rows stay locked: waits for whoever is releasing one."""
    if not len(sequences):
        return SEQUENCES.empty_table()
    rows = connection.execute(sql["blocked"], {"sequences": [uuid.UUID(bytes=s) for s in sequences.to_pylist()]}).fetchall()
    return pa.Table.from_pylist([dict(zip(SEQUENCES.names, row, strict=True)) for row in rows], schema=SEQUENCES)


def parked(connection: Connection, sql: Statements, letters: pa.Table, consumer: str) -> None:
    """Block the sequences of letters that were just parked. Those that come in behind older ones are put in their place.

    Crash: undone with the transaction.
    """
    there = letters.filter(letters["sequence"].is_valid())
    if not there.num_rows:
        return
    sequences = _distinct(there["sequence"])
    known = set(_lock(connection, sql, sequences, consumer))
    behind = [
        letter for letter, s in zip(there["id"].to_pylist(), there["sequence"].to_pylist(), strict=True) if uuid.UUID(bytes=s) in known
    ]
    _reorder(connection, sql, sequences, behind)


def changed(connection: Connection, sql: Statements, ids: Sequence[str], sequences: Sequence[uuid.UUID]) -> None:
    """Put the sequences of letters that have changed in order again.

    Args:
        sequences: what `lock` returned before the letters changed.

    Crash: undone with the transaction.
    """
    if sequences:
        _reorder(connection, sql, sequences, ids)


def lock(connection: Connection, sql: Statements, ids: Sequence[str], consumer: str) -> list[uuid.UUID]:
    """Lock the sequences of these letters; returns them. Waits for whoever parks behind one of them.

    Crash: undone with the transaction.
    """
    sequences = [row[0] for row in connection.execute(sql["sequences_of"], {"ids": list(ids)})]
    _lock(connection, sql, sequences, consumer)
    return sequences


def _distinct(column: Any) -> list[uuid.UUID]:
    return sorted({uuid.UUID(bytes=value) for value in column.to_pylist()})


def _lock(connection: Connection, sql: Statements, sequences: Sequence[uuid.UUID], consumer: str) -> list[uuid.UUID]:
    if not sequences:
        return []
    rows = connection.execute(sql["lock_sequences"], {"sequences": list(sequences), "consumer": consumer}).fetchall()
    return [row[0] for row in rows if row[0] is not None]


def _reorder(connection: Connection, sql: Statements, sequences: Sequence[uuid.UUID], ids: Sequence[str]) -> None:
    if ids:
        connection.execute(sql["link_letters"], {"ids": list(ids)})
    connection.execute(sql["reorder_sequences"], {"sequences": list(sequences)})
