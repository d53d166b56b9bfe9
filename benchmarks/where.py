"""Where the seconds of our batches go: clocks around the functions that do the work, there for the time of one contest.

A step's seconds are its own, without those of steps inside it. What a thread does beside the batch is told as such and is in no sum.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

STEPS = (
    ("analysis of the plan", "dedup.spark.batch", "plan"),
    ("rows from Spark to Arrow", "dedup.spark.batch", "SparkBatch.collect"),
    ("JSON by columns", "dedup.decode.prepare", "_decoded"),
    ("keys", "dedup.decode.prepare", "_keys"),
    ("payload hashes", "dedup.decode.prepare", "payload_hashes"),
    ("the rest of preparing", "dedup.decode.prepare", "prepare_keys"),
    ("positions, redeliveries, decision", "dedup.pipeline.commit", "index_of"),
    ("positions, redeliveries, decision", "dedup.pipeline.commit", "_sift"),
    ("positions, redeliveries, decision", "dedup.pipeline.commit", "_steps"),
    ("the state before it", "dedup.consumer", "Consumer._hold"),
    ("look keys up", "dedup.postgres.transaction", "PgTransaction.ask"),
    ("write reservations", "dedup.postgres.transaction", "PgTransaction.reserve"),
    ("look keys up", "dedup.delta.transaction", "DeltaTransaction.reserve"),
    ("the handler's frame", "dedup.spark.batch", "EvaluatedInMemory._make"),
    ("the handler", "dedup.pipeline.attempts", "Attempts.run"),
    ("the sink's rows", "dedup.postgres.transaction", "PgTransaction.write"),
    ("the sink's rows", "dedup.delta.transaction", "DeltaTransaction.write"),
    ("records, commit", "dedup.postgres.transaction", "PgTransaction.execute"),
    ("the ledger's files", "dedup.delta.commit", "write_files"),
    ("commit", "dedup.delta.ledger", "Ledger.commit"),
    ("read back, new keys into the index", "dedup.delta.commit", "_read_back"),
    ("publish", "dedup.delta.commit", "SinkPublisher.publish"),
)
"""What is told, the module, and the function in it."""

REST, BESIDE = "everything else", ", beside"

Way = Callable[[Any, int], Any]
"""What is given to `foreachBatch`."""


class Clock:
    """Seconds of one batch, by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._thread, self._local = 0, threading.local()

    def begin(self) -> None:
        """A batch begins, in this thread."""
        self.seconds.clear()
        self._thread = threading.get_ident()

    def around(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which adds what it takes to this step."""

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            """Call the function, and add the seconds that are its own to its step."""
            inner: list[float] = self._local.__dict__.setdefault("inner", [0.0])
            inner.append(0.0)
            begun = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                taken = time.perf_counter() - begun
                own = taken - inner.pop()
                inner[-1] += taken
                self.seconds[step if threading.get_ident() == self._thread else step + BESIDE] += own

        return timed


@contextmanager
def watched(way: Way) -> Iterator[tuple[Way, dict[str, list[float]]]]:
    """The way with clocks, and seconds of each of its batches by step, which fill as it runs."""
    found: dict[str, list[float]] = {}
    clock, undo = Clock(), []
    for step, module, path in STEPS:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, import_module(module))
        undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, clock.around(step, owner.__dict__[name]))

    def timed(batch: Any, batch_id: int) -> None:
        """Run the way on one batch, and keep the seconds of its steps."""
        clock.begin()
        begun = time.perf_counter()
        way(batch, batch_id)
        _add(found, clock.seconds, time.perf_counter() - begun)

    try:
        yield timed, found
    finally:
        for owner, name, function in undo:
            setattr(owner, name, function)


def _add(found: dict[str, list[float]], seconds: dict[str, float], whole: float) -> None:
    before = max(map(len, found.values()), default=0)
    told = {**seconds, REST: whole - sum(s for step, s in seconds.items() if not step.endswith(BESIDE))}
    for step in {**found, **told}:
        taken = found.setdefault(step, [0.0] * before)
        taken.append(told.get(step, 0.0))
