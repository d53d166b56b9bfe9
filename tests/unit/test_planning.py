"""Property tests of the planning code: whatever is delivered in whatever batches, the effect is that of the deduplicated log."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import guards
from checkpoint.errors import BatchTooLarge, IncarnationChanged, KeyConflict, PositionGap, SettingsChanged, StoreRestored
from checkpoint.head import Checkpoint, Head, Run
from checkpoint.position import Partition, Ranges
from deadletter.letter import LETTERS
from deadletter.store import KEYS
from dedup.core import planning
from dedup.core.index import Index
from dedup.core.keys import LOG_TIME, key_bytes, key_words
from dedup.decode.prepare import Prepare
from dedup.pipeline import commit
from dedup.pipeline.batch import EvaluatedArrow
from dedup.pipeline.tx import Handler
from dedup.verify import verify
from simulation.log import TOPIC, Event, Log, prepared
from simulation.shared import NAME, Shared
from simulation.store import SimStore

LOG = [
    Event(p, n, key, undecodable)
    for p in (0, 1)
    for n, (key, undecodable) in enumerate([(1, False), (2, False), (1, False), (None, False), (3, True), (4, False)])
]
"""Keys repeat within and across partitions; one event has no key and one does not decode."""


def index_of(table: pa.Table) -> Index:
    """The index of prepared rows."""
    return commit.index_of(EvaluatedArrow(table))


def job(store: SimStore, handler: Handler) -> commit.Job:
    """What a consumer would make of these."""
    return commit.Job(NAME, store, commit.Policy(handler, {}, "dead_letter", 1000), Prepare(NAME), 1000)  # type: ignore[arg-type]


def deliver(store: SimStore, events: list[Event], batch_id: int, max_events: int, reject: int | None) -> None:
    """One batch through the real pipeline into a model store; rejects one key."""

    def handler(rows: pa.Table, tx: Any) -> None:
        rest = tx.reject(rows, pa.array([b == str(reject).encode() for b in rows["body"].to_pylist()]), "no")
        tx.write(rest.select(["body"]), "sink")

    evaluated, head = EvaluatedArrow(prepared(events)), store.head(NAME)
    index = commit.index_of(evaluated)
    run = Run("q", batch_id)
    guards.guard(head, run, {}, {p: first for p, (first, _) in index.spans.items()})
    for number, rows in enumerate(planning.chunks(index, max_events)):
        chunk = commit.Chunk(evaluated, index[rows], Run("q", batch_id, number), head)
        commit.commit_chunk(chunk, job(store, handler))


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(
    batches=st.lists(st.lists(st.sampled_from(LOG), max_size=8), max_size=8),
    max_events=st.sampled_from([1, 2, 100]),
    reject=st.sampled_from([None, 1, 4]),
    ledger=st.booleans(),
)
def test_any_delivery_has_the_effect_of_the_deduplicated_log(
    batches: list[list[Event]], max_events: int, reject: int | None, ledger: bool
) -> None:
    """Any interleaving of batches, replays, redeliveries and duplicates: each key once, each keyless event one letter, proven."""
    shared = Shared(Log(()))
    store = SimStore(shared, lambda _: None, ledger=ledger)
    for number, events in enumerate(batches):
        deliver(store, events, number, max_events, reject)
    delivered = {(e.partition, e.number): e for b in batches for e in b}
    keys = {e.key for e in delivered.values() if e.key is not None and not e.undecodable}
    assert sorted(int(r["body"]) for r in shared.sink) == sorted(keys - {reject})
    held = [int(x["body"]) for x in shared.letters.values() if x["holds_key"]]
    assert held == [reject] * (reject in keys)
    keyless = [e for e in delivered.values() if e.key is None or e.undecodable]
    assert len(shared.letters) - len(held) == len(keyless)
    report = verify(store, NAME)  # type: ignore[arg-type]
    assert report.ok, report.contradictions
    assert sum(len(p.seen) for p in report.partitions) == len(delivered)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=50))
def test_keys_survive_the_way_through_numbers(keys: list[bytes]) -> None:
    """Sixteen bytes, as two numbers and back, are the same bytes in the same order."""
    high, low = key_words(pa.chunked_array([pa.array(keys, pa.binary())]))
    assert key_bytes(high, low).to_pylist() == keys
    order = np.lexsort((low, high))
    assert [keys[i] for i in order] == sorted(keys)


POINT = Checkpoint(9, None, None, "old")
NAMELESS = Checkpoint(9, None, None, "")
PARTITION = Partition(*TOPIC, 0)
OTHER = Partition("another source", "topic", 0)


@pytest.mark.parametrize(
    ("head", "run", "first", "error"),
    [
        (Head(NAME), Run("q", 0, durable=True), 5, None),
        (Head(NAME), Run("q", 7, durable=True), 5, StoreRestored),
        (Head(NAME), Run("q", 7, durable=False), 5, None),
        (Head(NAME, gap_accepted=True), Run("q", 7, durable=True), 5, None),
        (Head(NAME, generation=1), Run("q", 7, durable=True), 5, StoreRestored),
        (Head(NAME, generation=1, keyspace=1), Run("q", 7, durable=True), 5, None),
        (Head(NAME, query_id="q", batch_id=6, checkpoints={PARTITION: POINT}), Run("q", 7, durable=True), 10, None),
        (Head(NAME, query_id="q", batch_id=5), Run("q", 7, durable=True), 10, StoreRestored),
        (Head(NAME, query_id="q", batch_id=6, batch_ended=False), Run("q", 7, durable=True), 10, StoreRestored),
        (Head(NAME, query_id="q", batch_id=6, batch_ended=False), Run("q", 6, durable=True), 10, None),
        (Head(NAME, query_id="q", batch_id=5), Run("q", 7, durable=False), 10, None),
        (Head(NAME, query_id="other", batch_id=5), Run("q", 7, durable=True), 10, None),  # no position is decided yet
        (Head(NAME, checkpoints={PARTITION: POINT}), Run("q", 0), 10, None),
        (Head(NAME, checkpoints={PARTITION: POINT}), Run("q", 0), 11, PositionGap),
        (Head(NAME, checkpoints={PARTITION: POINT}, gap_accepted=True), Run("q", 0), 11, None),
        (Head(NAME, checkpoints={PARTITION: POINT}), Run("old", 0), 99, None),
        (Head(NAME, settings={"key": "a"}), Run("q", 0), 0, SettingsChanged),
        # the query goes on, and the state, restored or not, has nothing of it: wherever its batch begins
        (Head(NAME, generation=1, checkpoints={OTHER: NAMELESS}), Run("old", 7, durable=True), 0, StoreRestored),
        (Head(NAME, query_id="new", batch_id=0, checkpoints={PARTITION: NAMELESS}), Run("old", 7, durable=True), 10, StoreRestored),
        (Head(NAME, query_id="new", batch_id=0, checkpoints={PARTITION: NAMELESS}), Run("old", 7), 10, None),
        (Head(NAME, query_id="old", batch_id=0, checkpoints={PARTITION: POINT}), Run("between", 1, durable=True), 9, StoreRestored),
        (Head(NAME, query_id="old", batch_id=0, checkpoints={PARTITION: POINT}), Run("between", 1, durable=True), 99, StoreRestored),
        (Head(NAME, query_id="old", batch_id=0, checkpoints={PARTITION: POINT}), Run("between", 0, durable=True), 9, None),
        (Head(NAME, query_id="between", batch_id=1, checkpoints={OTHER: POINT}), Run("between", 2, durable=True), 99, None),
        (Head(NAME, query_id="new", checkpoints={PARTITION: NAMELESS}, gap_accepted=True), Run("old", 7, durable=True), 11, None),
        (Head(NAME, query_id="new", batch_id=0, checkpoints={PARTITION: NAMELESS}), Run("newer", 0, durable=True), 10, None),
        (Head(NAME, query_id="new", batch_id=6, checkpoints={PARTITION: NAMELESS}), Run("new", 7, durable=True), 10, None),
        (Head(NAME, query_id="new", batch_id=0, checkpoints={OTHER: POINT}), Run("old", 7, durable=True), 1, None),
        (Head(NAME, generation=1, keyspace=1), Run("old", 7, durable=True), 1, None),
    ],
)
def test_the_guard_refuses_exactly_what_contradicts_the_state(head: Head, run: Run, first: int, error: type[Exception] | None) -> None:
    """Each guard at its boundary: one batch ahead is fine, two are a restored store; checkpoint + 1 is fine, + 2 a gap."""
    if error is None:
        guards.guard(head, run, head.settings or {}, {PARTITION: first})
    else:
        with pytest.raises(error):
            guards.guard(head, run, {"key": "b"}, {PARTITION: first}) if error is SettingsChanged else guards.guard(
                head, run, {}, {PARTITION: first}
            )


def test_chunks_keep_the_parts_of_a_position_together() -> None:
    """A chunk may be larger than asked for rather than split one event."""
    events = prepared([Event(0, 1, 1, False)] * 3 + [Event(0, 2, 2, False), Event(0, 3, 3, False)])
    table = events.set_column(events.column_names.index("part"), "part", pa.array([0, 1, 2, 0, 0], pa.int64()))
    assert planning.chunks(index_of(table), 2) == [slice(0, 3), slice(3, 5)]
    assert planning.chunks(index_of(table.slice(0, 0)), 2) == [slice(0, 0)]


def test_a_conflict_can_be_an_error() -> None:
    """on_key_conflict="error" names the position and decides nothing."""
    table = prepared([Event(0, 1, 1, False), Event(0, 2, 1, False)])
    table = table.set_column(table.column_names.index("_payload_hash"), "_payload_hash", pa.array([1, 2], pa.int64()))
    sifted = planning.sift(index_of(table), Head(NAME), {}, np.zeros(0, dtype=np.int64))
    with pytest.raises(KeyConflict, match="topic/0 2"):
        planning.settle(sifted, sifted.reserve.slice(0, 0), "error")


def test_a_purged_position_is_not_suspected() -> None:
    """At or below the floor a reservation may be gone: a redelivery without its key is no other incarnation."""
    table = prepared([Event(0, 1, 1, False), Event(0, 5, 2, False)])
    seen = {PARTITION: Ranges.of([(0, 9)])}
    head = Head(NAME, checkpoints={PARTITION: POINT}, floors={PARTITION: 1})
    sifted = planning.sift(index_of(table), head, seen, np.zeros(0, dtype=np.int64))
    rows = planning.suspects(sifted, sifted.reserve.slice(0, 0), compare_payload=True)
    assert rows.tolist() == [1]
    assert planning.unexplained(sifted.index, rows, LETTERS.empty_table(), head, set).tolist() == [1]
    with pytest.raises(IncarnationChanged, match="topic/0 5"):
        planning.check_redeliveries(sifted.index, rows, KEYS.empty_table(), head)


def test_a_key_that_was_let_go_explains_its_duplicates() -> None:
    """A duplicate decided before its key was freed is a redelivery still; with another payload it is another event."""
    index = index_of(prepared([Event(0, 5, 2, False)]))
    key = index.keys_of(np.array([0]))["key"]
    rows, head = np.array([0]), Head(NAME)
    planning.check_redeliveries(index, rows, pa.table([key, pa.array([2], pa.int64())], schema=KEYS), head)
    with pytest.raises(IncarnationChanged, match="topic/0 5"):
        planning.check_redeliveries(index, rows, pa.table([key, pa.array([3], pa.int64())], schema=KEYS), head)


@pytest.mark.parametrize(
    ("younger", "point_by_broker", "rows_by_broker"), [(False, True, True), (True, True, True), (True, False, True), (True, True, False)]
)
def test_below_a_purge_time_tells_a_recreated_topic(younger: bool, point_by_broker: bool, rows_by_broker: bool) -> None:
    """Where no key is left to compare, redeliveries younger than the checkpoint are another topic's events: refused, not dropped.

    By the broker's clock alone: times of producers (CreateTime) are in no order, and redeliveries stay redeliveries.
    """
    shared, point = Shared(Log(())), dt.datetime(2026, 1, 10, tzinfo=dt.UTC)
    store = SimStore(shared, lambda _: None, ledger=False)
    deliver(store, [Event(0, n, n, False) for n in range(5)], 0, 100, None)
    old = {PARTITION: replace(shared.head.checkpoints[PARTITION], enqueued_time=point, log_time=point_by_broker)}
    shared.head = replace(shared.head, checkpoints=old, floors={PARTITION: 4})
    shared.reserved.clear()
    again = prepared([Event(0, n, 90 + n, False) for n in range(3)])
    times = [point + dt.timedelta(days=1 if younger else -n) for n in range(3)]
    again = again.set_column(again.column_names.index("enqueued_time"), "enqueued_time", pa.array(times, pa.timestamp("us", tz="UTC")))
    again = again.append_column(LOG_TIME, pa.array([rows_by_broker] * 3))
    chunk = commit.Chunk(EvaluatedArrow(again), index_of(again), Run("q", 1), shared.head)
    if younger and point_by_broker and rows_by_broker:
        with pytest.raises(IncarnationChanged):
            commit.commit_chunk(chunk, job(store, lambda rows, tx: None))
    else:
        assert (commit.commit_chunk(chunk, job(store, lambda rows, tx: None)).state == planning.REDELIVERED).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("joined", [False, True])
def test_each_chunk_stands_on_those_before_it(joined: bool) -> None:
    """Driver, members and tasks share one loop: it assumes what is committed, knows earlier culprits, and asks for no part too early."""
    evaluated = EvaluatedArrow(prepared([Event(0, n, n, False) for n in range(5)]))
    culprits, seen = commit.Culprits({1: {0}}), list[commit.Chunk]()
    index = commit.index_of(evaluated)
    whole = replace(job(None, lambda rows, tx: None), max_events=2)  # type: ignore[arg-type]

    def decide(chunk: commit.Chunk) -> commit.DecidedChunk:
        seen.append(chunk)
        return commit.DecidedChunk(np.full(len(chunk.index), planning.NEW, dtype=np.int8))

    parts = commit.parts_of(whole, evaluated, index, {TOPIC: "life"})
    for number, done in enumerate(commit.committed(parts, Run("q", 0, joined=joined), Head(NAME), decide, culprits)):
        assert done.head.seq == len(seen) == number + 1
        assert done.head.checkpoints[PARTITION].sequence_number == seen[-1].index.numbers.max()
    assert [chunk.run.chunk for chunk in seen] == [0, 1, 2] and [chunk.run.ends for chunk in seen] == [joined, joined, True]
    assert [chunk.assumed.seq for chunk in seen] == [0, 1, 2] and [chunk.topic_ids for chunk in seen] == [{TOPIC: "life"}] * 3
    assert [chunk.culprits for chunk in seen] == [set(), {0}, set()] and seen[0].culprits is culprits[0]
    on_failure = replace(whole.policy.on_failure, bisect=False)
    with pytest.raises(BatchTooLarge, match="5 events"):
        next(commit.parts_of(replace(whole, policy=replace(whole.policy, on_failure=on_failure)), evaluated, index, {}))
