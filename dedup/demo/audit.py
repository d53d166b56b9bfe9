"""Compares what a finished run left behind with what it should have, and counts. Reads only.

What each number is, and why a kill cannot change it:

* delivered, redelivered: from the delivery log, where they were made. A batch that a kill cuts off is handed over once more by Spark; that
  is not in the log, and is counted apart as `replayed`: whatever the batch records saw again beyond the log's redeliveries. How much that
  is depends on the moment of the kill, so nothing is asked of it but that it is not negative.
* duplicates: from the batch records, which decide a position once; must equal the duplicates in the log.
* written: rows in the sink. dead letters: letters in the store. Compared one by one with `input.compute`.
* lost, doubled: rows and letters that are missing, and that are there beyond what is expected. A row that came out changed is in both.

So delivered = redelivered + duplicates + written + dead letters, the left side from the log and the last three from the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from deadletter.selection import Selection
from dedup.core.store import Store
from dedup.demo import input
from dedup.testing.delivery import Delivery
from dedup.verify import verify

SHOWN = 3
"""How many of the lost or doubled are named in a problem."""


@dataclass(frozen=True)
class Audit:
    """The count of one run; the module says where each number comes from."""

    delivered: int
    redelivered: int
    replayed: int
    duplicates: int
    written: int
    dead_letters: Mapping[tuple[str, str], int]  # (kind, reason of an example) -> letters with its fingerprint, sorted
    lost: int
    doubled: int
    problems: tuple[str, ...]  # empty where all is as it should be, to the last row

    @property
    def ok(self) -> bool:
        """Whether nothing is off by one."""
        return not self.problems


def examine(store: Store, consumer: str, delivery: Delivery, flights: pa.Table, rows: pa.Table) -> Audit:
    """Audit the state of `consumer` and the `rows` of its sink against the delivery of these flights."""
    due = input.compute(delivery, flights)
    letters = store.letters(Selection(consumer=consumer, limit=None))
    lost_rows, doubled_rows = input.difference(due.rows, rows)
    lost_letters, doubled_letters = input.difference(due.letters, _comparable(letters))
    lost, doubled = (sum(map(_times, tables)) for tables in ((lost_rows, lost_letters), (doubled_rows, doubled_letters)))
    counted = _counted(store.batches(consumer))
    problems = [
        *_named("lost", lost_rows, "flight_id"),
        *_named("doubled", doubled_rows, "flight_id"),
        *_named("lost dead letters", lost_letters, "body"),
        *_named("doubled dead letters", doubled_letters, "body"),
        *_bookkeeping(counted, delivery, rows.num_rows, letters.num_rows),
        *_reservations(store.reserved(consumer), due.reserved),
        *(f"verify: {contradiction}" for contradiction in verify(store, consumer).contradictions),
    ]
    return Audit(
        delivered=delivery.delivered,
        redelivered=delivery.redelivered,
        replayed=counted["redelivered"] - delivery.redelivered,
        duplicates=counted["duplicate"],
        written=rows.num_rows,
        dead_letters=by_fingerprint(letters),
        lost=lost,
        doubled=doubled,
        problems=tuple(problems),
    )


def _comparable(letters: pa.Table) -> pa.Table:
    """input.LETTERS of these: the reason only where the handler gave it, the library's own wording is its own affair."""
    reason = pc.if_else(pc.equal(letters["kind"], "REJECTED"), letters["reason"], "")
    return pa.table([letters["kind"], reason, letters["body"]], names=input.LETTERS.names)


def by_fingerprint(letters: pa.Table) -> dict[tuple[str, str], int]:
    """Kind and reason of one letter of each fingerprint, as `dedup dead-letter group` shows them -> how many letters have it."""
    counts: Counter[tuple[str, str]] = Counter()
    grouped = letters.group_by(["kind", "fingerprint"]).aggregate([("reason", "min"), ("reason", "count_distinct"), ([], "count_all")])
    for row in grouped.to_pylist():
        several = "for example: " if row["reason_count_distinct"] > 1 else ""
        counts[row["kind"], several + row["reason_min"]] += row["count_all"]
    return dict(sorted(counts.items()))


def _counted(batches: pa.Table) -> dict[str, int]:
    names = ("delivered", "redelivered", "processed", "duplicate", "dead_lettered")
    return {name: int(pc.sum(batches[name]).as_py() or 0) for name in names}


def _bookkeeping(counted: Mapping[str, int], delivery: Delivery, written: int, letters: int) -> list[str]:
    """What the batch records say, against the delivery log and against what is there."""
    claims = {
        "events decided": (counted["delivered"] - counted["redelivered"], delivery.topic.num_rows),
        "duplicates": (counted["duplicate"], delivery.duplicates),
        "events processed": (counted["processed"], written),
        "events dead-lettered": (counted["dead_lettered"], letters),
    }
    found = [f"batch records tell of {said} {what}, there are {true}" for what, (said, true) in claims.items() if said != true]
    if counted["redelivered"] < delivery.redelivered:
        found.append(f"batch records tell of {counted['redelivered']} redeliveries, there were at least {delivery.redelivered}")
    return found


def _reservations(kept: int | None, due: int) -> list[str]:
    return [] if kept in (None, due) else [f"{kept} keys are reserved, {due} were decided"]


def _times(table: pa.Table) -> int:
    return int(pc.sum(table["times"]).as_py() or 0)


def _named(what: str, table: pa.Table, column: str) -> list[str]:
    if not table.num_rows:
        return []
    first = ", ".join(str(value) for value in table[column].slice(0, SHOWN).to_pylist())
    return [f"{_times(table)} {what}: {first}{', ...' if table.num_rows > SHOWN else ''}"]
