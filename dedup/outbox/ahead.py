"""Messages are made in a thread while the store takes the rows of sinks: ids and lanes of many take as long as writing them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from dedup.outbox.message import Messages

MANY = 1_000
"""Rows from which on a thread is worth it."""


class Ahead:
    """Makes messages beside what the block does; the block ends once they are made, also where it raises."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Ahead:
        return self

    def begin(self, rows: int, job: Callable[[], Messages]) -> Callable[[], Messages]:
        """Begin where there are many rows; returns what waits for the messages and raises what the job raised."""
        if rows < MANY:
            return job
        self._pool = self._pool or ThreadPoolExecutor(1, "dedup-messages")
        return self._pool.submit(job).result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown()
