"""The Spark source of Event Hubs beside a bare azure-eventhub receive loop, both on this project's double of the service.

Same events, same prefetch, one partition at a time; then more partitions, for the source alone. The double is a process of its own that
serves encoded frames; what it could serve at most is printed, and a ratio counts only where the bare loop takes up to 70 % of that.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes, middle

HUB = "bench"
BODY = 200
PREFETCH = 1_000
COUNTS_UP_TO = 0.7
GROWTH = (1, 2, 4)
ROUNDS = 2
"""How often the two ways take turns."""

FEWER = 4
"""Batches here are twice as large as elsewhere, and as many times fewer."""


def compare(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """`eventhubs/source_vs_client`, and what more partitions give. Raises AssertionError where events are missing."""
    sizes = replace(sizes, events=2 * sizes.events, batches=max(1, sizes.batches // FEWER), warm=min(sizes.warm, 1))
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from kit.eventhubs.ceiling import ceiling
    from kit.eventhubs.control import running_double

    with running_double() as double:
        taken = _contest(spark, double, folder, sizes)
        double.create("ceiling")
        double.fill("ceiling", 0, sizes.events, size=BODY)
        most = ceiling(double, "ceiling", 0, sizes.events)
        growth = {parts: _grown(spark, double, folder / str(parts), parts, sizes) for parts in GROWTH}
    measure = throughput("eventhubs/source_vs_client", taken["source"], taken["client"], sizes.events)
    _tell(measure, most, {parts: parts * (sizes.events // 4) / middle(found) for parts, found in growth.items()})
    return [measure], {f"eventhubs, {name}": found for name, found in taken.items()}


def _tell(measure: Measure, most: float, growth: dict[int, float]) -> None:
    share = measure.other / most
    counts = "counts" if share <= COUNTS_UP_TO else "does not count: the double is the limit"
    print(f"eventhubs: the double's ceiling is {most:,.0f} events/s, the bare loop takes {share:.0%} of it: the ratio {counts}")
    print("eventhubs: source, events/s with so many partitions: " + ", ".join(f"{n}: {rate:,.0f}" for n, rate in growth.items()))


def _contest(spark: Any, double: Any, folder: Path, sizes: Sizes) -> Seconds:
    """Seconds that each way takes for `sizes.events` events of one partition, in turns."""
    taken: Seconds = {"source": [], "client": []}
    for turn in range(ROUNDS):
        double.create(HUB)
        double.fill(HUB, 0, sizes.events * (sizes.batches + sizes.warm), size=BODY)
        taken["client"] += [_client(double, sizes.events) for _ in range(sizes.batches)]
        taken["source"] += _source(spark, double, HUB, folder / f"turn{turn}", sizes.events, sizes)
    return taken


def _grown(spark: Any, double: Any, folder: Path, parts: int, sizes: Sizes) -> list[float]:
    """As `_source`, with a quarter of the events for each partition."""
    name, each = f"{HUB}{parts}", sizes.events // 4
    double.create(name, parts)
    for part in range(parts):
        double.fill(name, part, each * (sizes.batches + sizes.warm), size=BODY)
    return _source(spark, double, name, folder, each * parts, sizes)


def _source(spark: Any, double: Any, hub: str, folder: Path, events: int, sizes: Sizes) -> list[float]:
    """Seconds of each micro-batch of so many events, all of it as Spark counts it: planning, reading, committing; without the warm ones."""
    from dedup.eventhub import register

    register(spark)
    found: list[int] = []
    options = {
        "connectionString": double.connection_string,
        "eventHubName": hub,
        "prefetch": str(PREFETCH),
        "maxEventsPerTrigger": str(events),
    }
    frame = spark.readStream.format("eventhubs").options(**options).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(folder)).trigger(availableNow=True)
    query = writer.start()
    query.awaitTermination()
    batches = [p for p in query.recentProgress if p.numInputRows]
    found = [p.numInputRows for p in batches]
    assert found == [events] * (sizes.batches + sizes.warm), found
    return [p.durationMs["triggerExecution"] / 1000 for p in batches][sizes.warm :]


def _client(double: Any, events: int) -> float:
    """Seconds from the first batch of a receive loop, which only counts, until so many events came; the link is open by then."""
    from azure.eventhub import EventHubConsumerClient

    client = EventHubConsumerClient.from_connection_string(double.connection_string, "$Default", eventhub_name=HUB)
    done, state = threading.Event(), {"count": 0, "first": 0, "began": 0.0, "seconds": 0.0}

    def on_batch(context: Any, batch: list[Any]) -> None:
        """Count events; the time of the first batch is the start."""
        if not state["began"]:
            state["began"], state["first"] = time.perf_counter(), len(batch)
        state["count"] += len(batch)
        if state["count"] >= events and not done.is_set():
            state["seconds"] = (time.perf_counter() - state["began"]) * state["count"] / max(1, state["count"] - state["first"])
            done.set()

    options = {"partition_id": "0", "starting_position": "-1", "prefetch": PREFETCH, "max_batch_size": PREFETCH}
    thread = threading.Thread(target=client.receive_batch, args=(on_batch,), kwargs=options, daemon=True)
    thread.start()
    assert done.wait(600), f"{state['count']} of {events} events came"
    client.close()
    thread.join(30)
    return state["seconds"] * events / state["count"]
