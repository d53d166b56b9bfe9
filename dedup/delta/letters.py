"""The dead letters of one consumer: a table of events that only grows, and the letters as of the ledger's head.

The newest event of a letter, by seq, is its state. Events are published like rows of a sink:

* `parked`: a whole letter, as it came in. Of several for one id the first counts, and like a change each that holds its key: its decision
  has just reserved that key, so what was decided about the letter before (in another store, from which it was imported) has no effect here.
* `changed`: the letter after a change, in all columns but those of HEAVY, which stay as they were.
* `edited`: the letter after a change, in all columns.

Two more kinds say nothing about the state: `duplicate` (later duplicates of a held key were dropped) and `history` (one row of HISTORY).

A read takes only the columns that it needs: first ids, positions and the columns of the condition, then the wanted columns of the letters
that match. Conditions on columns that never change are pushed down. Rows of the table, and of files that are decided and not published yet,
are read as one. Called by the store and the transaction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from checkpoint.errors import ConfigError, SinkMismatch
from checkpoint.head import Head
from deadletter.letter import GROUPS, HISTORY, LETTERS, Action, is_erased
from deadletter.selection import Selection
from dedup.delta import tables
from dedup.delta.ledger import LETTERS_SINK
from dedup.delta.sinks import Sink, Sinks

I64 = npt.NDArray[np.int64]

ALL_LETTERS = pa.schema([*LETTERS, pa.field("duplicates", pa.int64(), nullable=False)])
"""What `Store.letters` returns."""

PLACE = ("consumer", "source", "topic", "incarnation", "partition", "sequence_number", "part", "id")
"""Position order."""

_MANY = 10_000
"""Letters above which rows are looked for by position only: a long list of ids prunes nothing."""

Decided = Callable[[pa.Table], pa.Table]
"""Of events (with seq, generation and decided_in) those whose decision is in the ledger; a RESTORE may have taken others back."""

_FIXED = ("source", "topic", "partition", "generation")

_EQUAL = {"kind": "kind", "status": "status", "fingerprint": "fingerprint", "key": "idempotence_key", "sequence_key": "sequence_key"}
_TEXTS = ("reason", "error_message", "stack")

PARKED, CHANGED, EDITED, DUPLICATE, HISTORIC = "parked", "changed", "edited", "duplicate", "history"

STATES = (PARKED, CHANGED, EDITED)
"""Events that say how a letter stands."""

HEAVY = frozenset({"body", "properties", "extras"})
"""Columns that a `changed` row does not repeat."""

ROW_GROUP = 20_000
"""Rows that are read for one letter at least."""

_ALWAYS = frozenset({"consumer", "generation"})
_FIRST = ("id", "consumer", "generation", "source", "topic", "incarnation", "partition", "sequence_number")
_ADDED = [pa.field("decided_in", pa.int32()), *(HISTORY.field(n) for n in ("at", "action", "by", "reserved"))]

INDEXED = 3 + len(_FIRST)
"""Columns with bounds: event, seq and count come before those of _FIRST."""

_PROPERTIES = {"delta.enableDeletionVectors": "false", "delta.dataSkippingNumIndexedCols": str(INDEXED)}


@dataclass(frozen=True)
class Letters:
    """The letters of one consumer.

    Args:
        events: the table of events, and the files of decisions that it does not show yet.
    """

    events: EventRows
    decided: Decided

    def select(self, selection: Selection, names: Sequence[str], after: Sequence[Any] | None = None) -> pa.Table:
        """Those columns of ALL_LETTERS of the letters that match, in position order."""
        rows = self._current(selection, ["id"])
        if after is not None:
            rows = rows.filter(_behind(rows, after))
        rows = rows.take(_in_order(rows).slice(0, selection.limit))
        return self._filled(rows, names)

    def place(self, letter_id: str) -> tuple[Any, ...] | None:
        """Where a letter stands in position order; None where there is none."""
        rows = self._scan([*PLACE], (ds.field("id") == letter_id) & (ds.field("event") == PARKED))
        return tuple(rows.select(list(PLACE)).slice(0, 1).to_pylist()[0].values()) if rows.num_rows else None

    def groups(self, selection: Selection) -> tuple[pa.Table, pa.Table]:
        """(GROUPS without reason and example, all of them; the letters that failed last in each: fingerprint, kind, id, reason)."""
        names = ["fingerprint", "kind", "first_failed_at", "last_failed_at"]
        rows = self._current(selection, names)
        by = ["fingerprint", "kind"]
        counted = _counted(rows, by)
        newest = rows.select([*by, "id", "last_failed_at"]).join(
            counted.select([*by, "last_failed_at"]), [*by, "last_failed_at"], join_type="inner"
        )
        ids = newest.group_by(by).aggregate([("id", "min")])["id_min"]
        return counted, self._filled(rows.filter(pc.is_in(rows["id"], value_set=ids)), [*by, "id", "reason", "last_failed_at"])

    def history(self, ids: Sequence[str] | None = None) -> pa.Table:
        """HISTORY of these letters, or of all, each one's oldest first."""
        names = ["id" if n == "letter_id" else n for n in HISTORY.names]
        among = ds.scalar(True) if ids is None else ds.field("id").isin(pa.array(ids, pa.string()))
        rows = self._scan(names, (ds.field("event") == HISTORIC) & among).select(["seq", *names])
        if ids is not None:
            rows = pa.concat_tables([rows, self._parked_again(among)], promote_options="default")
        rows = rows.sort_by([("id", "ascending"), ("seq", "ascending"), ("at", "ascending")])
        return rows.select(names).rename_columns(HISTORY.names).cast(HISTORY)

    def _parked_again(self, among: ds.Expression) -> pa.Table:
        """What the history says of letters that were parked once more and are open by that: no decision knew that they were there."""
        parked = self._scan(["id", "holds_key", "last_failed_at"], (ds.field("event") == PARKED) & among)
        firsts = parked.group_by("id").aggregate([("seq", "min")])
        at = pc.index_in(parked["id"], value_set=firsts["id"].combine_chunks())
        again = parked.filter(pc.and_(parked["holds_key"], pc.greater(parked["seq"], firsts["seq_min"].take(at))))
        count = again.num_rows
        told = {"action": pa.repeat(Action.REOPENED.value, count), "reserved": pa.repeat(pa.scalar(0, pa.int64()), count)}
        return pa.table({"id": again["id"], "seq": again["seq"], "at": again["last_failed_at"], **told})

    def named(self, key: str, hashes: Sequence[bytes]) -> list[str]:
        """Ids of the letters that show this idempotence key, or did, or had one of these hashes, before an edit.

        Also of erased ones, as long as older rows of them say so.
        """
        shown = (ds.field("idempotence_key") == key) & ds.field("event").isin([*STATES, HISTORIC])
        had = ds.field("key").isin(pa.array(hashes, pa.binary())) & (ds.field("event") == HISTORIC)
        rows = self._scan(["id"], shown | had)
        return sorted(rows["id"].unique().to_pylist())

    def forgotten(self) -> list[str]:
        """Ids of the letters whose contents were erased, but those that got new ones because their event failed here afterwards."""
        rows = self._scan(["id"], (ds.field("event") == HISTORIC) & (ds.field("action") == Action.FORGOTTEN.value))
        found = self.select(Selection(ids=tuple(rows["id"].unique().to_pylist()), limit=None), ["id", "reason"])
        return sorted(found["id"].filter(is_erased(found)).to_pylist())

    def reserved(self) -> dict[int, int]:
        """By decision, how many keys the history of letters says that it reserved beyond its batch, less those it freed."""
        rows = self._scan(["reserved"], ds.field("event") == HISTORIC).group_by("seq").aggregate([("reserved", "sum")])
        return dict(zip(rows["seq"].to_pylist(), rows["reserved_sum"].to_pylist(), strict=True))

    def _current(self, selection: Selection, names: Sequence[str]) -> pa.Table:
        """Newest rows of the letters that match: PLACE, seq, event, the seq of the newest `edited` row (`full`), and these columns."""
        asked = _asked(selection)
        wanted = dict.fromkeys([*PLACE, "event", "holds_key", *asked, *names])
        rows = self._scan(list(wanted), _fixed(selection) & ds.field("event").isin(list(STATES)))
        rows = _newest(rows)
        tests = [test for column in asked for test in _tests(rows, selection, column)]
        if selection.text is not None:
            tests.append(_mentions(rows, selection.text))
        return rows.filter(functools.reduce(pc.and_, tests)) if tests else rows

    def _scan(self, names: list[str], condition: ds.Expression) -> pa.Table:
        read = dict.fromkeys(["seq", "generation", "decided_in", *names])
        with tables.reading("of dead letters"):
            rows = tables.rows_where(self.events, list(read), condition)
        return self.decided(rows)

    def _filled(self, rows: pa.Table, names: Sequence[str]) -> pa.Table:
        """These columns of the letters whose newest rows these are."""
        have = {n: rows[n] for n in rows.column_names}
        missing = [n for n in names if n not in have and n != "duplicates"]
        counts = ["key", "holds_key", "count"] if "duplicates" in names else []
        if light := list(dict.fromkeys([*(n for n in missing if n not in HEAVY), *counts])):
            have |= _columns(self._fetch(rows, rows["seq"], light, STATES))
        if heavy := [n for n in missing if n in HEAVY]:
            have |= _columns(self._fetch(rows, rows["full"], heavy, (PARKED, EDITED)))
        if "duplicates" in names:
            have["duplicates"] = self._duplicates(rows["seq"], have["key"], have["holds_key"], have["count"])
        schema = pa.schema([ALL_LETTERS.field(n) for n in names])
        return pa.table([_chunked(have[n], schema.field(n).type) for n in names], schema=schema) if names else pa.table({})

    def _fetch(self, rows: pa.Table, seqs: pa.ChunkedArray, names: list[str], events: Collection[str]) -> pa.Table:
        """Columns of the rows with these ids and seqs, in this order."""
        if not rows.num_rows:
            return pa.table({n: pa.array([], EVENTS.field(n).type) for n in names})
        found = self._scan(["id", *names], _near(rows) & ds.field("event").isin(list(events)))
        ids = rows["id"].combine_chunks()
        at = pc.index_in(found["id"], value_set=ids)
        hit = pc.fill_null(pc.equal(found["seq"], pc.take(seqs, at)), False)
        found, at = found.filter(hit), at.filter(hit)
        where = np.empty(rows.num_rows, dtype=np.int64)
        where[at.to_numpy()] = np.arange(found.num_rows)
        return found.select(names).take(pa.array(where))

    def _duplicates(self, seqs: pa.ChunkedArray, keys: Any, holds: Any, counted: Any) -> pa.Array:
        """Duplicates counted before the decision that changed the letter last, and from that decision on while it holds its key."""
        known = pc.fill_null(pc.if_else(holds, keys, None), b"")
        wanted = pa.chunked_array([known]) if isinstance(known, pa.Array) else known
        duplicates = self._scan(["key", "count"], (ds.field("event") == DUPLICATE) & ds.field("key").isin(wanted.unique()))
        total = (
            counted.to_numpy(zero_copy_only=False).astype(np.int64)
            if isinstance(counted, pa.Array)
            else counted.to_numpy().astype(np.int64)
        )
        if duplicates.num_rows:
            at = pc.index_in(duplicates["key"].cast(pa.binary()), value_set=wanted.combine_chunks().cast(pa.binary())).to_numpy()
            since = seqs.to_numpy()[at] <= duplicates["seq"].to_numpy()
            total = total.copy()
            np.add.at(total, at[since], duplicates["count"].to_numpy()[since])
        return pa.array(total, pa.int64())


def _columns(table: pa.Table) -> dict[str, Any]:
    return {n: table[n] for n in table.column_names}


def _chunked(values: Any, kind: pa.DataType) -> Any:
    return values.cast(kind) if values.type != kind else values


def _int(values: pa.ChunkedArray) -> I64:
    return np.asarray(values.cast(pa.int64()).to_numpy())


def _fixed(selection: Selection) -> ds.Expression:
    """What never changes about a letter: all its rows say the same, so files and row groups without it need no reading."""
    tests = [ds.field(name) == value for name in _FIXED if (value := getattr(selection, name)) is not None]
    if selection.first is not None:
        tests.append(ds.field("sequence_number") >= selection.first)
    if selection.last is not None:
        tests.append(ds.field("sequence_number") <= selection.last)
    if selection.id is not None:  # hex digits sort before g
        tests.append((ds.field("id") >= selection.id) & (ds.field("id") < selection.id + "g"))
    if selection.ids is not None:
        tests.append(ds.field("id").isin(pa.array(selection.ids, pa.string())))
    if selection.sequences is not None:
        tests.append(ds.field("sequence").isin(pa.array(selection.sequences, pa.binary())))
    return functools.reduce(lambda a, b: a & b, tests, ds.scalar(True))


def _asked(selection: Selection) -> list[str]:
    """Columns that may change and that the selection asks about."""
    found = [column for name, column in _EQUAL.items() if getattr(selection, name) is not None]
    found += ["status"] if selection.statuses is not None else []
    found += ["last_failed_at"] if selection.since is not None or selection.until is not None else []
    return list(dict.fromkeys(found + ([*_TEXTS] if selection.text is not None else [])))


def _tests(rows: pa.Table, selection: Selection, column: str) -> list[Any]:
    tests = [pc.equal(rows[c], value) for n, c in _EQUAL.items() if c == column and (value := getattr(selection, n)) is not None]
    if column == "status" and selection.statuses is not None:
        tests.append(pc.is_in(rows["status"], value_set=pa.array(selection.statuses, pa.string())))
    if column == "last_failed_at" and selection.since is not None:
        tests.append(pc.greater_equal(rows[column], pa.scalar(selection.since, rows[column].type)))
    if column == "last_failed_at" and selection.until is not None:
        tests.append(pc.less(rows[column], pa.scalar(selection.until, rows[column].type)))
    return tests


def _mentions(rows: pa.Table, text: str) -> Any:
    found = [pc.match_substring(pc.utf8_lower(pc.fill_null(rows[n], "")), text.lower()) for n in _TEXTS]
    return functools.reduce(pc.or_, found)


def _newest(rows: pa.Table) -> pa.Table:
    """One row per letter, the one that counts, with `full`: the seq of the one that its HEAVY columns are in."""
    encoded = rows["id"].combine_chunks().dictionary_encode()
    if len(encoded.dictionary) == rows.num_rows:
        return rows.append_column("full", rows["seq"])
    codes = encoded.indices.to_numpy()
    seqs, events = rows["seq"].to_numpy(), rows["event"]
    # Of changes and of parked rows that hold a key the last counts, more than any other parked row; of those the first.
    parked, holds = pc.equal(events, PARKED).to_numpy(), pc.fill_null(rows["holds_key"], False).to_numpy()
    value = np.where(parked & ~holds, -seqs, 2 * seqs + ~parked)
    last = _last(codes, value, np.ones(len(codes), bool))
    full = _last(codes, value, ~pc.equal(events, CHANGED).to_numpy())
    return rows.take(pa.array(last)).append_column("full", pa.array(seqs[full], pa.int64()))


def _last(codes: I64, value: I64, among: npt.NDArray[np.bool_]) -> I64:
    """For each code the row with the highest value."""
    rows = np.flatnonzero(among)
    order = rows[np.argsort(value[rows], kind="stable")]
    found = np.empty(codes.max() + 1 if len(codes) else 0, dtype=np.int64)
    found[codes[order]] = order  # of several for one place the last stays
    return found


def _in_order(rows: pa.Table) -> pa.Array:
    """The rows' order by position; columns of one value cost nothing."""
    keys = [n for n in PLACE if len(set(pc.min_max(rows[n]).as_py().values())) > 1]
    return pc.sort_indices(rows.select([*keys]), [(n, "ascending") for n in keys]) if keys else pa.array(range(rows.num_rows), pa.int64())


def _behind(rows: pa.Table, place: Sequence[Any]) -> Any:
    """Which rows come after this place."""
    behind, equal = pa.repeat(False, rows.num_rows), pa.repeat(True, rows.num_rows)
    for name, value in zip(PLACE, place, strict=True):
        behind = pc.or_(behind, pc.and_(equal, pc.greater(rows[name], value)))
        equal = pc.and_(equal, pc.equal(rows[name], value))
    return behind


def _near(rows: pa.Table) -> ds.Expression:
    """What prunes files and row groups to those that may hold these letters."""
    bounds = pc.min_max(rows["sequence_number"]).as_py()
    near = (ds.field("sequence_number") >= bounds["min"]) & (ds.field("sequence_number") <= bounds["max"])
    near &= ds.field("partition").isin(rows["partition"].unique())
    return near & ds.field("id").isin(rows["id"].combine_chunks()) if rows.num_rows <= _MANY else near


def select(found: Iterable[Letters], selection: Selection, names: Sequence[str]) -> pa.Table:
    """Letters of consumers, given in the order of their names. Raises ConfigError where `after` names no letter."""
    after, waiting = None, selection.after is not None
    parts, left = [pa.schema([ALL_LETTERS.field(n) for n in names]).empty_table()], selection.limit
    for letters in found:
        if waiting and (after := letters.place(str(selection.after))) is None:
            continue
        waiting = False
        parts.append(letters.select(replace(selection, limit=left), names, after))
        after = None
        left = None if left is None else left - parts[-1].num_rows
        if left == 0:
            break
    if waiting:
        raise ConfigError(f"There is no letter {selection.after!r} to continue after. Begin with the first page again.")
    return pa.concat_tables(parts)


def groups(found: Iterable[Letters], selection: Selection) -> pa.Table:
    """GROUPS of the letters of consumers."""
    parts = [letters.groups(selection) for letters in found]
    by = ["fingerprint", "kind"]
    order = [("letters", "descending"), ("fingerprint", "ascending"), ("kind", "ascending")]
    counted, examples = (pa.concat_tables(p) for p in zip(*parts, strict=True)) if parts else (pa.table({}), pa.table({}))
    if not examples.num_rows:
        return GROUPS.empty_table()
    sums = counted.group_by(by).aggregate([("letters", "sum"), ("first_failed_at", "min"), ("last_failed_at", "max")])
    table = sums.select([*by, "letters_sum", "first_failed_at_min", "last_failed_at_max"]).rename_columns(GROUPS.names[:5])
    table = table.sort_by(order).slice(0, selection.limit)
    chosen = table.join(examples.rename_columns([*by, "example", "reason", "last_failed_at"]), [*by, "last_failed_at"], join_type="inner")
    chosen = chosen.sort_by([*order, ("example", "ascending")])
    firsts = chosen.append_column("row", pa.array(range(chosen.num_rows), pa.int64())).group_by(by).aggregate([("row", "min")])
    return chosen.take(firsts["row_min"].sort()).select(GROUPS.names).cast(GROUPS)


def _counted(rows: pa.Table, by: list[str]) -> pa.Table:
    """GROUPS without example and reason."""
    table = rows.group_by(by).aggregate([("id", "count"), ("first_failed_at", "min"), ("last_failed_at", "max")])
    return table.select([*by, "id_count", "first_failed_at_min", "last_failed_at_max"]).rename_columns(GROUPS.names[:5])


def _field(name: str) -> pa.Field:
    kind = LETTERS.field(name).type
    return pa.field(name, pa.binary() if kind == pa.binary(16) else kind, nullable=name not in _ALWAYS)


EVENTS = pa.schema(
    [
        pa.field("event", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),  # duplicates: of `duplicate` rows, and those so far where a letter changes
        *map(_field, _FIRST),
        *(_field(n) for n in LETTERS.names if n not in _FIRST),
        *(f.with_nullable(True) for f in _ADDED),  # decided_in: generation of the decision, if not that of the letter
    ]
)


def letters_sink(sinks: Sinks, uri: str, consumer: str) -> Sink:
    """The table of a consumer's events, created if need be. Crash: it is there or not."""
    try:
        sink = sinks.open(LETTERS_SINK, uri)
    except SinkMismatch:
        if sinks.table(uri) is not None:
            raise
        sinks.engine.create(uri, EVENTS, f"dedup dead letters of {consumer}", _PROPERTIES)
        sink = sinks.open(LETTERS_SINK, uri)
    return sink


def parked_rows(letters: pa.Table, seq: int) -> pa.Table:
    """EVENTS for letters as they come in."""
    return _rows(PARKED, seq, letters, pa.repeat(pa.scalar(0, pa.int64()), letters.num_rows))


def changed_rows(letters: pa.Table, heavy: bool, head: Head, seq: int) -> pa.Table:
    """EVENTS for letters (LETTERS + duplicates) as they are after a change.

    Args:
        heavy: one of the columns HEAVY has changed.
    """
    kept = letters.append_column("decided_in", pa.repeat(pa.scalar(head.generation, pa.int32()), letters.num_rows))
    if not heavy:
        kept = kept.drop_columns(sorted(HEAVY))
    return _rows(EDITED if heavy else CHANGED, seq, kept, letters["duplicates"])


def duplicate_rows(duplicates: pa.Table, head: Head, seq: int) -> pa.Table:
    """EVENTS for duplicates of held keys (columns key, count)."""
    return _rows(DUPLICATE, seq, _by(duplicates.select(["key"]), head), duplicates["count"])


def history_rows(history: pa.Table, head: Head, seq: int) -> pa.Table:
    """EVENTS for rows of HISTORY."""
    named = history.rename_columns(["id" if n == "letter_id" else n for n in history.column_names])
    return _rows(HISTORIC, seq, _by(named, head), pa.repeat(pa.scalar(0, pa.int64()), history.num_rows))


def _by(rows: pa.Table, head: Head) -> pa.Table:
    rows = rows.append_column("consumer", pa.repeat(head.consumer, rows.num_rows))
    return rows.append_column("generation", pa.repeat(pa.scalar(head.generation, pa.int32()), rows.num_rows))


def _rows(event: str, seq: int, rows: pa.Table, count: pa.Array | pa.ChunkedArray) -> pa.Table:
    own = {"event": pa.repeat(event, rows.num_rows), "seq": pa.repeat(pa.scalar(seq, pa.int64()), rows.num_rows), "count": count}
    columns = [own.get(f.name, rows[f.name] if f.name in rows.column_names else pa.nulls(rows.num_rows, f.type)) for f in EVENTS]
    return pa.table([c.cast(f.type) for c, f in zip(columns, EVENTS, strict=True)], schema=EVENTS)


def together(parts: Sequence[pa.Table]) -> pa.Table:
    """EVENTS of one decision, in the order of position, so that a page of letters lies in few row groups."""
    rows = pa.concat_tables([EVENTS.empty_table(), *parts])
    return (
        rows.take(pc.sort_indices(rows, [(n, "ascending") for n in ("topic", "partition", "sequence_number")])) if len(parts) > 1 else rows
    )


class EventRows(Protocol):
    """A dataset of Arrow, or what answers like one."""

    def to_table(self, columns: Sequence[str] | None = None, filter: ds.Expression | None = None) -> pa.Table:
        """Rows that the filter lets through."""


@dataclass(frozen=True)
class Several:
    """Rows of several places as one."""

    schema: pa.Schema
    parts: tuple[EventRows, ...]

    def to_table(self, columns: Sequence[str] | None = None, filter: ds.Expression | None = None) -> pa.Table:
        """Rows that the filter lets through."""
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(n).with_nullable(True) for n in names])
        return pa.concat_tables([tables.rows_where(part, names, filter).cast(schema) for part in self.parts])
