"""Handlers of single events that are coroutines: several events in hand at once, what they record in the order of their positions.

Called like the other handlers of dedup/foreach.py, by the flow. The events run on a loop that the process keeps, so that clients that
belong to a loop serve every batch.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.errors import ConfigError, HandlerError
from dedup.attempts import HandlerExited, is_ours
from dedup.envelope import POSITION
from dedup.executors import Where
from dedup.foreach import EachEvent, Event, EventHandler, Found, events_of, table_of
from dedup.index import Ints
from dedup.rows import copied
from dedup.tx import Tx

log = logging.getLogger("dedup")

CONCURRENCY = 16

Numbered = tuple[int, Event]
"""Row of the run, event."""

Rows = list[dict[str, Any]] | None
"""What the handler of an event returned; None where it returned nothing."""


def each_event(handler: EventHandler, into: str | None, where: Where, concurrency: int | None) -> EachEvent:
    """The handler of batches around one of events, which may be a coroutine. Raises ConfigError for a `concurrency` that cannot be."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - of an object whose class defines it
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        return EachEventAsync(handler, into, where, concurrency or CONCURRENCY)
    if concurrency is not None:
        raise ConfigError("concurrency= is for a handler that is an `async def`: another one takes one event after the other.")
    return EachEvent(handler, into, where)


class AsyncTx:
    """What an async handler may do for one event: kept back, and recorded when all events are through, in the order of their positions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._closed = False

    @property
    def connection(self) -> Any:
        """None of several events at once can have it."""
        raise HandlerError("An async handler has no tx.connection: several events are in hand at once. Return rows, or use tx.write.")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("write", "merge", "publish", "dead_letter"):
            raise AttributeError(f"An async handler has tx.write, tx.merge, tx.publish and tx.dead_letter, and no tx.{name}.")
        return lambda *given, **named: self._keep(name, given, named)

    def close(self) -> None:
        """The handler has returned: what a task that it left behind records now would belong to nothing."""
        self._closed = True

    def _keep(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._closed:
            raise HandlerError("The handler has returned, and its tx is closed: await what it starts before it returns.")
        self.calls.append((name, copied(given), copied(named)))


@dataclass(frozen=True)
class EachEventAsync(EachEvent):
    """A handler of batches that has several events in hand at once. Picklable where the handler is."""

    concurrency: int = CONCURRENCY

    def __call__(self, frame: Any, tx: Tx) -> None:
        """Handle every row of the frame; raises as `EachEvent` does, and HandlerError where events got no answer."""
        table = table_of(frame, tx)
        run = _Run(self, _lanes(table, tx.lanes))
        on_loop(run.all())
        if not run.failed and len(run.passed) != table.num_rows:
            raise HandlerError(f"{table.num_rows - len(run.passed)} events got no answer: the handler cancels the task that it runs in.")
        found = Found(failed=dict(sorted(run.failed.items())))
        for number, (event, own, rows) in sorted(run.passed.items()):
            self._record(number, event, own, rows, tx, found)
        found.hand_over(table, tx, self.into)

    def _record(self, number: int, event: Event, own: AsyncTx, rows: Rows, tx: Tx, found: Found) -> None:
        tx.at_event(event[: len(POSITION)])
        try:
            for name, given, named in own.calls:
                getattr(tx, name)(*given, **named)
        except Exception as error:
            if is_ours(error):
                raise
            found.failed[number] = error
        else:
            found.add(number, rows or (), tx, skipped=rows is None)


@dataclass
class _Run:
    """One run of the handler over the lanes."""

    each: EachEventAsync
    lanes: Iterator[list[Numbered]]
    passed: dict[int, tuple[Event, AsyncTx, Rows]] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)

    async def all(self) -> None:
        """As many workers as events may be in hand, each with one lane at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.each.concurrency):
                group.create_task(self._work())

    async def _work(self) -> None:
        for lane in self.lanes:
            for number, event in lane:
                if not await self._passes(number, event):
                    break  # what stands behind it in its sequence has to wait for it

    async def _passes(self, number: int, event: Event) -> bool:
        own = AsyncTx()
        try:
            made = await self.each.handler(event, own)  # type: ignore[arg-type]
            rows = self.each.rows(made)
        except SystemExit as left:  # it would end the loop
            self.failed[number] = HandlerExited(f"the handler called sys.exit({left.code!r})")
            return False
        except asyncio.CancelledError:  # of something that it awaited; a task group would not even notice
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self.failed[number] = HandlerExited("what the handler awaited was cancelled")
            return False
        except Exception as error:
            if is_ours(error):
                raise
            self.failed[number] = error
            return False
        finally:
            own.close()
        self.passed[number] = (event, own, None if made is None else rows)
        return True


def _lanes(table: pa.Table, sequences: Ints) -> Iterator[list[Numbered]]:
    """Events that must come one after the other; without a sequence each one is alone."""
    numbered = enumerate(events_of(table))
    if not (sequences >= 0).any():
        yield from ([one] for one in numbered)
        return
    events = list(numbered)
    alone = np.flatnonzero(sequences < 0)
    yield from ([events[number]] for number in alone.tolist())
    order = np.argsort(sequences, kind="stable")[len(alone) :]
    for lane in np.split(order, np.flatnonzero(np.diff(sequences[order])) + 1):
        yield [events[number] for number in lane.tolist()]


_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
_starting = threading.Lock()


def on_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it on the loop of this process, in a thread of its own. Raises what it raises; of a group the first one."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _the_loop())
    try:
        future.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    except BaseException:
        future.cancel()
        raise


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop for as long as the process lives: sys.exit in a task that a handler has started ends `run_forever`, too.

    Whoever awaits that task gets the SystemExit, once the loop goes on.
    """
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as left:
            log.warning("a task that a handler of events has started raised %r", left)


def _the_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None or _loop[0] != os.getpid():  # a fork has no threads
            loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), name="dedup handlers", daemon=True).start()
            _loop = (os.getpid(), loop)
        return _loop[1]
