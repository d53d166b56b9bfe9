"""At-least-once delivery of clean rows, drawn from one seed, with the faults of brokers, producers and Spark.

Producers send an event again at a new sequence number. Sequence numbers stay unused. Partitions go back after a rebalance, or come late.
The same seed and rows give the same batches. The crash kit, the demo and tests of users call this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dedup.core.envelope import ENVELOPE
from dedup.core.rows import arrow_of, table_of_dicts

SOURCE, TOPIC = "testing", "events"

_FIRST_EVENT = np.datetime64("2024-01-01T00:00:00", "us")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Faults:
    """The faults of a delivery, and how often each happens. `Faults(0, unused=0, rebalanced=0)` is a clean delivery."""

    duplicated: float = 0.1
    """Share of the events that a producer sends again, at a new sequence number and half of the time in another partition."""
    duplicate_lag: float = 50.0
    """Mean number of events between an event and its duplicate: some duplicates come in the same batch, some in a later one."""
    unused: float = 0.01
    """Share of the events before which the broker leaves one to three sequence numbers unused."""
    rebalanced: float = 0.5
    """Chance, per batch and partition, that the partition goes back by up to half a batch."""
    lagging: bool = False
    """Each partition advances at a pace of its own: events come in another order across partitions, in each partition in theirs."""
    damaged: tuple[float, ...] = ()
    """Shares of the events that are damaged, by kind of damage 1, 2, ...; what a damage is decides who makes the bodies."""


@dataclass(frozen=True)
class Delivery:
    """A topic, and the log of its deliveries."""

    topic: pa.Table
    """One row per event, in the order of sending: row (of the clean rows), duplicate (bool), damage, partition, sequence_number."""
    log: pa.Table
    """One row per delivery, in order: file (the batch), event (row of `topic`), redelivered (bool)."""

    @property
    def files(self) -> int:
        """The number of batches. They are numbered from 0."""
        return int(pc.max(self.log["file"]).as_py()) + 1

    @property
    def delivered(self) -> int:
        """The number of deliveries, redeliveries included: the rows of all batches."""
        return int(self.log.num_rows)

    @property
    def redelivered(self) -> int:
        """The number of deliveries of a position that an earlier batch has, too."""
        return int(pc.sum(self.log["redelivered"]).as_py() or 0)

    @property
    def duplicates(self) -> int:
        """The number of events that repeat an earlier event at a position of their own."""
        return int(pc.sum(self.topic["duplicate"]).as_py() or 0)

    def decided(self, checkpoints: dict[int, int]) -> int:
        """Return how many events are at or below these checkpoints (partition -> sequence number)."""
        partition, number = (self.topic[c].to_numpy() for c in ("partition", "sequence_number"))
        return int(sum(((partition == p) & (number <= last)).sum() for p, last in checkpoints.items()))

    def batches(self, events: pa.Table) -> list[pa.Table]:
        """Yield the batches, as rows of `events`: one row per event of `topic`."""
        file, event = (self.log[c].to_numpy() for c in ("file", "event"))
        bounds = np.searchsorted(file, np.arange(self.files + 1))
        return [events.take(pa.array(event[a:b])) for a, b in pairwise(bounds.tolist())]


def plan(count: int, seed: int, files: int, faults: Faults | None = None, *, partitions: int = 4, pace: int = 0) -> Delivery:
    """Draw how `count` clean rows are sent and delivered in `files` batches of about the same size. Pure.

    Args:
        pace: another seed, which changes how partitions lag behind each other, and no event and no position.
    """
    rng, faults = np.random.default_rng(seed), faults or Faults()
    topic = _topic(rng, count, faults, partitions)
    rng = np.random.default_rng([seed, pace]) if pace else rng
    return Delivery(topic, _log(rng, topic["partition"].to_numpy(), files, faults, partitions))


def _topic(rng: np.random.Generator, count: int, faults: Faults, partitions: int) -> pa.Table:
    damage = rng.choice(len(faults.damaged) + 1, size=count, p=[1 - sum(faults.damaged), *faults.damaged])
    again = np.flatnonzero((rng.random(count) < faults.duplicated) & (damage == 0))
    row = np.r_[np.arange(count), again]
    sent = np.r_[np.arange(count, dtype=float), again + rng.exponential(faults.duplicate_lag, len(again))]
    partition = rng.integers(0, partitions, count)
    elsewhere = np.where(rng.random(len(again)) < 0.5, partition[again], rng.integers(0, partitions, len(again)))
    order = np.argsort(sent, kind="stable")
    partition = np.r_[partition, elsewhere][order]
    columns = {
        "row": row[order],
        "duplicate": (np.arange(len(row)) >= count)[order],
        "damage": damage[row][order].astype(np.int8),
        "partition": partition.astype(np.int32),
        "sequence_number": _numbers(rng, partition, faults, partitions),
    }
    return pa.table(columns)


def _numbers(rng: np.random.Generator, partition: Ints, faults: Faults, partitions: int) -> Ints:
    """Ascending sequence numbers in each partition, from a different first one, with some left unused."""
    steps = 1 + np.where(rng.random(len(partition)) < faults.unused, rng.integers(1, 4, len(partition)), 0)
    numbers = np.zeros(len(partition), dtype=np.int64)
    for p in range(partitions):
        rows = np.flatnonzero(partition == p)
        numbers[rows] = 1_000 * p + np.cumsum(steps[rows])
    return numbers


def _log(rng: np.random.Generator, partition: Ints, files: int, faults: Faults, partitions: int) -> pa.Table:
    file_of = _paces(rng, partition, files, partitions) if faults.lagging else _cut(len(partition), files)
    parts: list[tuple[int, Ints, bool]] = []
    for file in range(files):
        for p in range(partitions):
            back = int(rng.integers(1, max(2, len(partition) // files // partitions // 2)))
            if rng.random() < faults.rebalanced and (before := np.flatnonzero((file_of < file) & (partition == p))[-back:]).size:
                parts.append((file, before, True))
        mine = np.flatnonzero(file_of == file)
        if faults.lagging:  # as Spark has them: one partition behind the other
            mine = mine[np.argsort(rng.permutation(partitions)[partition[mine]], kind="stable")]
        parts.append((file, mine, False))
    return pa.table(
        {
            "file": np.concatenate([np.full(len(rows), file, np.int32) for file, rows, _ in parts]),
            "event": np.concatenate([rows for _, rows, _ in parts]),
            "redelivered": np.concatenate([np.full(len(rows), again) for _, rows, again in parts]),
        }
    )


def _cut(count: int, files: int) -> Ints:
    """The batch of each of `count` events, in equal parts."""
    return np.searchsorted(np.linspace(0, count, files + 1).astype(int)[1:], np.arange(count), side="right")


def _paces(rng: np.random.Generator, partition: Ints, files: int, partitions: int) -> Ints:
    """The batch of each event, where each partition is cut at places of its own."""
    file_of = np.zeros(len(partition), dtype=np.int64)
    for p in range(partitions):
        rows = np.flatnonzero(partition == p)
        cuts = np.sort(rng.integers(0, len(rows) + 1, files - 1))
        file_of[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    return file_of


def table_of(rows: Any) -> pa.Table:
    """Return an Arrow table of these rows: an Arrow table, a pandas or Spark DataFrame, or a list of dicts."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, list):
        return table_of_dicts(rows)
    is_pandas = type(rows).__module__.split(".")[0] == "pandas"
    return pa.Table.from_pandas(rows, preserve_index=False) if is_pandas else arrow_of(rows)


def events(topic: pa.Table, rows: Any) -> pa.Table:
    """Return the envelope of each event of `topic`: its position, and the `key`, `body` and `properties` of its row.

    Args:
        rows: the clean rows. Without a column `body`, the body is the whole row as JSON. Other columns stay as they are.
    """
    clean = table_of(rows)
    if "body" not in clean.column_names:
        clean = pa.table({"body": [json.dumps(row, default=_text).encode() for row in clean.to_pylist()]})
    chosen = clean.take(topic["row"])
    made = {
        **places(topic, SOURCE, TOPIC, _FIRST_EVENT),
    }
    columns = {f.name: _column(f, made, chosen) for f in ENVELOPE if f.name != "part"}
    others = {name: chosen[name] for name in chosen.column_names if name not in columns}
    return pa.table({**columns, **others})


def _text(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _column(field: pa.Field, made: dict[str, Any], chosen: pa.Table) -> Any:
    if field.name in made:
        return made[field.name].cast(field.type)
    return chosen[field.name].cast(field.type) if field.name in chosen.column_names else pa.nulls(len(chosen), field.type)


def deliver(rows: Any, seed: int = 0, batches: int = 8, faults: Faults | None = None, *, as_events: bool = True) -> list[pa.Table]:
    """Return clean rows as the batches of an at-least-once stream.

    Args:
        rows: Arrow table, pandas or Spark DataFrame, or list of dicts.
        as_events: put the rows into the envelope, which a Consumer takes. False: leave them as they are, for any foreachBatch function.
    """
    clean = table_of(rows)
    planned = plan(clean.num_rows, seed, batches, faults)
    return planned.batches(events(planned.topic, clean) if as_events else clean.take(planned.topic["row"]))


def places(topic: pa.Table, source: str, name: str, first: np.datetime64) -> dict[str, Any]:
    """Return the position columns of each event of a log. The first has the time given, and each next one is 10 ms later."""
    count = topic.num_rows
    return {
        "source": pa.repeat(source, count),
        "topic": pa.repeat(name, count),
        "partition": topic["partition"],
        "sequence_number": topic["sequence_number"],
        "offset": pc.binary_join_element_wise("@", topic["sequence_number"].cast(pa.string()), ""),
        "enqueued_time": pa.array(first + np.arange(count) * np.timedelta64(10, "ms")),
    }
