"""What messages advise: commands, and what to do about a range of positions that `verify` names. Pure text."""

from __future__ import annotations

import shlex

from checkpoint.position import Partition, Ranges

CHANGED = "Somebody changed the record, or this is a defect: keep the tables as they are and report it."
LETTERS = "Letters were deleted, changed or imported by hand: put them back, or note why they differ."
ABOVE = "Nothing is lost: what comes again is dropped as a redelivery. If it stays so, somebody set the checkpoint back."


def command(*words: object) -> str:
    """A `dedup` command in backquotes, as a shell takes it: words with spaces, quotes or other special characters are quoted."""
    return f"`dedup {shlex.join(map(str, words))}`"


def _where(partition: Partition, ranges: Ranges) -> list[object]:
    first, last = ranges.items[0].first, ranges.items[-1].last
    return ["--topic", partition.topic, "--partition", partition.partition, "--from", first, "--to", last]


def seen_twice(consumer: str, partition: Partition, ranges: Ranges) -> str:
    """For positions that two batches decided."""
    return (
        f"Compare the sink at these positions; {command('replay', f'MODULE:{consumer}', *_where(partition, ranges))} replaces their effect."
    )


def unseen(consumer: str, partition: Partition, ranges: Ranges) -> str:
    """For positions that nobody decided."""
    return (
        f"{command('dead-letters', 'reprocess', f'MODULE:{consumer}', '--from-log', *_where(partition, ranges))}"
        " runs those that the log still has."
    )
