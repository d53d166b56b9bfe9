"""From the decided rows of a chunk to dead letters: kinds, reasons, errors, ids, and who waits behind whom. Pure."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.position import Partition
from deadletter.failure import Failure
from deadletter.letter import HISTORY, HOLDS_NO_KEY, LETTERS, Action, Kind, LetterIds, fingerprint, letter_id
from dedup.envelope import ENVELOPE
from dedup.index import KEY_ONLY, Ints, key_bytes
from dedup.keys import INTERNAL, SEQUENCE
from dedup.planning import LETTER_KINDS, WAITING, Settled
from dedup.store import SEQUENCES, Head, Run

TOO_LARGE_KEPT = 64 * 1024
"""Bytes kept of a body above `max_body`."""

REASONS = {
    Kind.UNDECODABLE: "the body does not decode",
    Kind.NO_KEY: "every part of the idempotence key is null",
    Kind.KEY_CONFLICT: "the idempotence key was decided before with another payload",
}

SHOWN = 300
"""Characters of an error message that make the reason of a letter."""


@dataclass(frozen=True)
class Why:
    """Why rows of a chunk become letters, beyond their state."""

    rejected: Mapping[int, str] = field(default_factory=dict)  # row -> what the handler gave as the reason
    failed: Mapping[int, Sequence[Failure]] = field(default_factory=dict)  # row -> its failures, oldest first
    tails: pa.Table = field(default_factory=SEQUENCES.empty_table)  # sequences that were blocked before


def letter_rows(settled: Settled) -> Ints:
    """Rows of the chunk that become letters, in position order."""
    return np.flatnonzero(np.isin(settled.state, list(LETTER_KINDS)))


def make_letters(settled: Settled, content: pa.Table, why: Why, head: Head, run: Run, now: dt.datetime, max_body: int) -> pa.Table:
    """LETTERS for `letter_rows(settled)`.

    Args:
        content: the materialised rows of `letter_rows`, in that order, with the envelope and key columns.
        max_body: bytes; of a longer body the digest and the first 64 kB are kept, and the letter's kind is TOO_LARGE.
    """
    rows = letter_rows(settled)
    kinds = [LETTER_KINDS[int(s)] for s in settled.state[rows]]
    ids = _ids(settled, rows, kinds, head, run)
    before, behind = _chain(settled, rows, ids, kinds, content, why.tails)
    bodies = _bodies(content, max_body)
    holds = np.array([k not in HOLDS_NO_KEY for k in kinds], dtype=bool)
    columns = {
        "id": ids,
        "consumer": pa.repeat(head.consumer, len(rows)),
        "generation": pa.repeat(head.generation, len(rows)),
        "incarnation": _incarnations(content, head),
        "sequence_number": np.where(content["partition"].to_numpy() == KEY_ONLY.partition, -1, settled.index.numbers[rows]),
        "event_key": content["key"],
        "key": pc.if_else(pa.array(holds), key_bytes(settled.index.high[rows], settled.index.low[rows]), pa.scalar(None, pa.binary(16))),
        "holds_key": holds,
        "idempotence_key": content["_key_text"],
        "payload_hash": settled.index.payload[rows],
        **bodies,
        **_errors(rows, [behind[i] or k for i, k in enumerate(kinds)], settled, bodies["kept_whole"], why, now),
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
    return pa.Table.from_pylist([{"reserved": 0, **e} for e in entries], schema=HISTORY)


def _incarnations(content: pa.Table, head: Head) -> list[int]:
    topics = zip(content["source"].to_pylist(), content["topic"].to_pylist(), strict=True)
    return [head.incarnations.get(topic, 0) for topic in topics]


def _bodies(content: pa.Table, max_body: int) -> dict[str, Any]:
    bodies = content["body"].combine_chunks().cast(pa.large_binary())
    sizes = pc.binary_length(bodies)
    large = pc.fill_null(pc.greater(sizes, max_body), False)
    whole = bodies.cast(pa.binary())
    digests: list[bytes | None] = [None] * len(bodies)
    for row in np.flatnonzero(large.to_numpy(zero_copy_only=False)).tolist():
        digests[row] = hashlib.sha256(bodies[row].as_py()).digest()
    return {
        "body": pc.if_else(large, pc.binary_slice(whole, 0, TOO_LARGE_KEPT), whole),
        "body_size": sizes,
        "body_sha256": digests,
        "kept_whole": pc.invert(large).to_pylist(),
    }


def _errors(rows: Ints, kinds: Sequence[Kind], settled: Settled, whole: Sequence[bool], why: Why, now: dt.datetime) -> dict[str, Any]:
    known = functools.cache(fingerprint)  # thousands of letters have one reason
    failures = [why.failed.get(row, ()) for row in rows.tolist()]
    last = [f[-1] if f else None for f in failures]
    shown = [kind if kept else Kind.TOO_LARGE for kind, kept in zip(kinds, whole, strict=True)]
    waiting = (settled.state[rows] == WAITING).tolist()
    reasons = [_reason(*facts, why) for facts in zip(rows.tolist(), kinds, last, waiting, strict=True)]
    return {
        "kind": [k.value for k in shown],
        "reason": reasons,
        "error_type": [f and f.error_type for f in last],
        "error_message": [f and f.message for f in last],
        "stack": [f and f.stack for f in last],
        "fingerprint": [f.fingerprint if f else known(k, r) for f, k, r in zip(last, shown, reasons, strict=True)],
        "attempts": [0 if w else max(len(f), 1) for f, w in zip(failures, waiting, strict=True)],
        "first_failed_at": _times([f[0].at if f else None for f in failures], now),
        "last_failed_at": _times([f.at if f else None for f in last], now),
    }


def _times(given: list[dt.datetime | None], now: dt.datetime) -> pa.Array:
    kind = pa.timestamp("us", "UTC")
    return pc.fill_null(pa.array(given, kind), pa.scalar(now, kind))


def _reason(row: int, kind: Kind, failure: Failure | None, waiting: bool, why: Why) -> str:
    if waiting:
        return "an earlier event of its sequence is a dead letter"
    if failure:
        return f"{failure.error_type}: {' '.join(failure.message.split())[:SHOWN]}"
    return why.rejected.get(row) or REASONS.get(kind, "rejected by the handler")


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


def _extras(content: pa.Table) -> list[bytes | None]:
    """The input's other columns, each row as an Arrow IPC stream of one row."""
    ours = {*ENVELOPE.names, *INTERNAL, *SEQUENCE, "data"}
    others = content.select([n for n in content.column_names if n not in ours]).combine_chunks()
    if not others.num_columns:
        return [None] * content.num_rows
    return [_ipc(others.slice(i, 1)) for i in range(others.num_rows)]


def _if_there(content: pa.Table, name: str) -> pa.ChunkedArray | None:
    return content[name] if name in content.column_names else None


def _ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _column(field: pa.Field, columns: Mapping[str, Any], content: pa.Table, count: int) -> pa.ChunkedArray | pa.Array:
    value = columns.get(field.name, content[field.name] if field.name in content.column_names else None)
    if value is None:
        return pa.nulls(count, field.type)
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value.cast(field.type)
    return pa.array(value, field.type)


def _ids(settled: Settled, rows: Ints, kinds: Sequence[Kind], head: Head, run: Run) -> list[str]:
    index, copies = settled.index, Counter[tuple[object, ...]]()
    ids = [LetterIds(head.consumer, head.generation, *_partition(p, head)) for p in index.partitions]
    found = []
    facts = zip(rows.tolist(), index.place[rows].tolist(), index.numbers[rows].tolist(), index.parts[rows].tolist(), kinds, strict=True)
    for row, place, number, part, kind in facts:
        if index.partitions[place] != KEY_ONLY:
            found.append(ids[place].of(number, part))
        elif kind not in HOLDS_NO_KEY:
            found.append(letter_id(head.consumer, head.generation, "key", int(index.high[row]), int(index.low[row])))
        else:  # nothing but its batch and its payload tells this delivery from another
            same = ("delivery", run.query_id, run.batch_id, run.chunk, kind, int(index.payload[row]))
            copies[same] += 1
            found.append(letter_id(head.consumer, head.generation, *same, copies[same]))
    return found


def _partition(p: Partition, head: Head) -> tuple[object, ...]:
    return (p.source, p.topic, head.incarnations.get((p.source, p.topic), 0), p.partition)
