"""What a person's decision about dead letters means: pure functions from letters as they are to what has to be written.

Discard, reopen, take in; the rows of history; the keys that a letter holds, and the one that a person gives it. A letter whose status
does not allow the decision is skipped, and the plan says why. Called by reprocessing/dead_letters.py, and for letters that a batch parks.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from deadletter.failure import Failure
from deadletter.letter import HISTORY, Action, Kind, Status, is_erased, table_of
from deadletter.store import KEYS, Change, Erase, Free, LetterStep, Note, Park

WAITING_STATUSES = (Status.OPEN.value, Status.BLOCKED.value)

BUSY = "somebody else is changing it right now"
NOT_THERE = "there is no such letter"
NOTHING_LEFT = "its contents were erased: nothing is left that could be run"
ERASED_BEFORE = "it was erased before"

REASONS = {
    Kind.UNDECODABLE: "the body does not decode",
    Kind.NO_KEY: "every part of the idempotence key is null: the event lacks it, or idempotence_key= names the wrong column",
    Kind.KEY_CONFLICT: "the idempotence key was decided before with another payload",
}

PARKED_AGAIN = (
    "id", "event_key", "key", "holds_key", "idempotence_key", "payload_hash", "body", "body_size", "body_sha256", "kind", "reason",
    "error_type", "error_message", "stack", "fingerprint", "attempts", "first_failed_at", "last_failed_at", "status", "blocked_by",
    "extras",
)  # fmt: skip
"""Columns of LETTERS that a letter gets where it is parked once more: all but its position, headers and sequence."""

SHOWN = 300
"""Characters of an error message that make the reason of a letter."""


def reason_of(failure: Failure) -> str:
    """The reason of a letter, in one line; where it is cut, it says so."""
    message = " ".join(failure.message.split())
    return f"{failure.error_type}: {message if len(message) <= SHOWN else message[: SHOWN - 1] + '…'}"


_ENTRY, _NO_HISTORY = pa.struct(list(HISTORY)), HISTORY.empty_table()


@dataclass(frozen=True)
class Who:
    """Who decided, why and when."""

    by: str
    reason: str
    at: dt.datetime

    def did(self, action: Action) -> dict[str, Any]:
        """The columns of HISTORY that this decision gives all its rows."""
        return {"at": self.at, "action": action.value, "by": self.by, "reason": self.reason or None}


@dataclass(frozen=True)
class Plan:
    """What one transaction writes, and which letters it leaves as they are."""

    steps: tuple[LetterStep, ...] = ()
    reserve: pa.Table = field(default_factory=KEYS.empty_table)  # KEYS that must be new
    kinds: Mapping[str, int] = field(default_factory=dict)  # of the letters that change
    skipped: Mapping[str, Sequence[str]] = field(default_factory=dict)  # why -> ids


def discard(letters: pa.Table, past: pa.Table, known: Iterable[bytes], who: Who, release_key: bool) -> Plan:
    """Give letters up. Those that are discarded already can still release their key.

    Args:
        letters: as they are now, columns of LETTERS.
        past: HISTORY of those that hold a key, where it is to be released.
        known: which of the keys of `held(letters, past)` are reserved; those from before a reset may count no longer.
    """
    waits, holds = _among(letters["status"], WAITING_STATUSES), letters["holds_key"].combine_chunks()
    gone = _among(letters["status"], (Status.DISCARDED.value,))
    freed = holds if release_key else pa.repeat(False, letters.num_rows)
    chosen = letters.filter(pc.or_(waits, pc.and_(gone, freed)))
    there = set(known)
    keys = {i: [k for k in own if k in there] for i, own in held(chosen, past).items()} if release_key else {}
    changes = {"id": chosen["id"], "status": pa.repeat(Status.DISCARDED.value, chosen.num_rows)}
    if release_key:
        changes["holds_key"] = pa.repeat(False, chosen.num_rows)
    discarded = letters.filter(waits)["id"].to_pylist()
    entries = [{**who.did(Action.DISCARDED), "letter_id": i} for i in discarded]
    entries += [{**who.did(Action.RELEASED), "letter_id": i, "reserved": -len(k)} for i, k in keys.items()]
    steps = [Change(pa.table(changes), history(entries))] if chosen.num_rows else []
    all_keys = sorted({key for found in keys.values() for key in found})
    free = [Free(pa.table({"key": pa.array(all_keys, pa.binary(16))}))] if all_keys else []
    return Plan((*steps, *free), kinds=_kinds(chosen), skipped=_left(letters, chosen))


def reopen(letters: pa.Table, past: pa.Table, known: Iterable[bytes], who: Who) -> Plan:
    """Take discards back. A letter that had released its keys takes them again; where one was decided meanwhile it stays discarded.

    Args:
        past: HISTORY of those letters that hold no key.
        known: which of the keys of `released(letters, past)` are reserved or held.
    """
    blank = letters.filter(is_erased(letters))["id"].to_pylist()
    gone = letters.filter(pc.and_(_among(letters["status"], (Status.DISCARDED.value,)), pc.invert(is_erased(letters))))
    wanted, taken = released(gone, past), set(known)
    refused: dict[str, list[str]] = {}
    for letter, keys in wanted.items():
        if taken.isdisjoint(keys):
            taken.update(keys)
        else:
            refused.setdefault("its key was released, and has been decided by another event since", []).append(letter)
    chosen = gone.filter(pc.invert(_among(gone["id"], [i for ids in refused.values() for i in ids])))
    takes = {i: wanted.get(i, []) for i in chosen["id"].to_pylist()}
    changes = {
        "id": chosen["id"],
        "status": pa.repeat(Status.OPEN.value, chosen.num_rows),
        "holds_key": pc.or_(chosen["holds_key"], chosen["key"].is_valid()),
    }
    entries = [{**who.did(Action.REOPENED), "letter_id": i, "reserved": len(keys)} for i, keys in takes.items()]
    steps = [Change(pa.table(changes), history(entries))] if chosen.num_rows else []
    others = letters.filter(pc.invert(is_erased(letters)))
    return Plan(tuple(steps), _reserve(chosen, takes), _kinds(chosen), {**_left(others, gone), **refused, **_told(NOTHING_LEFT, blank)})


def forget(letters: pa.Table, who: Who) -> Plan:
    """Erase what letters hold of their events. Those that wait for somebody are work that was not done: they stay as they are."""
    blank = letters.filter(is_erased(letters))["id"].to_pylist()
    others = letters.filter(pc.invert(is_erased(letters)))
    chosen = others.filter(pc.invert(_among(others["status"], WAITING_STATUSES)))
    entries = [{**who.did(Action.FORGOTTEN), "letter_id": i} for i in chosen["id"].to_pylist()]
    steps = (Erase(chosen.select(["id"]), history(entries)),) if chosen.num_rows else ()
    return Plan(steps, kinds=_kinds(chosen), skipped={**_left(others, chosen), **_told(ERASED_BEFORE, blank)})


def _told(why: str, ids: list[str]) -> dict[str, list[str]]:
    return {why: ids} if ids else {}


def released(letters: pa.Table, past: pa.Table) -> dict[str, list[bytes]]:
    """Letter id -> the keys that it has and does not hold."""
    return keys_of(letters.filter(pc.invert(letters["holds_key"])), past)


def take_in(letters: pa.Table, past: pa.Table, known: Iterable[bytes], who: Who) -> Plan:
    """Letters from a file, as they were there. One that holds a key which is decided here comes in as a DUPLICATE.

    Args:
        letters: LETTERS + duplicates, in position order; none of them is in the store.
        past: their HISTORY.
        known: which of the keys of `held(letters, past)` are reserved or held.
    """
    wanted, taken, duplicates = held(letters, past), set(known), set()
    for letter, keys in wanted.items():
        if taken.isdisjoint(keys):
            taken.update(keys)
        else:
            duplicates.add(letter)
    takes = {i: keys for i, keys in wanted.items() if i not in duplicates}
    rows = _as_duplicates(letters, duplicates)
    entries = [{**who.did(Action.REOPENED), "letter_id": i, "reserved": len(takes.get(i, ()))} for i in rows["id"].to_pylist()]
    noted = rows.filter(pc.and_(rows["holds_key"], pc.greater(letters["duplicates"], 0)))
    steps: list[LetterStep] = [Park(rows.drop_columns(["duplicates"]), pa.concat_tables([past, history(entries)]))]
    ordered = rows.filter(pc.and_(rows["sequence"].is_valid(), _among(rows["status"], WAITING_STATUSES)))
    if ordered.num_rows:
        steps.append(Change(ordered.select(["id"]), HISTORY.empty_table()))
    if noted.num_rows:
        steps.append(Note(pa.table({"key": noted["key"], "count": noted["duplicates"]})))
    return Plan(tuple(steps), _reserve(rows, takes), _kinds(rows), {"duplicates": sorted(duplicates)} if duplicates else {})


def parked_again(step: Park, there: pa.Table) -> tuple[Park, Change | None]:
    """The letters that are new, and what becomes of those that are there: an import brought them before their positions were delivered.

    A letter holds the key that its decision has just reserved. So the one that is there does not hold it: what was decided about it was
    decided in another store, and has no effect here. It is open again, as this decision says. A letter without a key is left as it is.

    Args:
        there: id, key and holds_key of those of these letters that are in the store.
    """
    old = {i: key if holds else None for i, key, holds in zip(*(there[n].to_pylist() for n in ("id", "key", "holds_key")), strict=True)}
    fresh = pc.invert(_among(step.letters["id"], list(old)))
    wanted = zip(*(step.letters[n].to_pylist() for n in ("id", "key", "holds_key")), strict=True)
    again = _among(step.letters["id"], [i for i, key, holds in wanted if i in old and holds and key != old[i]])
    return _part(step, fresh), _reopened(_part(step, again)) if again.true_count else None


def _part(step: Park, chosen: pa.Array) -> Park:
    letters = step.letters.filter(chosen)
    return Park(letters, step.history.filter(_among(step.history["letter_id"], letters["id"].to_pylist())))


def _reopened(step: Park) -> Change:
    """Letters that are there as they are parked now; who reopened them is the stream itself."""
    rows = step.letters.select(["id", "last_failed_at"]).to_pylist()
    entries = [{"letter_id": row["id"], "at": row["last_failed_at"], "action": Action.REOPENED.value} for row in rows]
    return Change(step.letters.select(PARKED_AGAIN), pa.concat_tables([step.history, history(entries)]))


def held(letters: pa.Table, past: pa.Table) -> dict[str, list[bytes]]:
    """Letter id -> the keys that it holds."""
    return keys_of(letters.filter(letters["holds_key"]), past)


def _as_duplicates(letters: pa.Table, duplicates: set[str]) -> pa.Table:
    """These letters with some of them settled as duplicates. Who waits behind whom is not told: it is found out in the store."""
    duplicate = _among(letters["id"], sorted(duplicates))
    changed = {
        "status": pc.if_else(duplicate, Status.DUPLICATE.value, letters["status"]),
        "holds_key": pc.and_(letters["holds_key"], pc.invert(duplicate)),
        "blocked_by": pa.nulls(letters.num_rows, pa.string()),
    }
    return pa.table({n: changed.get(n, letters[n]) for n in letters.column_names}, schema=letters.schema)


def _reserve(letters: pa.Table, takes: Mapping[str, Sequence[bytes]]) -> pa.Table:
    hashes = dict(zip(letters["id"].to_pylist(), letters["payload_hash"].to_pylist(), strict=True))
    pairs = [(key, hashes[letter] or 0) for letter, keys in takes.items() for key in keys]
    return reservations([key for key, _ in pairs], [value for _, value in pairs])


def _among(column: pa.ChunkedArray, values: Sequence[str]) -> pa.Array:
    found = pc.is_in(column, value_set=pa.array(values, pa.string()))
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _kinds(letters: pa.Table) -> dict[str, int]:
    return dict(sorted(Counter(letters["kind"].to_pylist()).items()))


def _left(letters: pa.Table, chosen: pa.Table) -> dict[str, list[str]]:
    """Why -> ids of those letters that their status keeps as they are."""
    left: dict[str, list[str]] = {}
    others = letters.filter(pc.invert(_among(letters["id"], chosen["id"].to_pylist())))
    for letter, status in zip(others["id"].to_pylist(), others["status"].to_pylist(), strict=True):
        left.setdefault(f"it is {status}", []).append(letter)
    return left


def edits(history: pa.Table) -> pa.Table:
    """The rows of HISTORY that tell of an edit.

    `key` is what the letter had before it; `idempotence_key` is null but where the edit gave the letter another key.
    """
    return history.filter(pc.equal(history["action"], Action.EDITED.value))


def given_a_key(history: pa.Table) -> set[str]:
    """Ids of the letters to which a person gave a key: it counts, whatever the body says."""
    past = edits(history)
    return set(past.filter(past["idempotence_key"].is_valid())["letter_id"].to_pylist())


def keys_of(letters: pa.Table, history: pa.Table) -> dict[str, list[bytes]]:
    """Letter id -> its keys: the one it has, and those that edits replaced.

    While `holds_key` is true, it holds all of them: stores find them known, no purge frees them, and no other event is decided under them.

    Args:
        history: HISTORY of these letters, or of more.
    """
    found: dict[str, dict[bytes, None]] = defaultdict(dict)
    past = edits(history)
    past = past.filter(pc.is_in(past["letter_id"], value_set=letters["id"].combine_chunks()))
    pairs = [*zip(letters["id"].to_pylist(), letters["key"].to_pylist(), strict=True)]
    pairs += zip(past["letter_id"].to_pylist(), past["key"].to_pylist(), strict=True)
    for letter, key in pairs:
        if key is not None:
            found[letter][key] = None
    return {letter: list(known) for letter, known in found.items()}


def reservations(keys: Sequence[bytes], payload_hashes: Sequence[int]) -> pa.Table:
    """KEYS, each key once, sorted."""
    distinct = dict(zip(keys, payload_hashes, strict=True))
    ordered = sorted(distinct)
    return pa.table([pa.array(ordered, pa.binary(16)), pa.array([distinct[k] for k in ordered], pa.int64())], schema=KEYS)


def failure_entry(letter: str, failure: Failure, by: str | None = None) -> dict[str, Any]:
    """A row of HISTORY: an attempt that failed."""
    return {
        "letter_id": letter,
        "at": failure.at,
        "action": Action.FAILED.value,
        "by": by,
        "error_type": failure.error_type,
        "error_message": failure.message,
        "stack": failure.stack,
    }


def history(entries: Sequence[Mapping[str, Any]]) -> pa.Table:
    """HISTORY of these rows; what they do not name is null, `reserved` is 0."""
    return table_of([{"reserved": 0, **e} for e in entries], _ENTRY) if entries else _NO_HISTORY
