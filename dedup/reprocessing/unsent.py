"""Messages that cannot be sent, as dead letters of their own kind, UNSENT: the row of the outbox is the letter, its mark makes it one.

What is read here is made of the outbox each time. Reprocessing such a letter lets the message be sent again, discarding it gives it up.
Called by DeadLetters and reprocess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, Refused
from deadletter.letter import GROUPS, LETTERS, Kind, Status, fingerprint, letter_id
from deadletter.selection import Selection
from deadletter.work import Changed, Which
from dedup.core.messages import Chosen, Entry, State
from dedup.core.store import Store
from dedup.reprocessing.options import Reprocessed

SOURCE = "outbox"
"""What stands where the letters of events have their broker; the topic is where the message was to go, the sequence number its number."""

SCHEMA = LETTERS.append(pa.field("duplicates", pa.int64()))

_STATES = {State.DEAD: Status.OPEN, State.DISCARDED: Status.DISCARDED}


def is_meant(selection: Selection) -> bool:
    """Whether a selection is of messages only: what changes letters asks for one kind or the other."""
    return selection.kind == Kind.UNSENT


def letters(store: Store, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
    """UNSENT letters that match, by consumer and number; LETTERS + duplicates, or only these columns."""
    names = list(columns or SCHEMA.names)
    rows = [_row(store, consumer, entry, whole="body" in names or "properties" in names) for consumer, entry in _matching(store, selection)]
    return pa.Table.from_pylist(rows, SCHEMA).select(names)


def meant_by(store: Store, ids: str | Sequence[str], what: str) -> Selection | None:
    """The letters of messages that all these ids are of; None where no id is. Raises ConfigError where some are, and some are of events."""
    ids = [ids] if isinstance(ids, str) else ids
    found = letters(store, meant := Selection(ids=tuple(ids), kind=Kind.UNSENT, limit=None), ["id"])["id"].to_pylist() if ids else []
    if found and set(ids) - set(found):
        raise ConfigError(f"Some of these letters are of messages (UNSENT) and some of events: {what} them separately.")
    return meant if found else None


def refuse(store: Store, which: Which, what: str) -> None:
    """Raise Refused where these letters are of messages, which have no event. Raises ConfigError as `meant_by`."""
    ids = which.ids or () if isinstance(which, Selection) else which
    if (isinstance(which, Selection) and is_meant(which)) or meant_by(store, ids, what) is not None:
        raise Refused(
            f"A letter of a message that was not sent (UNSENT) has no event to {what}. Reprocess it, which sends it, or discard it."
        )


def groups(store: Store, selection: Selection) -> pa.Table:
    """GROUPS of the UNSENT letters that match."""
    rows = letters(store, replace(selection, limit=None), ["fingerprint", "kind", "first_failed_at", "last_failed_at", "id", "reason"])
    of = rows.sort_by("last_failed_at").group_by(["fingerprint", "kind"], use_threads=False)
    found = of.aggregate(
        [("id", "count"), ("first_failed_at", "min"), ("last_failed_at", "max"), ("id", "last"), ("reason", "last")]
    ).rename_columns(GROUPS.names)
    return found.cast(GROUPS).sort_by([("letters", "descending")])


def discard(store: Store, selection: Selection, *, by: str, reason: str, dry_run: bool) -> Changed:
    """Give these messages up; those behind them go on.

    Crash: those of a consumer are given up, or not.
    """
    numbers = _numbers(store, replace(selection, status=selection.status or Status.OPEN))
    meant = sum(map(len, numbers.values()))
    changed = meant if dry_run else sum(store.outbox(consumer).discard(few, by=by, reason=reason) for consumer, few in numbers.items())
    done = Changed(selected=meant, changed=changed, by_kind={Kind.UNSENT.value: changed} if changed else {}, dry_run=dry_run)
    if selection.ids is not None and selection.status is None:
        gone = letters(store, replace(selection, status=Status.DISCARDED), ["id"])["id"].to_pylist()
        done.selected += len(gone)
        done.skip(f"it is {Status.DISCARDED}", gone)
    return done


def reprocess(store: Store, selection: Selection, *, by: str | None = None, reason: str | None = None, dry_run: bool) -> Reprocessed:
    """Let these messages be sent again, and those behind them after them, by the next dispatch.

    Crash: those of a consumer wait again, or not.
    """
    numbers = _numbers(store, replace(selection, status=Status.OPEN))
    meant = sum(map(len, numbers.values()))
    done = 0 if dry_run else sum(store.outbox(consumer).retry(few, by=by, reason=reason) for consumer, few in numbers.items())
    return Reprocessed(
        meant, {Kind.UNSENT.value: meant} if meant else {}, reprocessed=done, left=0 if dry_run else meant - done, dry_run=dry_run
    )


def _numbers(store: Store, selection: Selection) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for consumer, entry in _matching(store, selection):
        if entry.state == State.DEAD:
            found.setdefault(consumer, []).append(entry.number)
    return found


def _matching(store: Store, selection: Selection) -> Iterator[tuple[str, Entry]]:
    if selection.kind not in (None, Kind.UNSENT) or selection.source not in (None, SOURCE):
        return
    left = selection.limit
    for consumer in sorted(store.consumers()) if selection.consumer is None else [selection.consumer]:
        chosen = Chosen(tuple(_STATES), selection.topic, limit=None)
        behind = selection.after is None
        for entry in store.outbox(consumer).entries(chosen):
            if entry.error_type is None or (left is not None and left <= 0):
                continue
            if behind and _matches(_summary(consumer, entry), selection):
                left = None if left is None else left - 1
                yield consumer, entry
            behind = behind or _id(consumer, entry) == selection.after


def _matches(row: dict[str, Any], asked: Selection) -> bool:
    """Everything but consumer, source, topic and kind, which are looked up."""
    text = f"{row['reason']}\n{row['error_message']}".lower()
    failed = row["last_failed_at"]
    return all(
        (
            asked.partition in (None, row["partition"]),
            asked.first is None or row["sequence_number"] >= asked.first,
            asked.last is None or row["sequence_number"] <= asked.last,
            asked.status in (None, row["status"]),
            asked.statuses is None or row["status"] in asked.statuses,
            asked.fingerprint in (None, row["fingerprint"]),
            asked.id is None or row["id"].startswith(asked.id),
            asked.ids is None or row["id"] in asked.ids,
            asked.since is None or failed >= asked.since,
            asked.until is None or failed < asked.until,
            asked.key in (None, row["idempotence_key"]),
            asked.text is None or asked.text.lower() in text,
            asked.sequence_key is None,
            asked.sequences is None,
            asked.generation in (None, 0),
        )
    )


def _id(consumer: str, entry: Entry) -> str:
    return letter_id("unsent", consumer, entry.number)


def _summary(consumer: str, entry: Entry) -> dict[str, Any]:
    kind, said = entry.error_type or "", entry.error_message or ""
    return {
        "id": _id(consumer, entry),
        "consumer": consumer,
        "generation": 0,
        "source": SOURCE,
        "topic": entry.topic,
        "incarnation": 0,
        "partition": 0,
        "sequence_number": entry.number,
        "part": 0,
        "event_key": entry.key,
        "holds_key": False,
        "idempotence_key": entry.id[:1_000],
        "body_size": entry.size,
        "kind": Kind.UNSENT.value,
        "reason": f"the message cannot be sent: {kind}: {said}"[:300],
        "error_type": kind,
        "error_message": said,
        "fingerprint": fingerprint(kind, said, Kind.UNSENT),
        "attempts": entry.attempts,
        "first_failed_at": entry.changed_at,
        "last_failed_at": entry.changed_at,
        "status": _STATES[entry.state].value,
        "duplicates": 0,
    }


def _row(store: Store, consumer: str, entry: Entry, *, whole: bool) -> dict[str, Any]:
    row = _summary(consumer, entry)
    message = store.outbox(consumer).message(entry.number) if whole else None
    if message is not None:
        row |= {"body": message.body, "properties": [{"key": name, "value": value} for name, value in message.headers]}
    return row


def joined(events: pa.Table, messages: pa.Table) -> pa.Table:
    """Letters of events first, then those of messages."""
    return pa.concat_tables([events, messages.select(events.column_names).cast(events.schema)]) if messages.num_rows else events


def largest(events: pa.Table, messages: pa.Table, limit: int | None) -> pa.Table:
    """Groups of both, the largest first."""
    if not messages.num_rows:
        return events
    both = joined(events, messages)
    return both.take(pc.sort_indices(both, [("letters", "descending")])).slice(0, limit)
