"""The consumer in a process of its own, to be broken: run by the nursery of the contract suite (children.py)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from crash import log
from kit.orders import consumer, flatten
from kit.places import Place, place_of

SINKS = ("orders", "audit")
"""Appended to."""

MERGED = ("balances", "latest")
"""Merged: by the greatest value; by the order of the events, and some take their row away."""


def create(place: Place) -> None:
    """The sinks."""
    place.create_sink(SINKS[0])
    create_others(place)


def create_others(place: Place) -> None:
    """All but the first one."""
    for name in SINKS[1:]:
        place.create_sink(name)
    for name in MERGED:
        place.create_merge_sink(name)


def handle(rows: pa.Table, tx: Any, coin: float) -> None:
    """Two sinks and two merges; negative amounts are rejected, and some at random: it answers differently each time."""
    rest = tx.reject(rows, pc.less(pc.struct_field(rows["data"], "amount"), 0), "negative")
    rest = tx.reject(rest, pa.array([random.random() < coin for _ in range(rest.num_rows)], pa.bool_()), "coin")
    for name in SINKS:
        tx.write(flatten(rest), name)
    keys = pc.struct_field(rest["data"], "id").to_pylist()
    places = zip(rest["partition"].to_pylist(), rest["sequence_number"].to_pylist(), keys, strict=True)
    found = [log.Fact(partition, number // 2, key, junk=False) for partition, number, key in places]
    marks = pa.array([f.mark for f in found], pa.int64())
    tx.merge(pa.table([_text(f.account for f in found), marks], ["id", "amount"]), "balances", ["id"], newer_by="amount")
    leaves = pa.array([f.leaves for f in found], pa.bool_())
    tx.merge(pa.table([_text(f.seat for f in found), marks, leaves], ["id", "amount", "leaves"]), "latest", ["id"], delete_when="leaves")


def handle_all(rows: pa.Table, tx: Any) -> None:
    """The same without what is rejected at random."""
    handle(rows, tx, 0.0)


def handle_one(event: Any, tx: Any) -> None:
    """The same for one event, but for what is rejected at random."""
    if event.data["amount"] < 0:
        return tx.dead_letter(event, "negative")
    for name in SINKS:
        tx.write(event.data, name)
    one = log.Fact(event.partition, event.sequence_number // 2, event.data["id"], junk=False)
    tx.merge({"id": one.account, "amount": one.mark}, "balances", ["id"], newer_by="amount")
    tx.merge({"id": one.seat, "amount": one.mark, "leaves": one.leaves}, "latest", ["id"], delete_when="leaves")
    return None


def _text(values: Iterable[str]) -> pa.Array:
    return pa.array(list(values), pa.string())


def main(task: dict[str, Any]) -> None:
    """Run the batches up to `until` that are not finished, or die on the way; progress is a file, as a Spark checkpoint is."""
    progress, left = Path(task["progress"]), {"n": task.get("nth", 1)}

    def on_step(name: str) -> None:
        if name == task.get("die_at"):
            left["n"] -= 1
            if left["n"] == 0:
                os.kill(os.getpid(), task.get("signal", signal.SIGKILL))

    store = place_of(task["kind"], task["place"]).store(on_step=on_step)
    run = consumer(
        store, max_events_per_transaction=8, takeover_after=task.get("after", 1.0), max_outage=task.get("patience", 0.0), budget=None
    )
    run._handler = lambda rows, tx: handle(rows, tx, task.get("coin", 0.0))
    done = int(progress.read_text()) if progress.exists() else 0
    if "started" in task:
        Path(task["started"]).touch()
    while done < task["until"]:
        run(log.planned(task["seed"], done), done)
        done += 1
        new = progress.with_suffix(f".{os.getpid()}")
        new.write_text(str(done))
        new.rename(progress)
    store.close()
