"""Reduce the merges of a batch: the last row of each key, in as few merges as the sets of columns allow. Pure.

A MERGE fails on two source rows of one key, and the order in which rows happen to arrive must not choose between them. Rows with different
columns become merges one after the other: a column that a row lacks stays as it is in the sink.

Promises that the sink ends as if the rows of each key had been merged one by one, whichever columns the rows of other keys have. One thing
differs: a row that is older than a deletion of its key before it is left out. For each key and set of columns one row is left, and a
deletion that it follows, so the number of merges depends on the sets of columns, not on the rows. Called by both stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import HandlerError, RowsMisfit, SinkMismatch
from checkpoint.position import Bools, Ints
from dedup.core.envelope import POSITION
from dedup.core.near import listed, meant
from dedup.core.rows import PlainRows, Rows, alike, each_typed, values_refused, without_views
from dedup.core.steps import Merge

_ROW, _KNOWN = "__dedup_row", "__dedup_known"

_PART, _IN_TURN_ROW, _NUMBER, _GONE = "__dedup_part", "__dedup_row", "__dedup_number", "__dedup_gone"

Ranks = Callable[[pa.Table], Mapping[str, pa.ChunkedArray]]
"""(rows) -> `ranks` of `last_per_key`."""


def last_per_key(
    rows: pa.Table, merge: Merge, ranks: Mapping[str, pa.ChunkedArray] | None = None, *, ordered: bool = True
) -> list[pa.Table]:
    """The rows that count, in the order of their positions, or in which they came; keys have 0.0 for -0.0.

    They are two tables where a row follows the deletion of its key: what it lacks is not what the deleted row had.

    Args:
        ranks: of columns that are not to be compared as they are: numbers that compare as the sink compares the values.
        ordered: whether the order in which they came says anything.

    Raises:
        HandlerError: nothing says which one of several rows of one key is the last.
        RowsMisfit: a column that `merge` names is missing, that of newer_by is of a type that has no order, or a key of one that has no
            equality.
    """
    require(rows, merge)
    rows = one_zero(rows, merge)
    compared = _compared(rows, merge, ranks or {})
    if not ordered:
        _refuse_chance(compared, merge)
    if set(POSITION) <= set(rows.column_names):
        moved = pc.sort_indices(compared, sort_keys=[(name, "ascending") for name in POSITION])
        rows, compared = rows.take(moved), compared.take(moved)
    gone = _gone(rows, merge).to_numpy()
    chosen: tuple[Ints, ...]
    if gone.any():
        chosen = _behind_deletions(_key_numbers(compared, merge.keys), _ages(compared, merge), gone)
    else:
        chosen = (_newest(compared, merge),)
    return [rows.take(pa.array(some)) for some in chosen if len(some)] or [rows.slice(0, 0)]


def _refuse_chance(compared: pa.Table, merge: Merge) -> None:
    """Raise HandlerError where rows came as it happened, and nothing but that would choose one of them."""
    if merge.newer_by is not None or set(POSITION) <= set(compared.column_names):
        return
    keys = compared.select(list(merge.keys)).drop_null()  # a key without a value is refused for that
    with _requiring_equality(compared, merge.keys):
        several = keys.group_by(keys.column_names).aggregate([]).num_rows < keys.num_rows
    if several:
        raise HandlerError(
            f"tx.merge got several rows of one key ({', '.join(merge.keys)}) from a DataFrame of which Spark keeps no order, as after a "
            "join, a union or a repartition: let the rows of tx.merge carry their position columns, or name a column with newer_by=, "
            "or make one row of each key."
        )


def _newest(compared: pa.Table, merge: Merge) -> Ints:
    """Of each key the newest row, ascending: the first of several that are equally new, as the sink's row would stay."""
    rows = pa.array(np.arange(compared.num_rows))
    order = np.arange(compared.num_rows)
    if merge.newer_by:
        by = [(_KNOWN, "ascending"), (merge.newer_by, "ascending"), (_ROW, "descending")]
        with requiring_order(compared, merge):
            order = pc.sort_indices(compared.append_column(_ROW, rows), sort_keys=by).to_numpy()
    numbered = compared.select(list(merge.keys)).take(pa.array(order)).append_column(_ROW, rows)
    with _requiring_equality(compared, merge.keys):
        last = numbered.group_by(list(merge.keys)).aggregate([(_ROW, "max")])[f"{_ROW}_max"].to_numpy()
    return np.sort(order[last])


def _behind_deletions(keys: Ints, ages: Ints, gone: Bools) -> tuple[Ints, Ints]:
    """Of each key the last row that counts, and before that those deletions that a row of their key follows; ascending."""
    counts = _counting(keys, ages, gone)
    last, deleted = _last_of_each(keys, counts), _last_of_each(keys, counts & gone)
    return np.setdiff1d(deleted, last), last


def _counting(keys: Ints, ages: Ints, gone: Bools) -> Bools:
    """Which rows do something, merged one by one: those newer than all before them, and the first as new as the deletion before it."""
    order = np.argsort(keys, kind="stable")
    ages, gone, at = ages[order] - ages.min(), gone[order], np.arange(len(order))
    ages += keys[order] * (ages.max() + 1)  # a later key is newer than all before it
    before = np.r_[-1, np.maximum.accumulate(ages)[:-1]]
    newer = ages > before
    top = np.maximum.accumulate(np.where(newer, at, 0))  # the row that is the newest so far
    again = np.flatnonzero((ages == before) & gone[top] & ~gone)
    newer[again[np.unique(top[again], return_index=True)[1]]] = True
    found = np.empty(len(order), dtype=bool)
    found[order] = newer
    return found


def _last_of_each(keys: Ints, these: Bools) -> Ints:
    """Of each key that has some of these rows the last one, ascending."""
    rows = np.flatnonzero(these)[::-1]
    return np.sort(rows[np.unique(keys[rows], return_index=True)[1]])


@contextmanager
def requiring_order(rows: pa.Table, merge: Merge) -> Iterator[None]:
    """Raise RowsMisfit where Arrow cannot order what `merge` goes by."""
    try:
        yield
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
        kind = rows[merge.newer_by].type if merge.newer_by else "a position"
        raise RowsMisfit(f"tx.merge cannot compare rows by newer_by={merge.newer_by!r}: {kind} has no order.") from error


@contextmanager
def _requiring_equality(rows: pa.Table, keys: Sequence[str]) -> Iterator[None]:
    """Raise RowsMisfit where Arrow cannot tell whether two keys are equal."""
    try:
        yield
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
        kinds = ", ".join(f"{name!r} is {rows[name].type}" for name in keys)
        raise RowsMisfit(f"tx.merge cannot compare rows by keys={list(keys)!r}: {kinds}. Use columns of plain values.") from error


def refuse_unknown(merge: Merge, rows: Rows, sink: Collection[str], shown: str) -> None:
    """Raise SinkMismatch where `merge` names a column that the sink lacks: the call is wrong, and no event.

    The column of delete_when may be one of the rows alone. Where single events make the rows, a row without it is the fault of its event.

    Args:
        sink: its columns.
        shown: the sink, for the message.
    """
    asked: list[tuple[str, Sequence[str | None], Collection[str]]] = [("keys", merge.keys, sink), ("newer_by", (merge.newer_by,), sink)]
    if rows.plain() is None:
        asked.append(("delete_when", (merge.delete_when,), [*sink, *rows.schema.names]))
    for argument, names, known in asked:
        if unknown := [name for name in names if name is not None and name not in known]:
            named, also = ", ".join(map(repr, unknown)), ", nor have the rows" if argument == "delete_when" else ""
            raise SinkMismatch(
                f"tx.merge(..., {argument}=...) names {named}, and {shown} has no column of that name{also}. {meant(unknown, known)}"
                f"Correct the name, or add the column. The columns of {shown}: {listed(sink)}."
            )


def require(rows: pa.Table, merge: Merge) -> None:
    """Raise RowsMisfit where a column that `merge` names is missing."""
    missing = [name for name in _named(merge) if name not in rows.column_names]
    if missing:
        raise RowsMisfit(f"tx.merge names {_lacking(missing, 'rows do', rows.column_names)}")


def _named(merge: Merge) -> list[str]:
    return [name for name in (*merge.keys, merge.newer_by, merge.delete_when) if name is not None]


def _lacking(missing: Sequence[str], who: str, names: Iterable[str]) -> str:
    return f"{', '.join(map(repr, missing))}, which the {who} not have: {', '.join(map(str, names))}."


def _refuse_lacking(rows: PlainRows, merge: Merge) -> None:
    """Raise ValuesRefused for rows of single events that lack a column which `merge` names: it tells which rows they are."""
    named = _named(merge)
    by_row = {
        number: f"tx.merge names {_lacking(missing, 'row does', row)}"
        for number, row in enumerate(rows.rows)
        if (missing := [name for name in named if name not in row])
    }
    if by_row:
        raise values_refused(by_row)


def one_zero(rows: pa.Table, merge: Merge) -> pa.Table:
    """The rows with 0.0 for -0.0 in their keys: engines do not agree on whether these are equal."""
    for name in merge.keys:
        if pa.types.is_floating(rows[name].type):
            at = rows.column_names.index(name)
            zeros = pc.equal(rows[name], pa.scalar(0.0, rows[name].type))
            rows = rows.set_column(at, rows.schema.field(at), pc.if_else(zeros, pa.scalar(0.0, rows[name].type), rows[name]))
    return rows


def _compared(rows: pa.Table, merge: Merge, ranks: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    """With ranks for values, and with a column that puts nulls before everything: without a value a row is older than any other."""
    needed = dict.fromkeys([*merge.keys, *([merge.newer_by] if merge.newer_by else []), *(c for c in POSITION if c in rows.column_names)])
    found = pa.table({name: ranks.get(name, rows[name]) for name in needed})
    return found.append_column(_KNOWN, pc.is_valid(rows[merge.newer_by])) if merge.newer_by else found


def merges(rows: Rows, merge: Merge, given: Callable[[Rows], pa.Table], ranks: Ranks) -> list[pa.Table]:
    """The rows as tables to merge in this order. A table has at most one row of each key; its keys have 0.0 for -0.0.

    Args:
        given: makes a table of rows that all have the same columns.

    Raises:
        HandlerError: nothing says which one of several rows of one key is the last.
        ValuesRefused: values do not fit their columns, or rows of single events lack a column that `merge` names.
        RowsMisfit: a column that `merge` names is missing, or that of newer_by is of a type that has no order.
    """
    plain = rows.plain()
    if plain is not None and plain.authors is not None:
        _refuse_lacking(plain, merge)
    numbers, tables = each(rows, lambda some: without_views(given(some)))
    for table in tables:
        require(table, merge)
    if len(tables) == 1:
        return last_per_key(tables[0], merge, ranks(tables[0]), ordered=rows.ordered)
    return list(_turns([one_zero(table, merge) for table in tables], numbers, merge, ranks))


def each(rows: Rows, given: Callable[[Rows], pa.Table]) -> tuple[Sequence[Sequence[int]], list[pa.Table]]:
    """The numbers of rows with the same columns, and the table that `given` makes of each. Raises ValuesRefused, in all parts together."""
    plain = rows.plain()
    numbers = [] if plain is None else alike(plain.rows)
    if plain is None or len(numbers) == 1:
        return numbers, [given(rows)]
    return numbers, each_typed(numbers, [PlainRows([plain.rows[number] for number in some]) for some in numbers], given)


def _turns(tables: Sequence[pa.Table], numbers: Sequence[Sequence[int]], merge: Merge, ranks: Ranks) -> Iterator[pa.Table]:
    compared = _in_turn_compared(tables, numbers, merge)
    for name, ranked in ranks(compared).items():
        compared = compared.set_column(compared.column_names.index(name), name, ranked)
    parts, rows = compared[_PART].to_pylist(), compared[_IN_TURN_ROW].to_numpy()
    chains = _chains(_key_numbers(compared, merge.keys), parts, _ages(compared, merge), compared[_GONE].to_numpy())
    for part, chosen in _schedule(chains, parts):
        yield tables[part].take(pa.array(np.sort(rows[chosen])))


def _in_turn_compared(tables: Sequence[pa.Table], numbers: Sequence[Sequence[int]], merge: Merge) -> pa.Table:
    """What all rows are compared by, in the order in which they count: that of their positions, or that in which they came."""
    placed = all(set(POSITION) <= set(table.column_names) for table in tables)
    names = dict.fromkeys([*merge.keys, *([merge.newer_by] if merge.newer_by else []), *(POSITION if placed else ())])
    found = [_numbered(table, list(names), part, some, merge) for part, (table, some) in enumerate(zip(tables, numbers, strict=True))]
    for name in names:
        if len({table.schema.field(name).type for table in found}) > 1:  # numbers of any size: as decimals, or as texts
            found = [table.set_column(table.column_names.index(name), name, table[name].cast(pa.string())) for table in found]
    return pa.concat_tables(found).sort_by([(name, "ascending") for name in (*(POSITION if placed else ()), _NUMBER)])


def _numbered(table: pa.Table, names: list[str], part: int, numbers: Sequence[int], merge: Merge) -> pa.Table:
    size = table.num_rows
    gone = _gone(table, merge)
    own = {
        _PART: pa.array([part] * size, pa.int64()),
        _IN_TURN_ROW: pa.array(range(size), pa.int64()),
        _NUMBER: pa.array(numbers, pa.int64()),
    }
    return pa.table({**{name: table[name] for name in names}, **own, _GONE: gone})


def _gone(table: pa.Table, merge: Merge) -> pa.ChunkedArray:
    """Which rows delete that of their key."""
    if merge.delete_when is None:
        return pa.chunked_array([pa.repeat(False, table.num_rows)])
    return pc.fill_null(table[merge.delete_when].cast(pa.bool_()), False)


def _key_numbers(compared: pa.Table, keys: Sequence[str]) -> Ints:
    """Of each row a number that rows of the same key share."""
    at = compared.select(list(keys)).append_column(_IN_TURN_ROW, pa.array(range(compared.num_rows), pa.int64()))
    with _requiring_equality(compared, keys):
        rows = at.group_by(list(keys)).aggregate([(_IN_TURN_ROW, "list")])[f"{_IN_TURN_ROW}_list"].combine_chunks()
    found = np.zeros(compared.num_rows, np.int64)
    found[rows.flatten().to_numpy()] = np.repeat(np.arange(len(rows)), rows.value_lengths().to_numpy())
    return found


def _ages(compared: pa.Table, merge: Merge) -> Ints:
    """Of each row how new it is: without a value it is older than any other; without newer_by each is newer than those before it."""
    if merge.newer_by is None:
        return np.arange(compared.num_rows)
    values = compared[merge.newer_by].combine_chunks()
    if pa.types.is_null(values.type):
        return np.full(compared.num_rows, -1)
    with requiring_order(compared, merge):
        ranks = pc.rank(values, tiebreaker="dense").cast(pa.int64())
    return np.asarray(pc.if_else(values.is_valid(), ranks, -1))


def _chains(keys: Ints, parts: Sequence[int], ages: Ints, gone: Bools) -> list[list[int]]:
    """Of each key the rows that leave something behind, in their order: of rows with the same columns the last one that counts."""
    chains: dict[int, dict[tuple[int, bool], int]] = {}
    for row in np.flatnonzero(_counting(keys, ages, gone)).tolist():
        part, deletes = parts[row], bool(gone[row])
        chain = chains.setdefault(int(keys[row]), {})
        if deletes:
            chain.clear()
        chain.pop((part, deletes), None)
        chain[part, deletes] = row
    return [list(chain.values()) for chain in chains.values()]


def _schedule(chains: Sequence[Sequence[int]], parts: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(part, rows) one after the other: those of each chain in their order."""
    turns: list[tuple[int, list[int]]] = []
    places: dict[tuple[int, ...], list[list[int]]] = {}
    for chain in chains:
        pattern = tuple(parts[row] for row in chain)
        if pattern not in places:
            places[pattern] = list(_placed(pattern, turns))
        for row, turn in zip(chain, places[pattern], strict=True):
            turn.append(row)
    return turns


def _placed(pattern: Sequence[int], turns: list[tuple[int, list[int]]]) -> Iterator[list[int]]:
    """The first turns of these parts that follow one another; those that are missing come behind all others."""
    at = 0
    for part in pattern:
        at = next((n for n in range(at, len(turns)) if turns[n][0] == part), len(turns))
        if at == len(turns):
            turns.append((part, []))
        yield turns[at][1]
        at += 1


def disjoint_runs(keys: Sequence[pa.Table]) -> list[range]:
    """Neighbours that have no key in common, in runs that are as long as can be: whoever merges a run as one merges what it would in turn.

    Args:
        keys: of each merge, in their order; all with the same columns.
    """
    tables = np.repeat(np.arange(len(keys)), [table.num_rows for table in keys])
    numbers = _key_numbers(pa.concat_tables(keys), keys[0].column_names)
    order = np.argsort(numbers, kind="stable")
    same = numbers[order][1:] == numbers[order][:-1]
    nearest = np.full(len(keys), -1)  # the last one before it that has one of its keys
    np.maximum.at(nearest, tables[order][1:][same], tables[order][:-1][same])
    starts = [0]
    for at in range(1, len(keys)):
        if nearest[at] >= starts[-1]:
            starts.append(at)
    return [range(start, end) for start, end in pairwise([*starts, len(keys)])]
