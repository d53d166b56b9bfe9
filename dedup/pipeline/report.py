"""What became of one batch, as its user is told. Called by the consumer, by members and by Spark's tasks as they add up their chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoint.position import Partition
from dedup.core import planning

log = logging.getLogger("dedup")


@dataclass(frozen=True)
class Report:
    """How many rows of one batch had which outcome, after all of it is committed. Two reports are equal if these counts are equal.

    It counts the rows of the batch, not those of the sinks: neither statements of `tx.connection` nor a merge that Spark runs say how many
    rows they have changed. Count those in the handler, or in the sink.
    """

    delivered: int = 0
    """All rows of the batch: the sum of the counts below."""
    redelivered: int = 0
    """Rows that were dropped because their positions were decided before."""
    processed: int = 0
    """Rows that the handler had, and whose effect is committed."""
    duplicates: int = 0
    """Rows that were dropped because their idempotence keys were known."""
    skipped: int = 0
    """Rows that the handler skipped."""
    dead_lettered: int = 0
    """Rows that became dead letters."""
    consumer: str = field(default="", compare=False)
    """The consumer's name."""
    batch_id: int | None = field(default=None, compare=False)
    """The batch's number in its query run."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds from the call to the commit of the last chunk, with retries and the sending of messages."""
    checkpoints: Mapping[Partition, int] = field(default_factory=dict, compare=False)
    """Partition -> the sequence number up to which everything is decided. Without positions there are none."""

    @classmethod
    def of(cls, state: npt.NDArray[np.int8]) -> Report:
        """The counts of one committed chunk, from planning's states of its rows."""
        return cls.of_counts(np.bincount(state, minlength=planning.STATES))

    @classmethod
    def of_counts(cls, counts: npt.NDArray[np.int64]) -> Report:
        """State -> rows."""
        return cls(
            int(counts.sum()),
            int(counts[planning.REDELIVERED]),
            int(counts[planning.NEW]),
            int(counts[planning.DUPLICATE]),
            int(counts[planning.SKIPPED]),
            int(sum(counts[kind] for kind in planning.LETTER_KINDS)),
        )

    @property
    def counts(self) -> dict[str, int]:
        """Outcome -> rows."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.compare}

    @property
    def fields(self) -> dict[str, Any]:
        """What a line of JSON has of it (`dedup.logs.FIELDS`)."""
        return {"consumer": self.consumer, "batch": self.batch_id, "counts": self.counts, "seconds": round(self.seconds, 3)}

    def __add__(self, other: Report) -> Report:
        """The counts of both."""
        return replace(self, **{name: count + getattr(other, name) for name, count in self.counts.items()})

    def __str__(self) -> str:
        return (
            f"delivered {self.delivered}, redelivered {self.redelivered}, processed {self.processed}, duplicates {self.duplicates}, "
            f"skipped {self.skipped}, dead-lettered {self.dead_lettered}"
        )


OnBatch = Callable[[Report], object]
"""Told what became of each batch, after its commit."""


def tell(on_batch: OnBatch | None, report: Report) -> None:
    """Call what the user gave as `on_batch=`. What it raises is logged with its stack: the batch is committed and cannot fail any more."""
    if on_batch is None:
        return
    try:
        on_batch(report)
    except Exception:
        log.exception("%s batch %s is committed; on_batch= raised for its report:", report.consumer, report.batch_id)
