"""What a decision orders and a transaction executes, in this order: values without behaviour.

Made by the pure planning code, executed by the stores, each reported through `on_step` by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from checkpoint.head import Checkpoint, Run, Topic
from checkpoint.position import Partition
from deadletter.letter import Kind
from deadletter.policy import Budget, Used
from deadletter.store import LetterStep


@dataclass(frozen=True)
class Record:
    """Keep the batch record (BATCHES schema).

    Of a stream's batch also the last query and batch, the settings and the budget's state; and clear gap_accepted. Where the handler
    was tried the marker of that is removed: a chunk of nothing but redeliveries leaves the one of a later chunk, in which processes die.
    """

    name: ClassVar[str] = "record"
    batches: pa.Table
    run: Run
    settings: Mapping[str, str]
    used: Mapping[Kind, Used] = field(default_factory=dict)  # of the budget, by this chunk
    stream: bool = True  # False: positions that a person ran from the log
    budget: Budget | None = None  # judged once more where others commit side by side
    tried: bool = True  # whether there was anything for the handler


@dataclass(frozen=True)
class Advance:
    """Set these checkpoints. Never backwards: values are at or above the head's (equal where only the query changed).

    And keep the broker's ids of topics that have none yet.
    """

    name: ClassVar[str] = "advance"
    checkpoints: Mapping[Partition, Checkpoint]
    incarnation_ids: Mapping[Topic, str] = field(default_factory=dict)


Step = LetterStep | Record | Advance


@dataclass(frozen=True)
class Merge:
    """How rows go into a sink that keeps one row per key. Of the rows' position columns those that the sink lacks are left out."""

    keys: tuple[str, ...]  # columns that name a row; never null
    newer_by: str | None = None  # a row whose value is not greater than the sink's changes nothing
    delete_when: str | None = None  # boolean column of the rows: true deletes the sink's row
