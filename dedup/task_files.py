"""What a store offers whose one commit decides a whole batch: Spark's tasks write rows as files, which the commit names.

Part of the seam of store.py, beside `Slicing`, whose tasks commit by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dedup.store import Rows


class TaskFiles(Protocol):
    """Writes rows of one sink, anywhere. Travels to tasks."""

    def write(self, rows: Rows) -> list[str]:
        """Write these rows as files that no commit names yet; returns what `adopt` takes.

        Raises:
            SinkMismatch: they do not fit the sink. RowsRefused: some of them break a rule of it.

        Crash: files that no commit names are invisible; they are removed after some days.
        """


@runtime_checkable
class Filing(Protocol):
    """A transaction that takes files of tasks."""

    def task_files(self, table: str) -> TaskFiles:
        """What writes rows of this sink in tasks. Raises SinkMismatch where there is no such sink."""

    def adopt(self, table: str, files: Sequence[str]) -> int:
        """Make these files, and what is in them, part of this transaction; returns the number of rows.

        Raises:
            RowsRefused: some rows break a rule of the sink.
        """
