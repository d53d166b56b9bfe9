"""What a process does while letters come and go, until it is killed: started by children.py.

A task names a place, a consumer and what to `do`; the process kills itself right before its n-th step (`die_at`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ReprocessStopped
from dedup import DeadLetters, Selection
from dedup.outbox import Call, Dispatcher
from dedup.postgres import deletion
from dedup.reprocessing.from_log import fill
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.options import ReprocessOptions
from dedup.reprocessing.replay import replay
from kit.orders import batch, consumer, event, flatten
from kit.places import SLOW, PostgresPlace, place_of

SEQUENCES = 3
"""Every third event of a consumer has the same sequence key."""


def prepare_place(place: Any) -> None:
    """A sink `orders` whose rows can be told in the order of their effects, and one row per id in `balances`."""
    if isinstance(place, PostgresPlace):
        place.drop_sink()
        place.execute("CREATE TABLE orders (id text NOT NULL, amount bigint, n bigserial)")
    place.create_merge_sink("balances")


def worth_dying(place: Any, steps: list[str]) -> list[int]:
    """The numbers of the steps to die before, from 1: all of them, or the last one of each name where that takes long."""
    last = {name: number for number, name in enumerate(steps, 1)}
    return sorted(last.values()) if place.kind in SLOW else list(range(1, len(steps) + 1))


class Steps:
    """The steps of a process on a place as they go by, for a trial run of what is to die before them.

    On a slow place, or where it `looks`, also what each of them finds written: a death is known by that alone.
    """

    def __init__(self, place: Any, *, looks: bool = False) -> None:
        self._place, self._looks = place, looks or place.kind in SLOW
        self.names: list[str] = []
        self._found: list[object] = []

    def __call__(self, step: str) -> None:
        """Note one."""
        self.names.append(step)
        self._found.append(self._place.files() if self._looks else len(self.names))

    def to_die_before(self) -> list[int]:
        """The numbers of those that are `worth_dying`, from 1, without those that find what an earlier one has found."""
        first: dict[object, int] = {}
        for number in worth_dying(self._place, self.names):
            first.setdefault(self._found[number - 1], number)
        return sorted(first.values())

    def new(self) -> set[str]:
        """The names of those that found something else than the step before them, at any time."""
        return {name for name, found, before in zip(self.names, self._found, [None, *self._found], strict=False) if found != before}


def orders_of(name: str, numbers: Any) -> list[dict[str, Any]]:
    """Events with a key of their own each."""
    return [event(n, f"{name}-{n}", n % SEQUENCES) for n in numbers]


def log_of(name: str, count: int) -> Callable[..., pa.Table]:
    """A log that has the first events of a consumer."""
    whole = batch(*orders_of(name, range(count)))

    def read(source: str, topic: str, partition: int, first: int, last: int) -> pa.Table:
        return whole.filter((pc.field("sequence_number") >= first) & (pc.field("sequence_number") <= last))

    return read


class Bad(Exception):
    """What the handler raises."""


def is_flaky(id: str) -> bool:
    """A tenth of all ids."""
    return hashlib.sha256(id.encode()).digest()[0] < 26


def made(store: Any, task: dict[str, Any]) -> Any:
    """The consumer of a task: writes orders; `bad` numbers raise, `deadly` ones kill, `hanging` ones sleep, `flaky` raises for a tenth."""
    settings = {"sequence_key": "data.amount", "takeover": True, "budget": None, **task.get("settings", {})}
    run = consumer(store, name=task["name"], **settings)

    def handler(rows: pa.Table, tx: Any) -> None:
        flat = flatten(rows)
        tx.merge(flat, "balances", "id") if task.get("merge") else tx.write(flat, "orders")
        for id in flat["id"].to_pylist():
            number = int(id.rpartition("-")[2])
            if number in task.get("deadly", ()):
                os.kill(os.getpid(), signal.SIGKILL)
            if number in task.get("hanging", ()):
                time.sleep(600)
            if number in task.get("bad", ()) or (task.get("flaky") and is_flaky(id)):
                raise Bad(f"cannot book {id}")

    run._handler = handler
    run.register_log_reader(log_of(task["name"], task.get("log", 100)))
    return run


def do(store: Any, task: dict[str, Any]) -> None:
    """What a task asks for, once."""
    if task["do"] == "two streams":
        return two_streams(task)
    if task["do"] in ("discard", "reopen", "edit", "forget", "dispatch", "delete"):
        return decide(store, task)
    run = made(store, task)
    chosen, whole = Selection(**task.get("selection", {"limit": None})), Selection(topic="orders", partition=0, first=0)
    match task["do"]:
        case "stream":
            for number, numbers in enumerate(task["batches"]):
                rows = batch(*orders_of(task["name"], numbers))
                run(rows if run.positions is not None else rows.select(["body"]), number)
        case "reprocess":
            reprocess(chosen, run)
        case "reprocess for ever":
            while not Path(task["stop"]).exists():
                with contextlib.suppress(ReprocessStopped):
                    reprocess(chosen, run, options=ReprocessOptions(stop_after=10**6))
                time.sleep(0.01)
        case "from log":
            fill(whole, run)
        case "replay":
            replay(whole, run)


OVERLAP_SECONDS = 1.0
"""How long the handlers of two streams wait for each other, so that both are in hand when one of them kills. It decides nothing."""


def two_streams(task: dict[str, Any]) -> None:
    """Two consumers in one process, as two queries of one driver: one kills or hangs, while the other one's handler is slow."""
    begun, over = threading.Event(), threading.Event()
    slow, guilty = (made(place_of(task["kind"], task["place"]).store(), {**task, "name": name}) for name in ("slow", "guilty"))
    books, kills = slow._handler, guilty._handler

    def be_slow(rows: pa.Table, tx: Any) -> None:
        begun.set()
        over.wait(OVERLAP_SECONDS)
        books(rows, tx)

    def be_guilty(rows: pa.Table, tx: Any) -> None:
        begun.wait(OVERLAP_SECONDS)
        kills(rows, tx)

    slow._handler, guilty._handler = be_slow, be_guilty
    slow.on_failure = replace(slow.on_failure, handler_timeout=None if slow.on_failure.handler_timeout is None else 600.0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow, batch(*orders_of("slow", [0])), 0)
        second = pool.submit(guilty, batch(*orders_of("guilty", task["batches"][0])), 0)
        second.result()
        over.set()
        first.result()


def decide(store: Any, task: dict[str, Any]) -> None:
    """What a person decides about letters."""
    letters, who = DeadLetters(store), {"by": "test", "reason": "test"}
    chosen = Selection(consumer=task["name"], **task.get("selection", {"limit": None}))
    match task["do"]:
        case "discard":
            letters.discard(chosen, release_key=task.get("release", False), **who)
        case "reopen":
            letters.reopen(chosen, **who)
        case "dispatch":
            Dispatcher(store.outbox(task["name"]), Call(lambda messages: None)).once()
        case "delete":
            deletion.PORTION = task["portion"]
            store.delete_consumer(task["name"], although_running=True, although_waiting=True, **who)
        case "forget":
            letters.forget(task["name"], key=f"{task['name']}-{task['number']}", **who)
        case "edit":
            (one,) = store.letters(chosen).to_pylist()
            letters.edit(one["id"], body=orders_of(task["name"], [task["becomes"]])[0]["body"], **who)


def main(task: dict[str, Any]) -> None:
    """In a process of its own."""
    steps = 0

    def on_step(name: str) -> None:
        nonlocal steps
        steps += 1
        if steps == task.get("die_at"):
            print(f"died before {name}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP if task.get("sleeps") else signal.SIGKILL)

    do(place_of(task["kind"], task["place"]).store(on_step=on_step), task)
    if "ended" in task:
        Path(task["ended"]).touch()
