"""What an attempt at letters makes of them: their new state, and what is appended to their history. Pure.

Called by letters.py, inside the transaction of a page.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from deadletter import hiding
from deadletter.failure import Failure
from deadletter.letter import LETTERS, Action, Kind, Status, fingerprint, table_of
from deadletter.plans import REASONS, failure_entry, history, reason_of
from deadletter.store import Change
from dedup.core.keys import key_bytes
from dedup.core.letters import Why, too_large
from dedup.core.planning import DUPLICATE, LETTER_KINDS, NEW, SKIPPED, WAITING, Settled

CHANGED = (
    "id", "key", "holds_key", "idempotence_key", "payload_hash", "kind", "reason", "error_type", "error_message", "stack", "fingerprint",
    "attempts", "last_failed_at", "status",
)  # fmt: skip
"""Columns of LETTERS that an attempt changes, and the id."""

_CHANGED = pa.struct([LETTERS.field(name) for name in CHANGED])


@dataclass(frozen=True)
class Tried:
    """Letters after an attempt; all sequences are by row of the chunk."""

    settled: Settled
    why: Why
    letters: Sequence[Mapping[str, Any]]  # as they were
    texts: Sequence[str | None]  # the readable keys as computed
    won: frozenset[int]  # rows that reserved a key
    max_body: int  # bytes that a letter keeps
    redact: hiding.Redact | None = None  # what hides the texts of errors

    def state(self, row: int) -> int:
        """What became of a row."""
        return int(self.settled.state[row])


def change_of(tried: Tried, by: str, reason: str | None, at: dt.datetime) -> Change:
    """The step that writes it. Rows that only waited are left as they are, but for a key that they took before that was known."""
    rows = [row for row in range(len(tried.letters)) if tried.state(row) != WAITING or row in tried.won]
    plain = tried if tried.redact is None else replace(tried, why=tried.why.plain())
    letters = [_hidden(tried, row, hiding.TOLD, _after(tried, row, at), _after(plain, row, at)) for row in rows]
    past = [zip(*(_entries(one, row, by, reason, at) for one in (tried, plain)), strict=True) for row in rows]
    entries = [_hidden(tried, row, hiding.TOLD[1:], said, bare) for row, pairs in zip(rows, past, strict=True) for said, bare in pairs]
    return Change(table_of(letters, _CHANGED), history(entries))


def _hidden(tried: Tried, row: int, names: Sequence[str], said: dict[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """A row with these of its texts as they are to be stored; `plain` is the same row without values of the event."""
    part = hiding.part_of(tried.letters[row], hiding.TEXTS)
    told, bare = ({name: one.get(name) for name in names} for one in (said, plain))
    return {**said, **hiding.hide_texts(part, told, bare, tried.redact)}


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
    failure, kind, letter = _failure(tried, row), LETTER_KINDS[tried.state(row)], tried.letters[row]
    reason = reason_of(failure) if failure else _said(tried, row, kind)
    undecodable = tried.why.undecodable.get(row)
    cut = letter["kind"] == Kind.TOO_LARGE
    shown = Kind.TOO_LARGE if cut else kind
    return {
        "kind": shown.value,
        "reason": too_large(letter["body_size"], tried.max_body, reason) if cut and letter["body_size"] > tried.max_body else reason,
        "error_type": failure and failure.error_type,
        "error_message": failure and failure.message,
        "stack": failure and failure.stack,
        "fingerprint": failure.fingerprint if failure else fingerprint(shown, undecodable.brief if undecodable else reason),
        "last_failed_at": failure.at if failure else at,
    }


def _failure(tried: Tried, row: int) -> Failure | None:
    failures = tried.why.failed.get(row)
    return failures[-1] if failures else None


def _said(tried: Tried, row: int, kind: Kind) -> str:
    undecodable = tried.why.undecodable.get(row)
    return undecodable.text if undecodable else tried.why.rejected.get(row) or REASONS.get(kind, "rejected by the handler")


def _entries(tried: Tried, row: int, by: str, reason: str | None, at: dt.datetime) -> list[dict[str, Any]]:
    old, state = tried.letters[row], tried.state(row)
    reserved = int(row in tried.won)
    if state == WAITING:
        return [{"letter_id": old["id"], "at": at, "action": Action.RESERVED.value, "by": by, "reason": reason, "reserved": reserved}]
    first = untold(old)
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


def untold(letter: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The history's row for the one failure that the letter was parked with; none where the history has it.

    A letter that waited when it was parked had not failed: its first failure is later, and was told when it happened.
    """
    return [first_failure(letter)] if letter["attempts"] == 1 and letter["first_failed_at"] == letter["last_failed_at"] else []


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
