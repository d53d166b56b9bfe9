"""Dead letters read back: by a selection, page by page, grouped, with their history. Read-only, but for the locks of `locked`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from checkpoint.errors import ConfigError
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements, fill, quoted
from deadletter.letter import HISTORY, LETTERS, Status
from dedup.postgres.charset import Charset, charset_of, unescape
from dedup.store import GROUPS, Selection

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
        raise ConfigError(f"There is no letter {after!r} to go on behind. Begin with the first page again.")
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


_NAMES_AS_BYTES = """case when strpos(array_to_string(d.property_names, ''), chr(92)) = 0 and getdatabaseencoding() = 'UTF8'
    then d.property_names::bytea[]
    else array(select convert_to(p.name, 'UTF8') from unnest(d.property_names) with ordinality p (name, place) order by p.place) end"""
"""The cast is quicker; it takes a backslash for the beginning of an escape, and gives bytes of the database's encoding."""


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
