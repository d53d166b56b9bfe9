"""Refuse what the state contradicts: other settings, a restore to an older time, a gap, a topic that was created again.

Which life of its topic a partition's events belong to is told by the broker's own ids: a topic that was created again is another one.
Promises to raise before anything is decided. Pure but for `ask`, which calls what the user gave as `Consumer(incarnation=...)`. Called by
the consumer and by pipeline/commit.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from checkpoint.errors import IncarnationChanged, PositionGap, Refused, SettingsChanged, StoreRestored, command
from checkpoint.head import Head, Run, Topic
from checkpoint.position import Partition, Range

log = logging.getLogger("dedup")

TopicIdentity = Callable[[str, Sequence[str]], Mapping[str, str]]
"""(source, topics) -> topic -> the broker's own id of its present life; topics that it does not have are left out.

It is asked after a batch was read and before any of it is decided: an id that is still the stored one then proves that the events are of
that life. Where it answers from a memory of its own, a re-creation within that time escapes. Picklable, as the consumer is."""


def ask(witness: TopicIdentity | None, topics: Iterable[Topic]) -> dict[Topic, str]:
    """What the broker says of these topics now; nothing where there is no witness.

    Raises:
        SourceUnavailable: the broker does not answer.
    """
    if witness is None:
        return {}
    by_source: dict[str, set[str]] = {}
    for source, topic in topics:
        by_source.setdefault(source, set()).add(topic)
    told = {(source, topic): id for source, names in by_source.items() for topic, id in witness(source, sorted(names)).items()}
    for source, names in by_source.items():
        if gone := sorted(name for name in names if (source, name) not in told):
            log.warning("the broker of %s does not have topic %s: dedup cannot check the topic's last events", source, ", ".join(gone))
    return told


def refuse_others(head: Head, told: Mapping[Topic, str]) -> None:
    """Raise IncarnationChanged where a topic has another id than the one that its state was written with."""
    for (source, topic), now in sorted(told.items()):
        known = head.incarnation_ids.get((source, topic))
        if known is not None and known != now:
            raise IncarnationChanged(
                f"Consumer {head.consumer!r}: topic {topic!r} of {source!r} was deleted and created again: the broker calls it {now}, our "
                f"checkpoints are of {known}. Events of the old topic that were not read are lost. To read the new topic from its first "
                "position: "
                f"{command('consumer', 'accept-incarnation', head.consumer, '--source', source, '--topic', topic)}."
            )


def news(head: Head, told: Mapping[Topic, str]) -> dict[Topic, str]:
    """The ids that are not stored yet."""
    return {topic: id for topic, id in told.items() if topic not in head.incarnation_ids}


def guard(head: Head, run: Run, settings: Mapping[str, str], firsts: Mapping[Partition, int]) -> None:
    """Refuse a batch that the state contradicts, before anything of it is written.

    Args:
        firsts: lowest sequence number of each partition in the batch; empty in key-only mode.

    Raises:
        SettingsChanged, StoreRestored, PositionGap: each names the command to go on.
    """
    if head.settings is not None and dict(head.settings) != dict(settings):
        raise SettingsChanged(_settings_message(head, settings))
    ours = head.batch_id if head.query_id == run.query_id and run.durable else None
    if ours is not None and run.batch_id > ours + head.batch_ended:  # Spark goes on when all of a batch is decided
        raise StoreRestored(
            f"Consumer {head.consumer!r}: Spark query {run.query_id} is at batch {run.batch_id}, our state at batch {ours}: "
            f"the state was restored to an older time. Find out what is missing, then run "
            f"{command('consumer', 'accept-restore', head.consumer)}."
        )
    if run.durable and run.batch_id > 0 and _begins(head) and not head.gap_accepted:
        raise StoreRestored(
            f"Consumer {head.consumer!r}: Spark query {run.query_id} is at batch {run.batch_id}, and the store has no state of it. Either "
            "the state was lost, or the query ran without this consumer. Duplicates of earlier events would not be recognised. Restore "
            "the state, or "
            f"start a new query that reads all again, or run {command('consumer', 'accept-gap', head.consumer)} to begin at this batch."
        )
    if _is_stranger(head, run) and not head.gap_accepted:
        raise StoreRestored(
            f"Consumer {head.consumer!r}: Spark query {run.query_id} goes on at batch {run.batch_id}, and the state has no record of this "
            "query. Either other queries of this consumer took over all of its partitions (another deployment, a new Spark checkpoint), "
            "or the state was restored to a time before the query began, or a restore was accepted since. Then earlier decisions of the "
            "query may be missing. Start a new query at the checkpoint; or, where you know that nothing is "
            f"missing, run {command('consumer', 'accept-gap', head.consumer)} to let it go on."
        )
    found = gaps(head, run, firsts)
    if found:
        raise PositionGap(
            f"Consumer {head.consumer!r}: positions would be left out: {', '.join(f'{p} {span}' for p, span in found.items())}. Start the "
            f"query at the checkpoint, or run {command('consumer', 'accept-gap', head.consumer)} to go on without them."
        )


def _begins(head: Head) -> bool:
    """Whether no batch was ever decided; a reset was a person's decision, and is none."""
    return head.settings is None and head.query_id is None and not 0 < head.generation == head.keyspace


def is_older(head: Head, known: Head) -> bool:
    """Whether this state lacks what `known` had: the store failed over to an older copy of itself, or a person moved a checkpoint back."""
    points = head.checkpoints
    return head.seq < known.seq or any(
        p not in points or points[p].sequence_number < c.sequence_number for p, c in known.checkpoints.items()
    )


def refuse_older(head: Head, known: Head) -> None:
    """Raise StoreRestored where this process has seen later decisions than the state has.

    Under a newer epoch the fence says more: the consumer may have been deleted, and another one may have its name.
    """
    if head.seq < known.seq and head.epoch <= known.epoch:
        raise StoreRestored(
            f"Consumer {head.consumer!r}: the state is at decision {head.seq}, this instance has seen decision {known.seq}: the state was "
            f"restored to an older time. Find out what is missing, run "
            f"{command('consumer', 'accept-restore', head.consumer)}, and start again."
        )


def gaps(head: Head, run: Run, firsts: Mapping[Partition, int]) -> dict[Partition, Range]:
    """Positions between a checkpoint and the first one of this batch, where another query comes and nobody has accepted them."""
    found = {} if head.gap_accepted else {p: _gap(head, run, p, first) for p, first in sorted(firsts.items())}
    return {partition: span for partition, span in found.items() if span is not None}


def _gap(head: Head, run: Run, partition: Partition, first: int) -> Range | None:
    point = head.checkpoints.get(partition)
    if point is None or point.query_id == run.query_id or first <= point.sequence_number + 1:
        return None  # the same query may jump: transaction markers and compaction leave gaps
    return Range(point.sequence_number + 1, first - 1)


def _is_stranger(head: Head, run: Run) -> bool:
    """Whether a query goes on, and no position that was decided is of it. Let through once, it would pass for known in each partition."""
    known = {head.query_id, *(point.query_id for point in head.checkpoints.values())}
    return run.durable and run.batch_id > 0 and bool(head.checkpoints) and run.query_id not in known


def _settings_message(head: Head, settings: Mapping[str, str]) -> str:
    old = dict(head.settings or {})
    changed = [f"{k}: was {old.get(k)!r}, now {settings.get(k)!r}" for k in sorted({*old, *settings}) if old.get(k) != settings.get(k)]
    return (
        f"Consumer {head.consumer!r}: its state was written with other key settings ({'; '.join(changed)}). "
        f"With the new ones old keys would not be recognised. Go back to the old settings, use another consumer name, "
        f"or start over with {command('consumer', 'reset', head.consumer)}."
    )


BY_HAND = "process"
"""The query id of rows that are part of no stream."""


def run_by_hand(head: Head, query_id: str | None) -> Run:
    """The run of rows by hand that comes next. Raises Refused where they would take the place of a stream's batch, or move its checkpoints.

    Args:
        query_id: of the stream that the rows are a batch of, if they are one.
    """
    queries = {head.query_id, *(point.query_id for point in head.checkpoints.values())} - {None, BY_HAND}
    if query_id is not None or queries:
        raise Refused(
            f"Consumer {head.consumer!r} belongs to a stream: `process` is for rows outside of one, in tests and notebooks. "
            f"Give these rows to a consumer with a name and a store of their own, or call the consumer itself with the stream's batch id."
        )
    return Run(BY_HAND, 0 if head.batch_id is None else head.batch_id + int(head.batch_ended))
