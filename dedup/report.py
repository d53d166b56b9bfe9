"""What became of one batch, in rows."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from dedup import planning


@dataclass
class Report:
    """What became of one batch, in rows; `delivered` is the sum of the others."""

    delivered: int = 0
    redelivered: int = 0
    processed: int = 0
    duplicates: int = 0
    skipped: int = 0
    dead_lettered: int = 0

    def add(self, state: npt.NDArray[np.int8]) -> None:
        """Count the rows of one committed chunk."""
        self.count(np.bincount(state, minlength=planning.STATES))

    def count(self, counts: npt.NDArray[np.int64]) -> None:
        """Count rows by their states."""
        self.delivered += int(counts.sum())
        self.redelivered += int(counts[planning.REDELIVERED])
        self.processed += int(counts[planning.NEW])
        self.duplicates += int(counts[planning.DUPLICATE])
        self.skipped += int(counts[planning.SKIPPED])
        self.dead_lettered += int(sum(counts[k] for k in planning.LETTER_KINDS))

    def add_report(self, other: Report) -> None:
        """Count what became of a part of the batch."""
        for counted in fields(self):
            setattr(self, counted.name, getattr(self, counted.name) + getattr(other, counted.name))

    def __str__(self) -> str:
        return (
            f"delivered {self.delivered}, redelivered {self.redelivered}, processed {self.processed}, duplicates {self.duplicates}, "
            f"skipped {self.skipped}, dead-lettered {self.dead_lettered}"
        )
