"""From the decided rows of a chunk to dead letters: kinds, reasons, errors, ids, and who waits behind whom. Pure."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import BatchTooLarge
from checkpoint.head import Head, Run
from checkpoint.position import KEY_ONLY, Ints, Partition
from deadletter import hiding
from deadletter.failure import Failure
from deadletter.letter import HOLDS_NO_KEY, LETTERS, SEQUENCES, Kind, LetterIds, extras_of, fingerprint, letter_id
from deadletter.plans import REASONS, failure_entry, history, reason_of
from deadletter.store import Park
from dedup.core.envelope import ENVELOPE
from dedup.core.keys import INTERNAL, LOG_TIME, SEQUENCE, key_bytes
from dedup.core.planning import LETTER_KINDS, LETTERED, WAITING, WITHOUT_KEY, Settled
from dedup.core.rows import picked

TOO_LARGE_KEPT = 64 * 1024
"""Bytes kept of a body above `max_body`."""

MOST_BODIES = (1 << 31) - 1
"""Bytes of all bodies that the letters of one transaction keep: what one column of LETTERS holds."""


@dataclass(frozen=True)
class Undecodable:
    """Why a body does not decode."""

    text: str  # "$.amount is 1.555; it must have at most 2 digits behind the decimal point"
    brief: str  # the same without the value: equal for bodies that fail alike


@dataclass(frozen=True)
class Why:
    """Why rows of a chunk become letters, beyond their state."""

    rejected: Mapping[int, str] = field(default_factory=dict)  # row -> what the handler gave as the reason
    failed: Mapping[int, Sequence[Failure]] = field(default_factory=dict)  # row -> its failures, oldest first
    tails: pa.Table = field(default_factory=SEQUENCES.empty_table)  # sequences that were blocked before
    undecodable: Mapping[int, Undecodable] = field(default_factory=dict)  # row -> why, where that is known

    def plain(self) -> Why:
        """The same without values of the events."""
        return replace(
            self,
            rejected=dict.fromkeys(self.rejected, hiding.REJECTION),
            failed={row: [hiding.without_values(one) for one in failures] for row, failures in self.failed.items()},
            undecodable={row: replace(one, text=one.brief) for row, one in self.undecodable.items()},
        )


def letter_rows(settled: Settled) -> Ints:
    """Rows of the chunk that become letters, in position order."""
    return np.flatnonzero(LETTERED[settled.state])


def make_park(
    settled: Settled, content: pa.Table, why: Why, head: Head, run: Run, now: dt.datetime, max_body: int, redact: hiding.Redact | None
) -> Park:
    """The step that keeps the letters of `letter_rows(settled)` and their history, without what `redact` hides.

    Raises:
        SealUnavailable: something could not be sealed. BatchTooLarge: as `make_letters`.
    """
    letters = make_letters(settled, content, why, head, run, now, max_body)
    past = make_history(settled, letters, why)
    if redact is None:
        return Park(letters, past)
    bare = why.plain()
    plain = make_letters(settled, content, bare, head, run, now, max_body)
    hidden = hiding.hide_history(past, make_history(settled, letters, bare), letters, redact)
    return Park(hiding.hide(letters, plain, redact), hidden)


def make_letters(settled: Settled, content: pa.Table, why: Why, head: Head, run: Run, now: dt.datetime, max_body: int) -> pa.Table:
    """LETTERS for `letter_rows(settled)`.

    Args:
        content: the materialised rows of `letter_rows`, in that order, with the envelope and key columns, and without what decode= made
            of the bodies.
        max_body: bytes; of a longer body the digest and the first 64 kB are kept, and the letter's kind is TOO_LARGE.

    Raises:
        BatchTooLarge: the bodies have more than MOST_BODIES bytes together.
    """
    rows = letter_rows(settled)
    kinds = [LETTER_KINDS[s] for s in settled.state[rows].tolist()]
    ids = _ids(settled, rows, kinds, head, run)
    before, behind = _chain(settled, rows, ids, kinds, content, why.tails)
    bodies = _bodies(content, max_body)
    holds = ~WITHOUT_KEY[settled.state[rows]]
    columns = {
        "id": ids,
        "consumer": pa.repeat(head.consumer, len(rows)),
        "generation": pa.repeat(head.generation, len(rows)),
        "incarnation": _incarnations(settled, head)[settled.index.place[rows]],
        "sequence_number": np.where(content["partition"].to_numpy() == KEY_ONLY.partition, -1, settled.index.numbers[rows]),
        "event_key": content["key"],
        "key": pc.if_else(pa.array(holds), key_bytes(settled.index.high[rows], settled.index.low[rows]), pa.scalar(None, pa.binary(16))),
        "holds_key": holds,
        "idempotence_key": content["_key_text"],
        "payload_hash": settled.index.payload[rows],
        **bodies,
        **_errors(settled, rows, behind, bodies["too_large"], why, now, max_body),
        "status": ["BLOCKED" if b else "OPEN" for b in before],
        "blocked_by": before,
        "sequence": _if_there(content, SEQUENCE[0]),
        "sequence_key": _if_there(content, SEQUENCE[1]),
        "extras": _extras(content),
    }
    return pa.table([_column(f, columns, content, len(rows)) for f in LETTERS], schema=LETTERS)


def make_history(settled: Settled, letters: pa.Table, why: Why) -> pa.Table:
    """HISTORY of these letters: the failures of those that failed more than once before they were parked."""
    ids = dict(zip(letter_rows(settled).tolist(), letters["id"].to_pylist(), strict=True))
    tried = [(ids[row], failure) for row, failures in why.failed.items() if len(failures) > 1 for failure in failures]
    return history([failure_entry(letter, failure) for letter, failure in tried])


def _incarnations(settled: Settled, head: Head) -> Ints:
    """Of each partition of the index."""
    return np.array([head.incarnations.get((p.source, p.topic), 0) for p in settled.index.partitions], dtype=np.int64)


def _bodies(content: pa.Table, max_body: int) -> dict[str, Any]:
    bodies = content["body"].cast(pa.large_binary())  # in its pieces: all of them together may be more than one column holds
    sizes = pc.binary_length(bodies)
    large = pc.fill_null(pc.greater(sizes, max_body), False)
    _refuse_too_many(pc.if_else(large, pc.min_element_wise(sizes, TOO_LARGE_KEPT), sizes))
    digests: list[bytes | None] = [None] * len(bodies)
    for row in np.flatnonzero(large.to_numpy()).tolist():
        digests[row] = hashlib.sha256(bodies[row].as_py()).digest()
    return {
        "body": pc.if_else(large, pc.binary_slice(bodies, 0, TOO_LARGE_KEPT), bodies),
        "body_size": sizes,
        "body_sha256": digests,
        "too_large": pc.if_else(large, sizes, None).to_pylist(),  # no column: the size where the body is cut
    }


def _refuse_too_many(sizes: pa.ChunkedArray) -> None:
    size = pc.sum(sizes).as_py() or 0
    if size > MOST_BODIES:
        raise BatchTooLarge(
            f"The bodies of {len(sizes):,} dead letters of one transaction have {size:,} bytes together; {MOST_BODIES:,} are the most. "
            "None of them was parked. Lower max_events_per_transaction, or max_body: of a longer body a letter keeps the beginning."
        )


def _errors(
    settled: Settled, rows: Ints, behind: Sequence[Kind | None], sizes: Sequence[int | None], why: Why, now: dt.datetime, max_body: int
) -> dict[str, pa.Array]:
    """The columns that say what went wrong. Thousands of letters have one reason: what is alike is made once."""
    asked = rows.tolist()
    failed = (row if row in why.failed else None for row in asked)
    said = ((why.rejected.get(row), why.undecodable.get(row)) for row in asked)
    alike: dict[tuple[Any, ...], int] = {}
    facts = zip(settled.state[rows].tolist(), behind, sizes, said, failed, strict=True)
    which = np.array([alike.setdefault(fact, len(alike)) for fact in facts], dtype=np.int64)
    made = zip(*(_error(why, now, max_body, *fact) for fact in alike), strict=True)
    errors = pa.table([pa.array(values, _ERRORS.field(i).type) for i, values in enumerate(made)], schema=_ERRORS)
    found = picked(errors, which)
    return {name: found[name] for name in _ERRORS.names}


_ERRORS = pa.schema(
    LETTERS.field(name)
    for name in ("kind", "reason", "error_type", "error_message", "stack", "fingerprint", "attempts", "first_failed_at", "last_failed_at")
)


def _error(
    why: Why,
    now: dt.datetime,
    max_body: int,
    state: int,
    behind: Kind | None,
    size: int | None,
    said: tuple[str | None, Undecodable | None],
    row: int | None,
) -> tuple[Any, ...]:
    """_ERRORS of letters that have these facts in common; only one has `row`."""
    failures = why.failed[row] if row is not None else ()
    last = failures[-1] if failures else None
    kind = behind or LETTER_KINDS[state]
    shown = kind if size is None else Kind.TOO_LARGE
    rejected, undecodable = said
    reason = _reason(kind, last, rejected, undecodable, waiting=state == WAITING)
    own = fingerprint(shown, undecodable.brief if undecodable else reason)
    error = (last.error_type, last.message, last.stack, last.fingerprint) if last else (None, None, None, own)
    attempts = 0 if state == WAITING else max(len(failures), 1)
    text = reason if size is None else too_large(size, max_body, reason)
    return (shown.value, text, *error, attempts, failures[0].at if failures else now, last.at if last else now)


def too_large(size: int, max_body: int, reason: str) -> str:
    """The reason of a letter that keeps only the beginning of its body: `reason` is why it was parked. Sizes in bytes."""
    return f"the body has {size:,} bytes, more than max_body={max_body:,}; parked because: {reason}"


def _reason(kind: Kind, failure: Failure | None, rejected: str | None, undecodable: Undecodable | None, *, waiting: bool) -> str:
    if waiting:
        return "an earlier event of its sequence is a dead letter"
    if failure:
        return reason_of(failure)
    if undecodable:
        return undecodable.text
    return rejected or REASONS.get(kind, "rejected by the handler")


def _chain(
    settled: Settled, rows: Ints, ids: Sequence[str], kinds: Sequence[Kind], content: pa.Table, tails: pa.Table
) -> tuple[list[str | None], list[Kind | None]]:
    """For each letter the one right before it in its sequence, and for one that only waits the kind of what it waits behind."""
    if SEQUENCE[0] not in content.column_names:
        return [None] * len(rows), [None] * len(rows)
    last = {s: (letter, Kind(kind)) for s, letter, kind in zip(*(tails[n].to_pylist() for n in SEQUENCES.names), strict=True)}
    before: list[str | None] = []
    behind: list[Kind | None] = []
    for row, letter, kind, sequence in zip(rows, ids, kinds, content[SEQUENCE[0]].to_pylist(), strict=True):
        blocker = last.get(sequence) if sequence is not None else None
        waits = blocker is not None and settled.state[row] == WAITING
        before.append(blocker[0] if blocker else None)
        behind.append(blocker[1] if blocker and waits else None)
        last[sequence] = (letter, blocker[1] if blocker and waits else kind)
    return before, behind


def others_of(content: pa.Table) -> pa.Table:
    """The input's other columns; `content` is without what decode= made of the bodies."""
    ours = {*ENVELOPE.names, LOG_TIME, *INTERNAL, *SEQUENCE}
    return content.select([n for n in content.column_names if n not in ours])


def _extras(content: pa.Table) -> list[bytes | None]:
    """The input's other columns, each row as an Arrow IPC stream of one row."""
    others = others_of(content).combine_chunks()
    if not others.num_columns:
        return [None] * content.num_rows
    return [extras_of(others.slice(i, 1)) for i in range(others.num_rows)]


def _if_there(content: pa.Table, name: str) -> pa.ChunkedArray | None:
    return content[name] if name in content.column_names else None


def _column(field: pa.Field, columns: Mapping[str, Any], content: pa.Table, count: int) -> pa.ChunkedArray | pa.Array:
    value = columns[field.name] if field.name in columns else _if_there(content, field.name)
    if value is None:
        return pa.nulls(count, field.type)
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value if value.type == field.type else value.cast(field.type)
    return pa.array(value, field.type)


def _ids(settled: Settled, rows: Ints, kinds: Sequence[Kind], head: Head, run: Run) -> list[str]:
    index, ids = settled.index, []
    bounds = np.searchsorted(index.place[rows], np.arange(len(index.partitions) + 1)).tolist()
    for partition, first, end in zip(index.partitions, bounds, bounds[1:], strict=False):
        here = rows[first:end]
        if partition == KEY_ONLY:
            ids += _ids_without_position(settled, here, kinds[first:end], head, run)
        elif len(here):
            made = LetterIds(head.consumer, head.generation, *_partition(partition, head))
            ids += made.of_each(index.numbers[here].tolist(), index.parts[here].tolist())
    return ids


def _ids_without_position(settled: Settled, rows: Ints, kinds: Sequence[Kind], head: Head, run: Run) -> list[str]:
    index, times = settled.index, Counter[tuple[object, ...]]()
    chunk = (run.query_id, run.batch_id, run.chunk)
    found = []
    for row, kind in zip(rows.tolist(), kinds, strict=True):
        if kind not in HOLDS_NO_KEY:  # a key can fail once more after it was released or purged: the decision tells these letters apart
            same: tuple[object, ...] = ("key", head.seq, *chunk, int(index.high[row]), int(index.low[row]))
        else:  # nothing but its batch and its payload tells this delivery from another
            delivery = ("delivery", *chunk, kind, int(index.payload[row]))
            times[delivery] += 1
            same = (*delivery, times[delivery])
        found.append(letter_id(head.consumer, head.generation, *same))
    return found


def _partition(p: Partition, head: Head) -> tuple[object, ...]:
    return (p.source, p.topic, head.incarnations.get((p.source, p.topic), 0), p.partition)
