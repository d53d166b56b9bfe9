"""Iterations, one after another, each written to the journal: what was broken, how processes ended, what was lost and doubled."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from crash import cluster_lane, copied_back, object_faults, places, spark_lane
from crash.cluster_lane import ClusterLane
from crash.drivers import Garage
from crash.faults import FAULTS, Fault, ServerFaults, disk_full
from crash.lane import Lane
from crash.object_faults import SCHEMES
from crash.spark_lane import KafkaLane, SparkLane
from kit import kafka_server, object_storage
from kit.children import Nursery

DISK_FULL = "disk full"

SPARK, KAFKA, CLUSTER = "+spark", "+kafka", "+cluster"
"""After the name of a store: through a Structured Streaming query that reads files; one that reads from a broker; one on a cluster."""

Entry = dict[str, Any]
"""One line of the journal: seed, store, fault, lane, missed, detail, ended, lost, doubled, contradictions, seconds; or skipped and why."""


class Lanes:
    """The lane that is in use, and the next one once it has lived."""

    def __init__(
        self, made: type[Lane], kind: str, nursery: Nursery | Garage, where: Callable[[], str], drop: Callable[[Lane], None]
    ) -> None:
        self._made, self._kind, self._nursery, self._where, self._drop = made, kind, nursery, where, drop
        self._lane: Lane | None = None
        self._lived = 0

    def take(self, seed: int) -> Lane:
        """Longer by two batches than what is finished."""
        if self._lane is None or self._lived == self._made.lives:
            self.forget()
            self._lane, self._lived = self._made.new(self._kind, self._where(), self._nursery, seed), 0
        self._lived += 1
        self._lane.batches += 2
        self._lane.ended, self._lane.missed = [], False
        return self._lane

    def forget(self) -> None:
        """A lane in which something is wrong tells nothing any more."""
        if self._lane is not None:
            self._drop(self._lane)
            shutil.rmtree(self._lane.folder)
        self._lane = None


@contextlib.contextmanager
def arena(kind: str, nursery: Nursery) -> Iterator[dict[str, tuple[Fault, Lanes] | str]]:
    """Fault -> what does it and where; or why it cannot be done here."""
    with ExitStack() as stack:
        if kind.endswith((SPARK, KAFKA, CLUSTER)):
            yield _through_spark(kind, stack)
            return
        if kind in SCHEMES:
            yield _on_objects(kind, nursery, stack)
            return
        lanes, more, _ = stack.enter_context(_lanes(kind, nursery, None))
        found: dict[str, tuple[Fault, Lanes] | str] = {name: (fault, lanes) for name, fault in {**FAULTS, **more}.items()}
        try:
            disk = stack.enter_context(places.small_disk(kind))
            small, _, repair = stack.enter_context(_lanes(kind, nursery, disk))
            found[DISK_FULL] = (partial(disk_full, disk=disk, repair=repair), small)
        except places.NoDisk as reason:
            found[DISK_FULL] = str(reason)
        yield found


def _on_objects(kind: str, nursery: Nursery, stack: ExitStack) -> dict[str, tuple[Fault, Lanes] | str]:
    faults = stack.enter_context(object_faults.storage(kind))
    made = type("ObjectLane", (Lane,), {"environ": faults.settings})
    lanes = Lanes(made, kind, nursery, lambda: object_storage.prefix(SCHEMES[kind]), lambda lane: lane.place.clear())  # type: ignore[attr-defined]
    return {name: (fault, lanes) for name, fault in {**FAULTS, **faults.all()}.items()}


def _through_spark(kind: str, stack: ExitStack) -> dict[str, tuple[Fault, Lanes] | str]:
    store, _, way = kind.partition("+")
    made, faults = {
        SPARK: (SparkLane, spark_lane.FAULTS),
        KAFKA: (KafkaLane, spark_lane.KAFKA_FAULTS),
        CLUSTER: (ClusterLane, cluster_lane.FAULTS),
    }["+" + way]
    if made is KafkaLane:
        KafkaLane.broker = stack.enter_context(kafka_server.running_broker())
    said = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    drivers = cluster_lane.running(said) if made is ClusterLane else contextlib.closing(Garage(said))
    lanes, *_ = stack.enter_context(_lanes(store, stack.enter_context(drivers), None, made))
    return {name: (fault, lanes) for name, fault in faults.items()}


@contextlib.contextmanager
def _lanes(
    kind: str, nursery: Nursery | Garage, disk: places.Disk | None, made: type[Lane] = Lane
) -> Iterator[tuple[Lanes, dict[str, Fault], Callable[[], None]]]:
    root = disk and disk.folder
    if kind == "delta":
        with places.folders(root) as folder:
            names = (str(folder / f"lane{n}") for n in range(1_000_000))
            lanes = Lanes(made, kind, nursery, lambda: next(names), lambda lane: shutil.rmtree(lane.place.folder))  # type: ignore[attr-defined]
            yield lanes, copied_back.FAULTS, bool
    else:
        with places.postgres(root) as server:
            lanes = Lanes(made, kind, nursery, server.database, lambda lane: server.drop(lane.place.url))
            yield lanes, ServerFaults(server).all(), server.wait


def iterate(seed: int, kind: str, faults: dict[str, tuple[Fault, Lanes] | str]) -> Entry:
    """One fault, a restart to the end, and what is true then."""
    dice, begun = random.Random(seed), time.monotonic()
    name = sorted(faults)[seed % len(faults)]
    entry: Entry = {"seed": seed, "store": kind, "fault": name}
    chosen = faults[name]
    if isinstance(chosen, str):
        return {**entry, "skipped": chosen}
    fault, lanes = chosen
    lane = lanes.take(seed)
    try:
        detail = fault(lane, dice)
        ended = list(lane.ended)
        lane.finish()
        lost, doubled, contradictions = lane.wrong()
    except AssertionError as failed:
        detail, ended, lost, doubled, contradictions = "", list(lane.ended), [], [], [f"the restart failed: {failed}"]
    if lost or doubled or contradictions:
        lanes.forget()
    seconds = round(time.monotonic() - begun, 2)
    found = {"lost": lost, "doubled": doubled, "contradictions": contradictions}
    return {**entry, "lane": lane.seed, "missed": lane.missed, "detail": detail, "ended": ended, **found, "seconds": seconds}


def next_seed(kind: str, journal: Path) -> int:
    """Behind the last one that the journal has of this store."""
    return max((e["seed"] for e in read(journal) if e["store"] == kind), default=-1) + 1


def run(kind: str, seeds: Iterable[int], journal: Path, until: float = float("inf")) -> list[Entry]:
    """These iterations, or those that begin before that time of `time.monotonic`. Several processes may write to a journal."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory() as said, contextlib.closing(Nursery(Path(said))) as nursery, ExitStack() as stack:
        faults, file = stack.enter_context(arena(kind, nursery)), stack.enter_context(journal.open("a"))
        for seed in seeds:
            if time.monotonic() > until:
                break
            made.append(iterate(seed, kind, faults))
            file.write("\n" * _cut_off(journal) + json.dumps(made[-1]) + "\n")
            file.flush()
    return made


def _cut_off(journal: Path) -> bool:
    """Whether a kill cut the last line off."""
    with journal.open("rb") as file:
        return file.seek(0, 2) > 0 and (file.seek(-1, 2), file.read())[1] != b"\n"


def read(journal: Path) -> list[Entry]:
    """What is in the journal; a line that a kill cut off does not count."""
    found = []
    for line in journal.read_text().splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
