"""What a person decides about a consumer's state: pure functions from head to head, for `store.amend`, and moves of checkpoints.

Accept a gap, a restore or a topic that was created again, reset, delete; and move checkpoints: to where another system has left
off, or over positions that shall not be waited for. Checkpoints move forward only: what batch records hold as seen is a redelivery
wherever the checkpoint stands, so moving below it would repeat nothing. Called by `dedup consumer`, `dedup checkpoint list` and the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from checkpoint.errors import ConfigError, Refused, command
from checkpoint.head import Checkpoint, Head, Holder, StateStore
from checkpoint.holders import this_process
from checkpoint.position import LAST, Partition, Range, Ranges
from checkpoint.processors import Group, Position
from checkpoint.records import RecordFilter

Amendment = Callable[[Head], Head]

PAGE = 5_000
"""Decisions whose records are read at once."""

_SEEN_COLUMNS = ["source", "topic", "partition", "incarnation", "generation", "seen"]


def accept_gap(head: Head) -> Head:
    """The next query may begin after positions that nobody has seen, in every partition."""
    return replace(head, gap_accepted=True)


def close_gap(head: Head) -> Head:
    """From now on a gap is an error again."""
    return replace(head, gap_accepted=False)


def accept_incarnation(head: Head, source: str, topic: str) -> Head:
    """The topic begins a new life: its checkpoints are dropped, old batch records no longer apply; keys still count."""
    lives = {**head.incarnations, (source, topic): head.incarnations.get((source, topic), 0) + 1}
    return replace(
        head,
        incarnations=lives,
        incarnation_ids={t: told for t, told in head.incarnation_ids.items() if t != (source, topic)},
        checkpoints={p: c for p, c in head.checkpoints.items() if (p.source, p.topic) != (source, topic)},
        floors={p: f for p, f in head.floors.items() if (p.source, p.topic) != (source, topic)},
        passed={p: n for p, n in head.passed.items() if (p.source, p.topic) != (source, topic)},
    )


def accept_restore(head: Head) -> Head:
    """Go on from the restored state: a new generation that remembers no Spark query.

    Nor do its checkpoints: the query from before, restarted by itself, would go on behind what was lost, and is one that nobody knows now.
    """
    points = {p: replace(point, query_id="") for p, point in head.checkpoints.items()}
    return replace(head, generation=head.generation + 1, query_id=None, batch_id=None, checkpoints=points)


def reset(head: Head) -> Head:
    """Begin again as if nothing had been processed: checkpoints, records and reservations of the old life no longer count."""
    return replace(
        head,
        generation=head.generation + 1,
        keyspace=head.generation + 1,
        settings=None,
        query_id=None,
        batch_id=None,
        gap_accepted=False,
        spent={},
        checkpoints={},
        floors={},
        passed={},
        incarnation_ids={},
    )


def deleted(head: Head) -> Head:
    """What a consumer begins with that gets the name of a deleted one.

    As after a reset, but a query that goes on where the deleted consumer was is refused: nobody has decided that it may. Its generation is
    above its keyspace, which it is not after a reset.
    """
    return replace(reset(head), generation=head.generation + 2, incarnations={})


@dataclass(frozen=True)
class Move:
    """One checkpoint, from where it stands to where it shall stand."""

    partition: Partition
    now: int | None  # None: this consumer has none there
    then: Checkpoint
    absent: Ranges  # between the two: they count as never delivered, and are handled as late if they come all the same

    @property
    def told(self) -> str:
        """What it means."""
        if self.now is not None and self.now >= self.then.sequence_number:
            return f"{Range(self.then.sequence_number + 1, self.now)} are waited for again"
        if self.now is None:
            return f"begins behind {self.then.sequence_number}; what lies before counts as another system's"
        return f"{str(self.absent).strip('[]')} are passed over: not handled, unless they are delivered all the same"


def plan(store: StateStore, head: Head, wanted: Mapping[Partition, Checkpoint]) -> list[Move]:
    """What moving these checkpoints means; those that stand there already are left out.

    Raises:
        ConfigError: below a position that a batch has seen; it names the commands that repeat.
    """
    seen = last_seen(store, head, wanted)
    moves = [_move(head, seen.get(partition), partition, point) for partition, point in sorted(wanted.items())]
    return [move for move in moves if move.now != move.then.sequence_number]


def _move(head: Head, last: int | None, partition: Partition, then: Checkpoint) -> Move:
    if last is not None and then.sequence_number < last:
        where = ("--topic", partition.topic, "--partition", partition.partition, "--from", then.sequence_number + 1, "--to", last)
        raise Refused(
            f"{partition}: positions up to {last} are already decided: with a checkpoint at {then.sequence_number} the consumer would drop "
            "them as redeliveries. To repeat them with their effect replaced: "
            f"{command('consumer', 'replay', 'MODULE:CONSUMER', *where)}. "
            f"Positions that were never delivered: `dedup dead-letter reprocess MODULE:CONSUMER --from-log`."
        )
    point = head.checkpoints.get(partition)
    now = point.sequence_number if point else None
    absent = Ranges.of([(now + 1, then.sequence_number)]) if now is not None and now < then.sequence_number else Ranges()
    return Move(partition, now, then, absent)


def last_seen(store: StateStore, head: Head, wanted: Mapping[Partition, Checkpoint]) -> dict[Partition, int]:
    """The highest position that batch records hold as seen, of each of these partitions in its present life.

    A partition may be left out if nothing above the position wanted was seen of it.
    """
    found: dict[Partition, int] = {}
    for page in _pages(store, head, wanted):
        for batch in page.select(_SEEN_COLUMNS).to_pylist():
            partition = Partition(batch["source"], batch["topic"], batch["partition"])
            life = head.incarnations.get((partition.source, partition.topic), 0)
            if batch["seen"] and batch["generation"] >= head.keyspace and batch["incarnation"] == life:
                found[partition] = max(found.get(partition, -1), *(r["last"] for r in batch["seen"]))
    return found


def _pages(store: StateStore, head: Head, wanted: Mapping[Partition, Checkpoint]) -> Iterator[pa.Table]:
    """Batch records that these partitions may be in, some decisions at a time: those of a year fit in no memory. A purge beside it merges
    records into newer ones, so none is missed.
    """
    place: dict[str, Any] = {}
    if len(wanted) == 1:
        ((partition, point),) = wanted.items()
        place = {"partition": partition, "first": point.sequence_number}
    for start in range(0, max(head.seq, 1), PAGE):
        until = start + PAGE if start + PAGE < head.seq else LAST
        yield store.batches(head.consumer, RecordFilter(start, until, **place))


def moved(head: Head, moves: Iterable[Move]) -> Head:
    """The head with its checkpoints moved.

    Raises:
        ConfigError: one of them stands elsewhere than it did when the move was planned.
    """
    checkpoints, passed = dict(head.checkpoints), dict(head.passed)
    for move in moves:
        point = head.checkpoints.get(move.partition)
        if (point.sequence_number if point else None) != move.now:
            raise Refused(f"{move.partition}: the checkpoint has moved meanwhile. Stop the consumer, and repeat the command.")
        checkpoints[move.partition] = replace(move.then, query_id="")
        passed[move.partition] = move.then.sequence_number
    return replace(head, checkpoints=checkpoints, passed=passed)


def move(store: StateStore, consumer: str, moves: list[Move], *, by: str, reason: str) -> Head:
    """Move checkpoints of a consumer, made known if it is new.

    Raises:
        ConfigError: a checkpoint has moved since.

    Crash: all of them are moved or none; a consumer that was made known without any is as good as none.
    """
    if consumer not in store.consumers():
        here = this_process()
        store.take_epoch(consumer, Holder(here.host, here.pid, here.started, "dedup checkpoint"), takeover_after=0)
    return store.amend(consumer, lambda head: moved(head, moves), by=by, reason=reason)


def wanted_of(positions: Iterable[Position], source: str, topic: str) -> dict[Partition, Checkpoint]:
    """azure's checkpoints as those of a consumer. Raises ConfigError for a partition whose id is not a number."""
    try:
        return {
            Partition(source, topic, int(p["partition_id"])): Checkpoint(int(p["sequence_number"]), p["offset"] or None) for p in positions
        }
    except ValueError as error:
        raise ConfigError(f"The partition of an event hub must be a number: {error}.") from None


def positions_of(head: Head, group: Group, source: str | None = None) -> list[Position]:
    """A consumer's checkpoints in one hub as azure's, for a mirror. Offsets that are not known are None.

    Args:
        source: what the consumer calls the namespace, if otherwise than `group`.
    """
    where = ((source or group.namespace).lower(), group.hub.lower())
    return [
        {**group.keys, "partition_id": str(p.partition), "sequence_number": point.sequence_number, "offset": point.offset}
        for p, point in sorted(head.checkpoints.items())
        if (p.source.lower(), p.topic.lower()) == where
    ]
