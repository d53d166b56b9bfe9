"""Dead letters as events again: the table that goes through the same preparation as a batch, and the judgement of its keys. Pure.

Called by reprocessing.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.errors import ConfigError
from dedup import planning
from dedup.decode.prepare import Prepare
from dedup.envelope import ENVELOPE, POSITION
from dedup.index import Bools, Index, Ints, first_of_each_key
from dedup.keys import LETTER
from dedup.letter_proof import Unproven, refuse_own
from dedup.planning import NEW, NO_KEY, UNDECODABLE, OnKeyConflict, Settled, Sifted
from dedup.rows import picked
from dedup.sorting import key_words
from dedup.store import KEYS

_NAMES = {"key": "event_key"}


def events_of(letters: pa.Table, bodies: Mapping[str, bytes], *, positions: bool) -> pa.Table:
    """ENVELOPE columns of these letters, the columns that their input had beside them, and `_letter`, the letter's id.

    Args:
        bodies: letter id -> whole body, of letters that keep only the beginning of theirs.
        positions: False leaves the position columns out: the key-only mode.

    Raises:
        ConfigError: the other columns of a letter have names of the event's own: they would stand in for them.
    """
    names = [name for name in ENVELOPE.names if positions or name not in POSITION]
    columns = {name: letters[_NAMES.get(name, name)].cast(ENVELOPE.field(name).type) for name in names}
    if bodies:
        kept = zip(letters["id"].to_pylist(), letters["body"].to_pylist(), strict=True)
        columns["body"] = pa.array([bodies.get(letter, body) for letter, body in kept], pa.binary())
    events = pa.table({**columns, LETTER: letters["id"]})
    others = _extras(letters["id"].to_pylist(), letters["extras"].to_pylist())
    return events if others is None else pa.table({**dict(zip(events.column_names, events.columns, strict=True)), **others})


def _extras(ids: Sequence[str], kept: Sequence[bytes | None]) -> dict[str, Any] | None:
    if not any(kept):
        return None
    for letter, one in zip(ids, kept, strict=True):
        if one:
            _refuse_own(letter, pa.ipc.open_stream(one).schema.names)
    tables = [pa.ipc.open_stream(one).read_all() if one else None for one in kept]
    empty = pa.unify_schemas([t.schema for t in tables if t is not None], promote_options="permissive").empty_table()
    nothing = pa.table([pa.nulls(1, f.type) for f in empty.schema], schema=empty.schema) if len(empty.schema) else empty
    whole = pa.concat_tables([nothing if t is None else t for t in tables], promote_options="permissive")
    return dict(zip(whole.column_names, whole.columns, strict=True))


def _refuse_own(letter: str, names: Sequence[str]) -> None:
    try:
        refuse_own(names)
    except Unproven as error:
        raise ConfigError(f"Letter {letter}, {error}: somebody has changed it. Leave it out, or discard it.") from error


def as_they_came(prepare: Prepare, incarnations: Mapping[tuple[str, str], int]) -> Prepare:
    """The preparation for events that have the envelope's own names already, in the incarnation they were parked in."""
    return replace(prepare, columns="auto", source=None, part=None, incarnations=dict(incarnations))


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
