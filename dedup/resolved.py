"""What becomes of dead letters that were tried again: their new state and what is appended to their history. Pure.

Called by reprocessing.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from deadletter.failure import Failure
from deadletter.letter import LETTERS, Action, Kind, Status, fingerprint
from dedup.letters import REASONS, SHOWN, Why, failure_entry, history
from dedup.planning import DUPLICATE, LETTER_KINDS, NEW, SKIPPED, WAITING, Settled
from dedup.rows import table_of
from dedup.sorting import key_bytes
from dedup.steps import Change

CHANGED = (
    "id", "key", "holds_key", "idempotence_key", "payload_hash", "kind", "reason", "error_type", "error_message", "stack", "fingerprint",
    "attempts", "last_failed_at", "status",
)  # fmt: skip
"""Columns of LETTERS that an attempt changes, and the id."""


@dataclass(frozen=True)
class Tried:
    """Letters after an attempt; all sequences are by row of the chunk."""

    settled: Settled
    why: Why
    letters: Sequence[Mapping[str, Any]]  # as they were
    texts: Sequence[str | None]  # the readable keys as computed
    won: frozenset[int]  # rows that reserved a key

    def state(self, row: int) -> int:
        """What became of a row."""
        return int(self.settled.state[row])


def change_of(tried: Tried, by: str, reason: str | None, at: dt.datetime) -> Change:
    """The step that writes it. Rows that only waited are left as they are, but for a key that they took before that was known."""
    rows = [row for row in range(len(tried.letters)) if tried.state(row) != WAITING or row in tried.won]
    letters = [_after(tried, row, at) for row in rows]
    entries = [entry for row in rows for entry in _entries(tried, row, by, reason, at)]
    return Change(table_of(letters, _CHANGED), history(entries))


_CHANGED = pa.struct([LETTERS.field(name) for name in CHANGED])


def succeeded(state: int) -> bool:
    """Whether a state settles the letter."""
    return state in (NEW, SKIPPED, DUPLICATE)


def _after(tried: Tried, row: int, at: dt.datetime) -> dict[str, Any]:
    old, state = {name: tried.letters[row][name] for name in CHANGED}, tried.state(row)
    if succeeded(state):
        status = Status.DUPLICATE if state == DUPLICATE else Status.REPROCESSED
        return {**old, "status": status.value, "holds_key": False}
    if state == WAITING:
        return {**old, **_key(tried, row)}
    return {**old, **_key(tried, row), **_error(tried, row, at), "attempts": old["attempts"] + 1}


def _key(tried: Tried, row: int) -> dict[str, Any]:
    """A key that this attempt reserved is held from now on: else it would be neither an effect's nor a letter's."""
    if row not in tried.won:
        return {}
    index = tried.settled.index
    key = key_bytes(index.high[row : row + 1], index.low[row : row + 1])[0].as_py()
    return {"key": key, "holds_key": True, "idempotence_key": tried.texts[row], "payload_hash": int(index.payload[row])}


def _error(tried: Tried, row: int, at: dt.datetime) -> dict[str, Any]:
    failure, kind = _failure(tried, row), LETTER_KINDS[tried.state(row)]
    reason = f"{failure.error_type}: {' '.join(failure.message.split())[:SHOWN]}" if failure else _said(tried, row, kind)
    shown = Kind.TOO_LARGE if tried.letters[row]["kind"] == Kind.TOO_LARGE else kind
    return {
        "kind": shown.value,
        "reason": reason,
        "error_type": failure and failure.error_type,
        "error_message": failure and failure.message,
        "stack": failure and failure.stack,
        "fingerprint": failure.fingerprint if failure else fingerprint(kind, reason),
        "last_failed_at": failure.at if failure else at,
    }


def _failure(tried: Tried, row: int) -> Failure | None:
    failures = tried.why.failed.get(row)
    return failures[-1] if failures else None


def _said(tried: Tried, row: int, kind: Kind) -> str:
    return tried.why.rejected.get(row) or REASONS.get(kind, "rejected by the handler")


def _entries(tried: Tried, row: int, by: str, reason: str | None, at: dt.datetime) -> list[dict[str, Any]]:
    old, state = tried.letters[row], tried.state(row)
    reserved = int(row in tried.won)
    if state == WAITING:
        return [{"letter_id": old["id"], "at": at, "action": Action.RESERVED.value, "by": by, "reason": reason, "reserved": reserved}]
    first = [first_failure(old)] if old["attempts"] == 1 else []
    if succeeded(state):
        action = Action.DUPLICATE if state == DUPLICATE else Action.REPROCESSED
        return [*first, {"letter_id": old["id"], "at": at, "action": action.value, "by": by, "reason": reason, "reserved": reserved}]
    failures = tried.why.failed.get(row)
    if failures:
        again = [failure_entry(old["id"], failure, by) for failure in failures]
    else:
        said = _said(tried, row, LETTER_KINDS[state])
        again = [{"letter_id": old["id"], "at": at, "action": Action.FAILED.value, "by": by, "error_message": said}]
    return [*first, *again[:-1], {**again[-1], "reserved": reserved}]


def first_failure(letter: Mapping[str, Any]) -> dict[str, Any]:
    """The history's row for what a letter was parked with, which nothing else keeps once the letter changes."""
    return {
        "letter_id": letter["id"],
        "at": letter["first_failed_at"],
        "action": Action.FAILED.value,
        "error_type": letter["error_type"],
        "error_message": letter["error_message"] or letter["reason"],
        "stack": letter["stack"],
    }
