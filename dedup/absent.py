"""Positions that were never delivered, as those of an accepted gap, run from a batch read of the log. Called by reprocess with from_log."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from checkpoint.errors import ConfigError, PositionsMissing
from checkpoint.position import Partition, Range, Ranges
from deadletter.selection import Selection
from dedup.consumer import Consumer
from dedup.coverage import Coverage, coverage, partitions_of
from dedup.outage import with_replanning
from dedup.pages import ReprocessOptions
from dedup.pipeline import commit, company
from dedup.pipeline.commit import Job, Report
from dedup.readlog import lost, read_again, windows
from dedup.store import Run, Transaction


@dataclass
class Filled:
    """What became of absent positions."""

    absent: int = 0  # positions in the range that nothing is known of
    ran: Report = field(default_factory=Report)
    lost: Ranges = field(default_factory=Ranges)  # not in the log any more, recorded as LOST
    dry_run: bool = False


def fill(selection: Selection, consumer: Consumer, *, dry_run: bool = False, options: ReprocessOptions | None = None) -> Filled:
    """Run the absent positions of the selected range, up to the checkpoint, through the consumer's handler, as late events.

    Raises:
        ConfigError: no topic is selected, or what is no position; a limit or rate; nothing is registered with `consumer.log`.
        IncarnationChanged: the log holds another event than was decided right beside absent positions: the topic was created again.
        PositionsMissing: the log does not have some of them any more; without `options.skip_missing`. What came before them is done.

    Crash: each window of positions is decided or not; a second call goes on with what is absent then.
    """
    how, store = options or ReprocessOptions(), consumer.store
    if how.limit is not None or how.rate is not None:
        raise ConfigError("--limit and --rate are for letters. Of the log, give a shorter range: a second call goes on behind it.")
    head = consumer.known_head()
    covers = [coverage(store, head, p, selection) for p in partitions_of(head, selection)]
    filled = Filled(sum(len(c.absent) for c in covers), dry_run=dry_run)
    if not dry_run:
        job, run = consumer.job(), f"from-log:{uuid.uuid4().hex}"
        for cover in covers:
            _fill_partition(job, cover, how, run, filled)
    return filled


def _fill_partition(job: Job, cover: Coverage, options: ReprocessOptions, run: str, filled: Filled) -> None:
    for number, span in enumerate(windows(cover.absent)):
        missing = with_replanning(partial(_fill_window, job, cover.partition, span, Run(run, 0, number), options, filled))
        if missing:
            reason = f"LOST {cover.partition} {missing}: not in the log any more" + (f"; {options.reason}" if options.reason else "")
            job.store.amend(job.name, lambda head: head, by=options.by, reason=reason)
            filled.lost |= missing
        options.on_progress(filled.ran.delivered, filled.absent)


def _fill_window(job: Job, partition: Partition, span: Range, run: Run, options: ReprocessOptions, filled: Filled) -> Ranges:
    """Decide these positions in one transaction; returns those that the log has lost.

    The positions right beside them are read with them where they were decided: they tell a topic that was created again.
    """
    with (
        company.taken(job.name),
        job.store.begin_letters(job.name, positions=True) as transaction,
        read_again(job, partition, _with_neighbours(span, partition, transaction), transaction.head) as (rows, index),
    ):
        missing = lost(job, partition, Ranges.of([span]) - Ranges.of_numbers(index.numbers))
        if missing and not options.skip_missing:
            raise PositionsMissing(
                f"{partition} {missing} cannot be had: the log does not have them (any more). Run what is there with "
                "--skip-missing, which records the others as LOST."
            )
        if len(index):
            chunk = commit.Chunk(rows, index, run, transaction.head, stream=False)
            state = commit.decide_chunk(chunk, job.store, transaction, job.policy.unwatched())
            filled.ran.add(state[(index.numbers >= span.first) & (index.numbers <= span.last)])
    return missing


def _with_neighbours(span: Range, partition: Partition, transaction: Transaction) -> Range:
    """With the positions before and behind it that were decided: as redeliveries they are compared with what was decided, and dropped."""
    seen = transaction.seen({partition: (span.first - 1, span.last + 1)}).get(partition, Ranges())
    before, behind = seen.contains(np.array([span.first - 1, span.last + 1])).tolist()
    return Range(span.first - before, span.last + behind)
