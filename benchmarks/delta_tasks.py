"""Delta: handlers of events in Spark's tasks beside a plain append, and beside a bare `mapInArrow` that calls the same function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.delta import append, create_tables, store, verify
from benchmarks.events import ORDER, ORDER_DDL, Topic, decoded, land
from benchmarks.ours import SINK, bare_consumer
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes, Way, contest
from dedup import Consumer
from dedup.pipeline.handlers import Event

FOREACH, ARROW = "foreach", "foreach_arrow"


def compare(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Arrow tables and single events, beginning empty; beside an append, and single events beside their floor. Verified."""
    taken = _contest(spark, folder, Topic(), sizes.events, sizes.batches, sizes.warm, (ARROW, FOREACH))
    measures = [
        throughput("delta/foreach_arrow_vs_append_50k", taken[ARROW], taken["append"], sizes.events),
        throughput("delta/foreach_vs_floor", taken[FOREACH], taken["floor"], sizes.events),
    ]
    return measures, {f"delta/foreach, {name}": seconds for name, seconds in taken.items()}


def compare_large(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Arrow tables of ten times as many events beside an append, duplicates within partitions and across them; a third of the batches."""
    measures, all_taken = list[Measure](), Seconds()
    batches, warm = max(sizes.batches // 3, 2), max(sizes.warm // 3, 1)
    for name, topic in {"": Topic(), "_across": Topic(across=True)}.items():
        taken = _contest(spark, folder / f"topic{name}", topic, sizes.large, batches, warm, (ARROW,))
        measures.append(throughput(f"delta/foreach_arrow_vs_append{name}", taken[ARROW], taken["append"], sizes.large))
        all_taken |= {f"delta/foreach_arrow_vs_append{name}, {way}": seconds for way, seconds in taken.items()}
    return measures, all_taken


def _contest(spark: Any, folder: Path, topic: Topic, events: int, batches: int, warm: int, handlers: tuple[str, ...]) -> Seconds:
    land((topic.batch(events) for _ in range(batches)), folder / "topic")
    others = ("append", "floor") if FOREACH in handlers else ("append",)
    paths = {name: create_tables(folder / name, "other")["other"] for name in others}
    with ExitStack() as stack:
        ways: dict[str, Way] = {"append": append(paths["append"], txn=False)}
        if FOREACH in handlers:
            ways["floor"] = _floor(paths["floor"])
        for name in handlers:
            create_tables(folder / name)
            ways[name] = handling(stack.enter_context(closing(store(folder / name))), name, SINK)
        taken = contest(spark, folder / "topic", ways, warm)
    for name in handlers:
        verify(folder / name / SINK, topic.facts, once=True)
    for path in paths.values():
        verify(path, topic.facts, once=False)
    return taken


def handling(place: Any, kind: str, sink: str) -> Consumer:
    """A consumer whose handler of single events, or of Arrow tables, returns the rows of the sink."""
    made = bare_consumer(place)
    if kind == FOREACH:
        made.foreach(into=sink)(book)
    else:
        made.foreach_arrow(into=sink)(load)
    return made


def book(event: Event, tx: Any) -> Any:
    """The row of one event."""
    return event.data


def load(events: pa.Table, tx: Any) -> pa.Table:
    """The rows of a slice: the columns of the decoded bodies."""
    return pa.Table.from_struct_array(events["data"])


def called(batch: Any) -> Any:
    """What a function of single events returns by hand: it is called for each decoded row in tasks. Plain Spark decodes."""

    def call(row: dict[str, Any]) -> dict[str, Any]:
        """The row of one event, as `book` returns it."""
        return row

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows that the function returns, batch by batch."""
        for batch in batches:
            yield pa.RecordBatch.from_pylist([call(row) for row in batch.to_pylist()], ORDER)

    return decoded(batch).mapInArrow(each, ORDER_DDL)


def _floor(path: Path) -> Way:
    """The rows of `called`, appended."""

    def run(batch: Any, batch_id: int) -> None:
        """Decode, call the function, append."""
        called(batch).write.format("delta").mode("append").save(str(path))

    return run
