"""A person moves a consumer's checkpoints: to where another system has left off, or over positions that shall not be waited for.

Forward only: what batch records hold as seen is a redelivery wherever the checkpoint stands, so moving below it would repeat nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from checkpoint.advice import command
from checkpoint.errors import ConfigError
from checkpoint.position import Partition, Range, Ranges
from checkpoint.processors import Group, Position
from dedup.process import this_process
from dedup.store import Checkpoint, Head, Holder, Store


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
        return f"{self.absent} are passed over: not handled, unless they are delivered all the same"


def plan(store: Store, head: Head, wanted: Mapping[Partition, Checkpoint]) -> list[Move]:
    """What moving these checkpoints means; those that stand there already are left out.

    Raises:
        ConfigError: below a position that a batch has seen; it names the commands that repeat.
    """
    seen = last_seen(store, head)
    moves = [_move(head, seen.get(partition), partition, point) for partition, point in sorted(wanted.items())]
    return [move for move in moves if move.now != move.then.sequence_number]


def _move(head: Head, last: int | None, partition: Partition, then: Checkpoint) -> Move:
    if last is not None and then.sequence_number < last:
        where = ("--topic", partition.topic, "--partition", partition.partition, "--from", then.sequence_number + 1, "--to", last)
        raise ConfigError(
            f"{partition}: positions up to {last} are on record as decided: a checkpoint at {then.sequence_number} would repeat nothing, "
            f"they would be dropped as redeliveries. To repeat them with their effect replaced: "
            f"{command('replay', 'MODULE:CONSUMER', *where)}. "
            f"Positions that were never delivered: `dedup dead-letters reprocess MODULE:CONSUMER --from-log`."
        )
    point = head.checkpoints.get(partition)
    now = point.sequence_number if point else None
    absent = Ranges.of([(now + 1, then.sequence_number)]) if now is not None and now < then.sequence_number else Ranges()
    return Move(partition, now, then, absent)


def last_seen(store: Store, head: Head) -> dict[Partition, int]:
    """The highest position that batch records hold as seen, of each partition in its present life."""
    found: dict[Partition, int] = {}
    for batch in store.batches(head.consumer).to_pylist():
        partition = Partition(batch["source"], batch["topic"], batch["partition"])
        life = head.incarnations.get((partition.source, partition.topic), 0)
        if batch["seen"] and batch["generation"] >= head.keyspace and batch["incarnation"] == life:
            found[partition] = max(found.get(partition, -1), *(r["last"] for r in batch["seen"]))
    return found


def moved(head: Head, moves: Iterable[Move]) -> Head:
    """The head with its checkpoints moved.

    Raises:
        ConfigError: one of them stands elsewhere than it did when the move was planned.
    """
    checkpoints, passed = dict(head.checkpoints), dict(head.passed)
    for move in moves:
        point = head.checkpoints.get(move.partition)
        if (point.sequence_number if point else None) != move.now:
            raise ConfigError(f"{move.partition}: the checkpoint has moved meanwhile. Stop the consumer, and repeat the command.")
        checkpoints[move.partition] = replace(move.then, query_id="")
        passed[move.partition] = move.then.sequence_number
    return replace(head, checkpoints=checkpoints, passed=passed)


def move(store: Store, consumer: str, moves: list[Move], *, by: str, reason: str) -> Head:
    """Move checkpoints of a consumer, made known if it is new.

    Raises:
        ConfigError: a checkpoint has moved since.

    Crash: all of them are moved or none; a consumer that was made known without any is as good as none.
    """
    if consumer not in store.consumers():
        here = this_process()
        store.take_epoch(consumer, Holder(here.host, here.pid, here.started, "dedup checkpoints"), takeover_after=0)
    return store.amend(consumer, lambda head: moved(head, moves), by=by, reason=reason)


def wanted_of(positions: Iterable[Position], source: str, topic: str) -> dict[Partition, Checkpoint]:
    """azure's checkpoints as those of a consumer. Raises ConfigError for a partition whose id is not a number."""
    try:
        return {
            Partition(source, topic, int(p["partition_id"])): Checkpoint(int(p["sequence_number"]), p["offset"] or None) for p in positions
        }
    except ValueError as error:
        raise ConfigError(f"A partition of an event hub has a number for a name: {error}.") from None


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
