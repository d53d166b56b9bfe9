"""What a batch costs that has almost nothing in it: one event through a consumer, beside a foreachBatch that does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.events import Topic, land
from benchmarks.ours import consumer
from benchmarks.report import Measure, latency
from benchmarks.stream import Seconds, Sizes, Way, clocks, run_query


def compare(spark: Any, name: str, store: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Two queries over the same files take turns for some rounds; the first round and the first batch after each start do not count."""
    topic = Topic(duplicates=0.0)
    ways: Mapping[str, Way] = {"ours": consumer(store), "bare": lambda batch, batch_id: None}
    taken: Seconds = {way: [] for way in ways}
    with clocks(ways) as (ways, steps):
        for number in range(sizes.rounds):
            tables = [topic.batch(1)[:1] for _ in range(sizes.empty)]
            land(tables, folder / "topic", first=number * sizes.empty)
            for way, function in ways.items():
                seconds = run_query(spark, folder / "topic", function, folder / f"checkpoint-{way}", files=1)
                assert len(seconds) == sizes.empty, f"{way}: {len(seconds)} batches of {sizes.empty}"
                taken[way] += seconds[1:] if number else []
    counted = [n for n in range(sizes.empty, sizes.rounds * sizes.empty) if n % sizes.empty]
    taken |= {step: [values[n] for n in counted] for step, values in steps.items()}
    return [latency(f"{name}/empty_batch", taken["ours"], taken["bare"])], {f"{name}/empty_batch, {k}": v for k, v in taken.items()}
