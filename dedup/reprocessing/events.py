"""Letters as a chunk again: their events, and the keys and the sequences that count for them.

Promises that an event stands as it came in, with the body that a person gave it, that a key which its letter holds is not judged again, and
that no edit moves a letter to another sequence. Nothing here writes. Called by letters.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, Refused
from checkpoint.position import Bools, Ints
from deadletter import hiding, plans
from deadletter.letter import is_erased
from deadletter.store import KEYS
from dedup.core import planning
from dedup.core.envelope import ENVELOPE, POSITION
from dedup.core.index import Index, first_of_each_key
from dedup.core.keys import LETTER, key_words
from dedup.core.planning import NEW, NO_KEY, UNDECODABLE, OnKeyConflict, Order, Settled, Sifted
from dedup.core.rows import picked
from dedup.decode.prepare import Prepare
from dedup.reprocessing.files import Unproven, one_row, refuse_own
from dedup.reprocessing.from_log import WholeEvent

_NAMES = {"key": "event_key"}


def restored(
    letters: pa.Table, whole: Mapping[str, WholeEvent], redact: hiding.Redact | None, lost: Collection[str], *, decodes: bool
) -> tuple[pa.Table, dict[str, str]]:
    """These letters with the contents of their events: sealed ones are opened, masked and cut ones get what the log has.

    Args:
        whole: of letters that keep only a part of their events.
        lost: letters that have no event any more, and need none.
        decodes: whether `data` is going to be made of their bodies.

    Returns:
        The letters without those that cannot be run; and why, by id.
    """
    letters, why = hiding.open_letters(letters, redact, lost)
    masked, changes = hiding.marks(letters), dict[int, dict[str, Any]]()
    cut = letters["body_sha256"].is_valid().to_pylist()  # else somebody has given it a whole body since
    for row, id in enumerate(letters["id"].to_pylist()):
        if id in lost or not (cut[row] and (row in masked or id in whole)):
            continue
        try:
            changes[row] = _from_log(letters.slice(row, 1).to_pylist()[0], masked.get(row), whole.get(id))
        except Refused as error:
            why[id] = str(error)
    letters = hiding.with_contents(letters, changes)
    for id, kept in zip(letters["id"].to_pylist(), letters["extras"].to_pylist(), strict=True):
        if id not in lost and id not in why and (wrong := _wrong(kept, decodes=decodes)):
            why[id] = wrong
    return letters.filter(pc.invert(pc.is_in(letters["id"], value_set=pa.array(list(why), pa.string())))), why


def _from_log(letter: Mapping[str, Any], mark: hiding.HiddenMark | None, event: WholeEvent | None) -> dict[str, Any]:
    if event is None:
        raise Refused("It was changed meanwhile. Call again.")
    if mark is None:
        return {**{name: letter[name] for name in ("properties", "extras")}, "body": event.body}
    return hiding.unmasked(letter, mark, vars(event))


def events_of(letters: pa.Table, *, positions: bool, decodes: bool = True) -> pa.Table:
    """ENVELOPE columns of these letters, the columns that their input had beside them, and `_letter`, the letter's id.

    Args:
        letters: with whole contents, as `restored` makes them, and `of_one_form`.
        positions: False leaves the position columns out: the key-only mode.
        decodes: whether `data` is going to be made of their bodies; else it may be one of the other columns.

    Raises:
        ConfigError: the other columns of a letter have names of the event's own: they would stand in for them.
        Refused: the contents of a letter were erased, or are hidden.
    """
    refuse_erased(letters)
    hiding.refuse_hidden(letters)
    names = [name for name in ENVELOPE.names if positions or name not in POSITION]
    columns = {name: letters[_NAMES.get(name, name)].cast(ENVELOPE.field(name).type) for name in names}
    events = pa.table({**columns, LETTER: letters["id"]})
    others = _extras(letters["id"].to_pylist(), letters["extras"].to_pylist(), decodes=decodes)
    return events if others is None else pa.table({**dict(zip(events.column_names, events.columns, strict=True)), **others})


def of_one_form(letters: pa.Table) -> Bools:
    """Which of these letters can stand in one table with the first of them: no column that two of them have changes its type.

    Args:
        letters: with whole contents, as `restored` makes them.
    """
    known: dict[str, tuple[str, pa.DataType]] = {}
    fit = np.zeros(letters.num_rows, dtype=bool)
    for row, kept in enumerate(letters["extras"].to_pylist()):
        own = {f.name.lower(): (f.name, f.type) for f in pa.ipc.open_stream(kept).schema} if kept else {}
        fit[row] = all(known.get(name, column) == column for name, column in own.items())
        if fit[row]:
            known |= own
    return fit


def refuse_erased(letters: pa.Table) -> None:
    """No handler takes a letter without its contents for an event: whoever names one is told, and nobody can open one."""
    for letter in letters.filter(is_erased(letters))["id"].to_pylist():
        raise Refused(f"Letter {letter}: {plans.NOTHING_LEFT}. Leave it out.")


def _extras(ids: Sequence[str], kept: Sequence[bytes | None], *, decodes: bool) -> dict[str, Any] | None:
    if not any(kept):
        return None
    for letter, one in zip(ids, kept, strict=True):
        if wrong := _wrong(one, decodes=decodes):
            raise ConfigError(f"Letter {letter}, {wrong}")
    tables = [pa.ipc.open_stream(one).read_all() if one else None for one in kept]
    empty = pa.unify_schemas([t.schema for t in tables if t is not None]).empty_table()
    nothing = pa.table([pa.nulls(1, f.type) for f in empty.schema], schema=empty.schema) if len(empty.schema) else empty
    whole = pa.concat_tables([nothing if t is None else t for t in tables], promote_options="default")  # what one lacks is null there
    return dict(zip(whole.column_names, whole.columns, strict=True))


def _wrong(kept: bytes | None, *, decodes: bool) -> str | None:
    """Why an event cannot have these other columns of its letter; None where it can."""
    try:
        names = one_row(kept).column_names if kept else []
        refuse_own(names)
    except Unproven as error:
        return f"{error}: somebody has changed it. Leave it out, or discard it."
    if not decodes or not (data := [name for name in names if name.lower() == "data"]):
        return None
    return (
        f"column extras: it has a column {data[0]!r} of the input, and decode= makes `data` of the body: it was parked without decode=, or "
        "somebody has changed it. Run it with a consumer that has no decode=, leave it out, or discard it."
    )


def as_they_came(prepare: Prepare, incarnations: Mapping[tuple[str, str], int]) -> Prepare:
    """The preparation for events that have the envelope's own names already, in the incarnation they were parked in."""
    return replace(prepare, columns="auto", source=None, part=None, incarnations=dict(incarnations))


def kept_order(letters: pa.Table, ids: Sequence[str]) -> Order:
    """The sequences that these letters came in with, in the order of `ids`: an edit of the body moves no letter to another one."""
    at = pc.index_in(pa.array(ids, pa.string()), value_set=letters["id"].combine_chunks())
    return Order(letters["sequence"].take(at), len(ids))


@dataclass(frozen=True, eq=False)
class Held:
    """The letters of an index's rows, and the keys they hold."""

    index: Index  # with the keys that count: held ones where a letter holds one
    letters: Sequence[str]  # id of each row
    asked: Bools  # rows whose key is not held by their letter: it has to be reserved


def held_keys(index: Index, ids: Sequence[str], letters: pa.Table, explicit: Bools) -> Held:
    """Which key counts for each row: the one its letter holds, unless an edit of the body made another one of it.

    Args:
        index: as computed from the events.
        ids: letter of each row.
        letters: LETTERS, any order.
        explicit: rows whose letter holds a key that a person gave.
    """
    place = {letter: i for i, letter in enumerate(letters["id"].to_pylist())}
    mine = picked(letters.select(["holds_key", "key"]), np.array([place[letter] for letter in ids], dtype=np.int64))
    holds = mine["holds_key"].to_numpy(zero_copy_only=False).astype(bool)
    high, low = key_words(mine["key"])
    same = (high == index.high) & (low == index.low) & ~index.no_key
    stays = holds & (same | explicit | index.no_key | index.undecodable)
    found = replace(index, high=np.where(stays, high, index.high), low=np.where(stays, low, index.low), no_key=index.no_key & ~stays)
    return Held(found, list(ids), ~stays)


def sift_asked(held: Held) -> Sifted:
    """The rows whose keys have to be reserved, as a chunk of their own."""
    index = held.index.only(np.flatnonzero(held.asked))
    state = np.zeros(len(index), dtype=np.int8)
    state[index.undecodable] = UNDECODABLE
    state[~index.undecodable & index.no_key] = NO_KEY
    nothing = np.zeros(len(index), dtype=bool)
    return Sifted(index, state, nothing, first_of_each_key(index, state == NEW), nothing, KEYS.empty_table())


def settle_held(held: Held, sifted: Sifted, known: pa.Table, on_conflict: OnKeyConflict) -> tuple[Settled, Ints]:
    """The whole chunk after its keys were judged, and the rows that won a key that was not reserved before.

    Args:
        known: what `reserve` returned for `sifted.reserve`.
    """
    asked = planning.settle(sifted, known, "dead_letter" if on_conflict == "error" else on_conflict)
    state = np.zeros(len(held.index), dtype=np.int8)
    state[held.index.undecodable] = UNDECODABLE
    rows = np.flatnonzero(held.asked)
    state[rows] = asked.state
    return Settled(held.index, state, np.zeros(len(held.index), dtype=bool), asked.reserved), rows[asked.state == NEW]
