"""The handler's attempts: only the guilty fail, in few runs; what may pass is waited for; what kills the process is found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from py4j.protocol import Py4JError

from checkpoint.errors import BatchTooLarge, BudgetExceeded, CommitConflict, ConfigError, SinkMismatch, StoreUnavailable
from checkpoint.head import Head, Spent
from deadletter import outage
from deadletter.crashes import MAX_DEATHS, CrashMarker, untried
from deadletter.letter import Kind
from deadletter.policy import Budget, FailurePolicy, OwnPolicy, Retry
from dedup.core.envelope import ENVELOPE, POSITION
from dedup.core.index import Index
from dedup.core.planning import Order, Settled
from dedup.pipeline.attempts import Attempts, HandlerOutcome
from dedup.pipeline.batch import EvaluatedArrow
from dedup.pipeline.performance import EventsFailed

NO_BUDGET = OwnPolicy(budget=None)

FOUR_LATE = Head("c", spent={str(Kind.HANDLER_ERROR): Spent(decided=100, out_of_time=4)})
"""The last four events of the consumer ran out of time."""


class Effects:
    """Stands in for a transaction: keeps what passed, forgets what an attempt wrote that failed. The stores' own is tested with them."""

    def __init__(self, head: Head | None = None) -> None:
        self.head = head or Head("c")
        self.rows: list[int] = []

    @contextmanager
    def attempt(self) -> Iterator[None]:
        before = list(self.rows)
        try:
            yield
        except Exception:
            self.rows = before
            raise

    def write(self, table: str, rows: Any) -> int:
        self.rows += rows.arrow()["sequence_number"].to_pylist()
        return 0


def events(count: int) -> pa.Table:
    """Prepared events 0, 1, 2 ... of one partition."""
    numbers = np.arange(count)
    columns: dict[str, Any] = {f.name: pa.nulls(count, f.type) for f in ENVELOPE}
    columns |= {"source": ["s"] * count, "topic": ["t"] * count, "partition": pa.array([0] * count, pa.int32())}
    columns |= {"sequence_number": numbers, "part": np.zeros(count, dtype=np.int64)}
    keys = pa.array([int(n).to_bytes(16, "big") for n in numbers], pa.binary(16))
    columns |= {"_key": keys, "_key_text": [str(n) for n in numbers], "_payload_hash": numbers, "_undecodable": [False] * count}
    return pa.table(columns)


def attempts(
    count: int, handler: Callable[[list[int]], None], *, on_failure: OwnPolicy = NO_BUDGET, effects: Effects | None = None, **more: Any
) -> tuple[Attempts, Effects, list[int]]:
    """Attempts whose handler writes what it is given and then asks `handler`; and the sizes of its runs."""
    runs: list[int] = []
    effects = effects or Effects()

    def wrapped(rows: pa.Table, tx: Any) -> None:
        runs.append(rows.num_rows)
        tx.write(rows.select(["sequence_number"]), "sink")
        handler(rows["sequence_number"].to_pylist())

    evaluated = EvaluatedArrow(events(count))
    index = Index.of(evaluated.index, evaluated.payload_hashes)
    settled = Settled(index, np.zeros(count, dtype=np.int8), np.zeros(count, dtype=bool), count)
    order = more.pop("order", Order(None, count))
    crash_marker = more.pop("marker", untried())
    made = Attempts(evaluated, settled, order, effects, wrapped, on_failure, crash_marker, lambda _: None, **more)  # type: ignore[arg-type]
    return made, effects, runs


def raises_for(bad: set[int]) -> Callable[[list[int]], None]:
    """Fails where one of these is among the rows."""

    def handler(rows: list[int]) -> None:
        if bad & set(rows):
            raise ValueError("bad")

    return handler


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_single_bad_events_are_found_in_few_runs(case: tuple[int, set[int]]) -> None:
    """At most 2k ceil(log2 n) + 1 runs for k bad events of n; exactly these fail, each other one has its effect once."""
    count, bad = case
    made, effects, runs = attempts(count, raises_for(bad))
    outcome = made.run()
    assert set(outcome.failed) == bad
    assert sorted(effects.rows) == sorted(set(range(count)) - bad)
    assert len(runs) <= max(2 * len(bad) * math.ceil(math.log2(count)), 0) + 1 or (count == 1 and len(runs) == 1)
    assert len(runs) <= 2 * count - 1


@pytest.mark.parametrize("error", [ValueError("chunks"), TimeoutError("slow")], ids=str)
def test_a_frame_that_cannot_be_made_is_no_events_fault(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The error goes through as it is, at the first try: the handler was not even asked."""
    made, _, runs = attempts(4, lambda rows: None)

    def fail(batch: EvaluatedArrow, rows: Any) -> pa.Table:
        raise error

    monkeypatch.setattr(EvaluatedArrow, "frame", fail)
    with pytest.raises(type(error), match=str(error)):
        made.run()
    assert not runs and not made.outcome.failed


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(st.integers(2, 40), st.sets(st.frozensets(st.integers(0, 39), min_size=2, max_size=3), max_size=4))
def test_failures_of_combinations_end(count: int, together: set[frozenset[int]]) -> None:
    """A handler that fails only where certain events meet ends within 2n - 1 runs, and loses nothing."""

    def handler(rows: list[int]) -> None:
        if any(group <= set(rows) for group in together):
            raise ValueError("together")

    made, effects, runs = attempts(count, handler)
    outcome = made.run()
    assert len(runs) <= 2 * count - 1
    assert sorted([*effects.rows, *outcome.failed]) == list(range(count))


def test_a_transient_error_is_waited_for() -> None:
    """It passes at the third time: three runs of the whole, nothing fails; the waits grow within their bounds."""
    waits: list[float] = []
    left = [2]

    def handler(rows: list[int]) -> None:
        if left[0]:
            left[0] -= 1
            raise TimeoutError("slow")

    made, effects, runs = attempts(10, handler, on_failure=OwnPolicy(Retry(), None, sleep=waits.append))
    assert not made.run().failed
    assert runs == [10, 10, 10] and len(waits) == 2
    assert sorted(effects.rows) == list(range(10))


def test_an_event_that_always_times_out_is_parked_with_its_attempts() -> None:
    """Each try of the event alone is kept; the others pass."""

    def handler(rows: list[int]) -> None:
        if 3 in rows:
            raise TimeoutError("slow")

    made, effects, _ = attempts(8, handler, on_failure=OwnPolicy(Retry(attempts=3), None, sleep=lambda _: None))
    outcome = made.run()
    assert set(outcome.failed) == {3} and len(outcome.failed[3]) == 3
    assert sorted(effects.rows) == [0, 1, 2, 4, 5, 6, 7]


def test_a_service_that_stays_away_parks_nothing() -> None:
    """A connection error that outlasts its retries is an outage, from the first event on; the batch is tried again as a whole."""

    def handler(rows: list[int]) -> None:
        raise ConnectionRefusedError("no answer")

    made, effects, runs = attempts(8, handler, on_failure=OwnPolicy(Retry(attempts=3), None, sleep=lambda _: None))
    with pytest.raises(ConnectionRefusedError):
        made.run()
    assert runs == [8, 8, 8] and effects.rows == []


@pytest.mark.parametrize("error", [SinkMismatch("no such column"), StoreUnavailable("gone"), MemoryError()])
def test_what_is_everybodys_fault_parks_nothing(error: BaseException) -> None:
    """It ends the batch as it is, after the first run."""

    def handler(rows: list[int]) -> None:
        raise error

    made, effects, runs = attempts(8, handler, on_failure=OwnPolicy(Retry(attempts=1), None))
    with pytest.raises(type(error)):
        made.run()
    assert runs == [8] and effects.rows == []


def test_sys_exit_is_the_events_own_failure() -> None:
    """SystemExit parks the event and does not end the process; KeyboardInterrupt stops."""

    def leaves(rows: list[int]) -> None:
        if 2 in rows:
            raise SystemExit(3)

    made, _, _ = attempts(4, leaves)
    assert made.run().failed[2][0].error_type.endswith("SystemExit")

    def interrupts(rows: list[int]) -> None:
        raise KeyboardInterrupt

    made, _, _ = attempts(4, interrupts)
    with pytest.raises(KeyboardInterrupt):
        made.run()


def test_the_budget_cuts_the_search_short() -> None:
    """A bug that fails everything ends after a few runs more than the budget allows, not after two per event."""
    head = Head("c", spent={Kind.HANDLER_ERROR: Spent(1000)})
    made, _, runs = attempts(1000, raises_for(set(range(1000))), on_failure=OwnPolicy(budget=Budget()), effects=Effects(head))
    with pytest.raises(BudgetExceeded, match="budget lift c --kind HANDLER_ERROR"):
        made.run()
    assert len(runs) < 150


def test_known_culprits_are_tried_alone_at_once() -> None:
    """A chunk that has to be planned again does not search once more: each culprit alone, what stands between them together."""
    culprits: set[int] = set()
    attempts(64, raises_for({5, 40}), culprits=culprits)[0].run()
    assert culprits == {5, 40}
    made, _, runs = attempts(64, raises_for({5, 40}), culprits=culprits)
    assert set(made.run().failed) == {5, 40} and runs == [5, 1, 34, 1, 23]


def test_events_that_a_handler_names_cost_one_run_more_however_often_a_chunk_is_planned() -> None:
    """A handler of single events says which of them failed: after a conflict they are not tried one by one, nor what stands between."""

    def names(numbers: list[int]) -> None:
        if bad := sorted({5, 40} & set(numbers)):
            raise EventsFailed(events(64).select(list(POSITION)).take(pa.array(bad)), [ValueError("bad")] * len(bad))

    culprits: set[int] = set()
    for _ in range(2):
        made, _, runs = attempts(64, names, culprits=culprits)
        assert set(made.run().failed) == {5, 40} and runs == [64, 62]


def test_who_dies_after_the_handler_has_ended_is_not_blamed_on_an_event() -> None:
    """Process after process dies at the commit: no event is taken for one that kills, although its handler was what was marked last."""
    kept: list[str | None] = [None]
    for _ in range(2 * MAX_DEATHS):
        crash_marker = CrashMarker(lambda: kept[-1], kept.append)
        crash_marker.begin("chunk")
        made, effects, _ = attempts(1, raises_for(set()), marker=crash_marker)
        assert made.run().failed == {} and effects.rows == [0]


def test_a_known_culprit_that_passes_now_takes_effect_in_its_place() -> None:
    """What it writes comes before what later events write, as if it had never failed."""
    made, effects, runs = attempts(8, raises_for(set()), culprits={2, 3, 7})
    assert made.run().failed == {} and effects.rows == list(range(8)) and runs == [2, 1, 1, 3, 1]


class Killed(KeyboardInterrupt):
    """The process died."""


def test_an_event_that_kills_is_found_and_parked() -> None:
    """After three deaths parts are tried, each marked before; the killer is parked as CRASHED unrun, the rest has its effect."""
    marker: list[str | None] = [None]
    outcome: HandlerOutcome | None = None
    lives = 0

    def deadly(rows: list[int]) -> None:
        if 11 in rows:
            raise Killed

    while outcome is None and lives < 20:
        lives += 1
        crash_marker = CrashMarker(lambda: marker[0], lambda text: marker.__setitem__(0, text))
        crash_marker.begin("chunk")
        crash_marker.survived = lambda: None  # type: ignore[method-assign]  # a killed process does not get to say so
        made, effects, _ = attempts(16, deadly, marker=crash_marker)
        try:
            outcome = made.run()
        except Killed:
            continue
    assert outcome is not None and lives == MAX_DEATHS + math.ceil(math.log2(16)) + 1
    assert set(outcome.failed) == {11} and outcome.failed[11][-1].kind == Kind.CRASHED
    assert sorted(effects.rows) == [n for n in range(16) if n != 11]


def test_a_process_that_survives_counts_no_death() -> None:
    """A batch that failed by an exception, and one of other rows, begin without suspicion."""
    kept: list[str | None] = [None]
    for chunk, deaths in (("a", 0), ("a", 1), ("b", 0)):
        crash_marker = CrashMarker(lambda: kept[0], lambda text: kept.__setitem__(0, text))
        crash_marker.begin(chunk)
        assert crash_marker.deaths == deaths
        crash_marker.mark(np.array([0, 1]))
    crash_marker.survived()
    assert json.loads(kept[0] or "")["running"] is None
    crash_marker = CrashMarker(lambda: kept[0], lambda text: kept.__setitem__(0, text))
    crash_marker.begin("b")
    assert crash_marker.deaths == 0


def test_rows_behind_a_failed_one_of_their_sequence_wait() -> None:
    """Within a chunk nothing overtakes: what stands behind is not handed to the handler any more."""
    sequence = pa.array([bytes([n % 2]) * 16 for n in range(10)], pa.binary(16))
    made, effects, _ = attempts(10, raises_for({4}), order=Order(sequence, 10))
    outcome = made.run()
    assert set(outcome.failed) == {4} and outcome.waiting == {6, 8}
    assert sorted(effects.rows) == [0, 1, 2, 3, 5, 7, 9]


def test_a_run_that_is_undone_at_its_end_blocks_no_sequence() -> None:
    """A deferred constraint fails after the handler has rejected an event, and rejects it no more: what stands behind it is processed."""
    runs: list[int] = []

    class Deferred(Effects):
        @contextmanager
        def attempt(self) -> Iterator[None]:
            with super().attempt():
                yield
                if runs == [6, 3]:
                    raise ValueError("deferred")

    def handler(rows: pa.Table, tx: Any) -> None:
        runs.append(rows.num_rows)
        rejected = pa.array([number == 2 and runs == [6, 3] for number in rows["sequence_number"].to_pylist()])
        tx.write(tx.reject(rows, rejected, "no").select(["sequence_number"]), "sink")
        if runs == [6]:
            raise ValueError("not all of them together")

    order = Order(pa.array([bytes([number]) * 16 for number in (0, 1, 2, 3, 4, 2)], pa.binary(16)), 6)
    made, effects, _ = attempts(6, raises_for(set()), order=order, effects=Deferred())
    made.handler = handler
    assert made.run() == HandlerOutcome() and effects.rows == [0, 1, 2, 3, 4, 5]


def test_time_outs_that_are_tried_once_more_use_no_budget_yet() -> None:
    """Two short outages hit more events than may fail: they are tried once more before the budget is judged, and pass."""
    late, culprits = {3, 4, 8, 9}, set[int]()

    def handler(rows: list[int]) -> None:
        if late & set(rows):
            raise TimeoutError("slow")

    policy = OwnPolicy(Retry(attempts=1), Budget(handler_error=((10, 0.2),)), sleep=lambda _: None)
    for over in ({3, 4}, {8, 9}):
        made, effects, _ = attempts(12, handler, on_failure=policy, culprits=culprits)
        with pytest.raises(outage.TriedOnceMore, match="2 events ran out of time"):
            made.run()
        late -= over
    made, effects, _ = attempts(12, handler, on_failure=policy, culprits=culprits)
    assert made.run().failed == {} and sorted(effects.rows) == list(range(12))


def one_sequence(count: int) -> Order:
    """Each event stands behind the one before it."""
    return Order(pa.array([bytes(16)] * count, pa.binary(16)), count)


def test_an_event_that_waits_behind_a_bad_one_ends_no_row_of_time_outs() -> None:
    """Of a chunk whose only event that does not wait fails nothing has passed: the time-outs before it count on."""

    def handler(rows: list[int]) -> None:
        raise EventsFailed(events(1).select(list(POSITION)), [ValueError("bad")])

    made, effects, _ = attempts(2, handler, order=one_sequence(2), effects=Effects(FOUR_LATE))
    outcome = made.run()
    assert (set(outcome.failed), outcome.waiting, effects.rows) == ({0}, {1}, [])
    assert (made.used[Kind.HANDLER_ERROR].out_of_time, made.used[Kind.HANDLER_ERROR].passed) == (0, False)


@pytest.mark.parametrize("late", [False, True], ids=["only rejected", "then a time-out"])
def test_an_event_that_is_rejected_ends_a_row_of_time_outs(late: bool) -> None:
    """A rejection is the answer of a handler that works, also one that stands while what waits behind it is undone."""

    def handler(rows: pa.Table, tx: Any) -> None:
        given = rows["sequence_number"].to_pylist()
        if 0 not in given and late:
            raise TimeoutError("slow")
        tx.reject(rows, pa.array([number == 0 for number in given]), "no")

    order = Order(pa.array([bytes(16), bytes(16), b"\1" * 16], pa.binary(16)), 3)
    policy = OwnPolicy(Retry(attempts=1), Budget(), sleep=lambda _: None)
    made, _, _ = attempts(3, lambda rows: None, order=order, on_failure=policy, effects=Effects(FOUR_LATE))
    made.handler = handler
    outcome = made.run()
    assert (outcome.rejected, outcome.waiting, set(outcome.failed)) == ({0: "no"}, {1}, {2} if late else set())
    assert (made.used[Kind.HANDLER_ERROR].out_of_time, made.used[Kind.HANDLER_ERROR].passed) == (int(late), True)


def test_a_rejection_that_stands_is_not_tried_again() -> None:
    """Rejected with its followers undone, then a transient error: the retry does not run the rejected row, however it would answer now."""
    given: list[list[int]] = []

    def handler(rows: pa.Table, tx: Any) -> None:
        given.append(rows["sequence_number"].to_pylist())
        if len(given) == 2:
            raise TimeoutError("slow")
        tx.write(tx.reject(rows, pa.array([n == 0 and len(given) == 1 for n in given[-1]]), "no").select(["sequence_number"]), "sink")

    order = Order(pa.array([bytes([n % 2]) * 16 for n in range(4)], pa.binary(16)), 4)
    made, effects, _ = attempts(4, raises_for(set()), order=order, on_failure=OwnPolicy(Retry(), None, sleep=lambda _: None))
    made.handler = handler
    outcome = made.run()
    assert given == [[0, 1, 2, 3], [1, 3], [1, 3]]
    assert outcome.rejected == {0: "no"} and outcome.waiting == {2} and effects.rows == [1, 3]


def test_an_error_of_the_store_is_not_tried_again_inside_its_transaction() -> None:
    """The transaction is at an end: it is for the pipeline to begin a new one."""
    made, _, runs = attempts(4, raises_for(set()), on_failure=OwnPolicy(Retry(attempts=5), None, sleep=lambda _: None))

    def conflicts(rows: pa.Table, tx: Any) -> None:
        runs.append(rows.num_rows)
        raise CommitConflict("deadlock")

    made.handler = conflicts
    with pytest.raises(CommitConflict):
        made.run()
    assert runs == [4]


def test_without_bisect_the_batch_fails() -> None:
    """A handler that aggregates is not run on parts."""
    made, effects, runs = attempts(8, raises_for({1}), on_failure=replace(NO_BUDGET, bisect=False))
    with pytest.raises(ValueError, match="bad"):
        made.run()
    assert runs == [8] and effects.rows == []


def test_a_handler_that_takes_other_arguments_is_refused_at_once() -> None:
    """Else each event would fail by itself; and a store that is a URL is told apart, too."""
    from dedup import Consumer, DeltaStore

    consumer = Consumer("c", DeltaStore("/nonexistent"))
    with pytest.raises(ConfigError, match="two arguments"):
        consumer.foreach_batch(lambda rows: None)  # type: ignore[arg-type,misc]
    with pytest.raises(ConfigError, match="two arguments"):
        consumer.foreach(into="t")(lambda: None)  # type: ignore[arg-type,misc]
    with pytest.raises(ConfigError, match="DeltaStore"):
        Consumer("c", "/lake")  # type: ignore[arg-type]


def test_what_spark_cannot_plan_is_not_waited_for() -> None:
    """A wrong column of the handler ends the batch with Spark's sentence; an outage is waited for."""
    from pyspark.errors import AnalysisException

    from deadletter.outage import may_pass

    assert not may_pass(AnalysisException("no such column"), NO_BUDGET)
    assert may_pass(ConnectionRefusedError("no answer"), NO_BUDGET)
    assert may_pass(OSError(28, "disk full"), NO_BUDGET)
    assert not may_pass(ValueError("bad"), NO_BUDGET)


@pytest.mark.parametrize(("answers", "gone"), [(2, True), (10_000, False)])
def test_a_spark_that_stops_ran_out_of_memory_only_if_its_jvm_ends(monkeypatch: pytest.MonkeyPatch, answers: int, gone: bool) -> None:
    """A JVM without memory stops Spark before it ends, and says so meanwhile; where somebody stopped Spark, the JVM goes on."""

    class FromTheJvm(Py4JError):
        def __str__(self) -> str:
            nonlocal answers
            answers -= 1
            if answers < 0:
                raise ConnectionRefusedError
            return "Job 0 cancelled because SparkContext was shut down"

    monkeypatch.setattr(outage, "ENDING_SECONDS", 0.3)
    with pytest.raises(BatchTooLarge if gone else FromTheJvm) as told, outage.naming_limits("shop batch 7"):
        raise FromTheJvm
    assert not gone or ("has ended" in str(told.value) and "spark.driver.memory" in str(told.value))


def test_an_error_that_stays_is_told_once_and_then_by_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten minutes over the budget are one line with the error and at most one short line a minute; another error is told in full."""
    now = [0.0]
    monkeypatch.setattr("tenacity.time.monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def fail() -> None:
        now[0] += 1.0
        raise BudgetExceeded(f"too many fail, {now[0]:.0f}") if now[0] < 400 else StoreUnavailable("no database")

    policy = replace(OwnPolicy.of(FailurePolicy(), ("shop", "here")), sleep=sleep)
    with pytest.raises(StoreUnavailable), caplog.at_level("WARNING", "dedup"):
        outage.retrying("shop batch 7", 600.0, policy)(fail)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("shop batch 7: nothing was committed; trying again in") and "s more" in said[0]
    assert sum("too many fail" in line for line in said) == sum("no database" in line for line in said) == 1
    still = [line for line in said if "still" in line]
    assert len(said) == len(still) + 2 and 4 <= len(still) <= 10
    left = [int(line.rpartition("giving up in ")[2].removesuffix(" s")) for line in still]
    assert left == sorted(left, reverse=True) and left[-1] < 100
