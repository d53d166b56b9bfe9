"""The job under test: what runs a batch, what its effect is, and living through a death as Spark's driver would.

Called by the schedules of kit.py. Opens nothing by itself: stores and sinks are the user's.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dedup.consumer import Consumer
from dedup.pipeline.handlers import EachEvent, EachSlice, Event, Where
from dedup.pipeline.tx import Tx
from dedup.store import Selection
from dedup.testing.clock import standing
from dedup.testing.delivery import table_of
from dedup.testing.dying import AFTERWARDS, Death, Died, file_of, watched
from dedup.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW = dt.datetime(2024, 2, 28, 23, 59, 59, tzinfo=dt.UTC)
"""What the user's function takes for now."""

LETTERS = "dead letters"
"""The name under which an effect has the letters of a consumer."""

Row = tuple[tuple[str, str], ...]
"""Column names and values as text, by name."""

Effect = dict[str, Counter[Row]]
"""Sink -> its rows, each with how often it is there."""


@dataclass(frozen=True)
class Job:
    """One job at an empty place."""

    run: Callable[[Any, int], Any]
    """A Consumer, or any function that foreachBatch takes: (frame, batch id)."""
    read: Callable[[], Mapping[str, Any]]
    """Everything that it has written, wherever to: name -> Arrow table, DataFrame or list of dicts."""


class Life:
    """A job from its first batch to its last, in as many processes as it takes."""

    def __init__(self, job: Job) -> None:
        self._job, self._run = job, job.run
        self.changed_input = False
        if isinstance(self._run, Consumer):
            self._run = copy.copy(self._run)
            self._bring_here(self._run)

    @property
    def consumer(self) -> Consumer | None:
        """The consumer, where the job is one."""
        return self._run if isinstance(self._run, Consumer) else None

    @property
    def function(self) -> Any:
        """The user's own code."""
        handler = self.consumer.job().policy.handler if self.consumer else self._run
        event_handler = handler.handler if isinstance(handler, EachEvent | EachSlice) else handler
        return getattr(event_handler, "of", event_handler)

    def _bring_here(self, consumer: Consumer) -> None:
        """What runs in Spark's tasks would neither be seen there nor die with this process."""
        handler = consumer.job().policy.handler
        if isinstance(handler, EachEvent | EachSlice):
            handler = replace(handler, where=Where("driver"))
        if isinstance(handler, EachEvent):
            handler = replace(handler, handler=_Watched(handler.handler, self))
        consumer._handler = handler

    def restart(self) -> None:
        """As a new process would find it: what was written is there, nothing else."""
        if self.consumer:
            self.consumer.store.close()
        self._run = copy.copy(self._run) if self.consumer else self._run

    def batch(self, frame: Any, number: int, death: Death | None = None, now: dt.datetime = NOW) -> None:
        """Run one batch. Raises Died at the death's place, and what the job raises."""
        before = _copied(frame)
        with standing(self.function, now), self._dying(death):
            self._run(frame, number)
        self.changed_input = self.changed_input or not _same(before, frame)
        if death == AFTERWARDS:
            raise Died

    @contextmanager
    def _dying(self, death: Death | None) -> Iterator[None]:
        def at_step(name: str) -> None:
            if death and name == death.step:
                raise Died

        visits: Counter[int] = Counter()

        def at_line(number: int) -> None:
            visits[number] += 1
            if death and death.line and number == death.line[1] and visits[number] == death.visit:
                raise Died

        with self.told(at_step if death and death.step else None, at_line if death and death.line else None):
            yield

    @contextmanager
    def told(self, on_step: Callable[[str], None] | None, on_line: Callable[[int], None] | None) -> Iterator[None]:
        """Within, hear of each step of the store and of each line of the user's file, right before it."""
        with ExitStack() as stack:
            if on_step and self.consumer:
                store = self.consumer.store
                stack.callback(setattr, store, "on_step", store.on_step)
                store.on_step = on_step
            if on_line:
                stack.enter_context(watched(file_of(self.function), on_line))
            yield

    def effect(self) -> Effect:
        """What is visible now."""
        found = {name: rows_of(rows) for name, rows in self._job.read().items()}
        if self.consumer:
            kept = self.consumer.store.letters(Selection(consumer=self.consumer.name, limit=None), ["kind", "idempotence_key"])
            found[LETTERS] = rows_of(kept)
        return found

    def contradictions(self) -> list[str]:
        """What `dedup verify` finds wrong."""
        return verify(self.consumer.store, self.consumer.name).contradictions if self.consumer else []

    def close(self) -> None:
        """Let go of connections."""
        if self.consumer:
            self.consumer.store.close()


@dataclass(frozen=True)
class _Watched:
    """A handler of single events that tells when it has changed one."""

    of: Callable[[Event, Tx], Any]
    life: Life

    def __call__(self, event: Event, tx: Tx) -> Any:
        before = copy.deepcopy(event)
        try:
            return self.of(event, tx)
        finally:
            self.life.changed_input = self.life.changed_input or before != event


def rows_of(rows: Any) -> Counter[Row]:
    """Rows as they are compared: by all columns, nulls equal to nulls, in no order."""
    return Counter(tuple(sorted((name, repr(value)) for name, value in row.items())) for row in table_of(rows).to_pylist())


def _copied(frame: Any) -> Any:
    """A copy of what can be changed; Arrow tables and Spark's frames cannot."""
    module = type(frame).__module__.split(".")[0]
    return None if isinstance(frame, pa.Table) or module == "pyspark" else copy.deepcopy(frame)


def _same(before: Any, after: Any) -> bool:
    if before is None:
        return True
    return bool(before.equals(after)) if hasattr(before, "equals") else bool(before == after)
