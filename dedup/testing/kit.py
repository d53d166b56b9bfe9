"""The crash kit runs a job over clean rows, then through the faults of streaming, and compares the effects.

The faults are replays, redeliveries, duplicates of producers, partitions in another order, other batches, bad events, and deaths at each
step of the store and each line of the user's function. The same seed tries the same. A `Job` says how to run a batch and how to read its
effect; it must live through a death as Spark's driver would. Stores and sinks are the user's. A `Verdict` says which promise is broken, and
how the kit saw it. Tests of users call this module.
"""

from __future__ import annotations

import copy
import datetime as dt
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deadletter.selection import Selection
from dedup.consumer import Consumer
from dedup.core.rows import for_spark
from dedup.pipeline.handlers import EachEvent, EachSlice, Event, Where
from dedup.pipeline.tx import Tx
from dedup.testing.delivery import Faults, events, plan, table_of
from dedup.testing.dying import AFTERWARDS, Death, Died, file_of, standing, watched
from dedup.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator


LATER = dt.timedelta(days=400, hours=7, seconds=3)
"""How far the clock is moved: another year, month, day, hour and second."""

CLEAN = Faults(duplicated=0, unused=0, rebalanced=0)

NOW = dt.datetime(2024, 2, 28, 23, 59, 59, tzinfo=dt.UTC)
"""What the user's function takes for now."""

DAMAGED, MOST_DAMAGED = 0.1, 50
"""Share of the events that are damaged, and about how many at most: the default budget of a Consumer admits so many, however many rows
there are."""

LETTERS = "dead letters"
"""The name under which an effect has the letters of a consumer."""

Row = tuple[tuple[str, str], ...]
"""Column names and values as text, by name."""

Effect = dict[str, Counter[Row]]
"""Sink -> its rows, each with how often it is there."""

CLOCK = "the result depends on the clock"
CHANCE = "the result depends on chance, or on something else than the events"
PART = "the result changes where a batch is split"
ORDER = "the result depends on the order between partitions"
INPUT = "it changes its input"
TWICE = "it fails when it sees a key twice"
DOUBLED = "it writes again what is delivered again"
LOST = "it loses what is delivered again"
OUTSIDE = "it writes outside tx: the effect of a failed attempt stays"
STAYS = "the effect of a failed attempt stays"
DEATH = "it cannot go on after a crash"
POISON = "a bad event stops the others"
CLEAN_INPUT = "it fails on the clean rows"
BOOKS = "`dedup verify` finds a contradiction"

ADVICE = {
    CLOCK: "Take times from the event (enqueued_time), or let the sink fill them in.",
    CHANCE: "Derive ids from the event (its key, its position); read nothing that changes between two runs.",
    PART: "Batches are cut differently after a restart, and a failing one is halved. Write what each event means alone, or merge by key.",
    ORDER: "Put what belongs together into one partition, or merge with newer_by=.",
    INPUT: "Copy before you change: the same rows may be given again.",
    TWICE: "Use an insert that takes a known key for done, or let a Consumer drop what it has seen.",
    DOUBLED: "Write by key (merge, upsert), or let a Consumer drop what it has seen.",
    LOST: "Do not remember outside the sink's own transaction what is done.",
    OUTSIDE: "Write through tx, or hand the idempotence key to the other side.",
    STAYS: "Make it one transaction, or one that can be repeated.",
    DEATH: "What is written before the death must not be in the way of what is written again.",
    POISON: "Set the bad event aside (tx.reject, or raise in a Consumer's handler) and go on.",
    CLEAN_INPUT: "Nothing else was tried.",
    BOOKS: "This is no fault of the handler: please report it.",
}


@dataclass(frozen=True)
class Job:
    """The job under test, at an empty place."""

    run: Callable[[Any, int], Any]
    """A Consumer, or any function that foreachBatch takes: (frame, batch id)."""
    read: Callable[[], Mapping[str, Any]]
    """Everything that it has written, wherever to: name -> Arrow table, DataFrame or list of dicts."""


Make = Callable[[Path], Job]
"""Makes the job at an empty place: a new folder, whose name no other one has (good for a schema or a table name)."""


@dataclass(frozen=True)
class Schedule:
    """The batches of one run, and the faults on the way."""

    name: str
    batches: list[pa.Table]
    death: Death | None = None
    dies_in: int = 0  # batch
    twice: bool = False  # each batch is given again, to a new process
    now: dt.datetime = NOW


@dataclass
class Played:
    """The outcome of one schedule."""

    effect: Effect = field(default_factory=dict)
    raised: Exception | None = None
    after_death: bool = False  # it raised when the batch was given again
    stayed: list[str] = field(default_factory=list)  # in words: what a dead batch left visible
    wrong: list[str] = field(default_factory=list)  # contradictions in the tables
    changed_input: bool = False


def check(
    make: Make,
    rows: Any,
    *,
    seed: int = 0,
    batches: int = 3,
    frame: Callable[[pa.Table], Any] | None = None,
    as_events: bool | None = None,
    folder: Path | None = None,
    skip: Iterable[str] = (),
) -> Verdict:
    """Run the job through all schedules, and report which promise it breaks.

    Args:
        make: makes the job at a new, empty place. It is called once for each schedule.
        rows: clean rows, each of which is one event: Arrow table, DataFrame or list of dicts. A few dozen are enough. A column `body`
            is the event's body; without it, the body is the row as JSON.
        frame: makes the job's batch of an Arrow table, such as `spark.createDataFrame` or `pa.Table.to_pandas`. Default: the table.
        as_events: put the rows into the envelope. Default: yes for a Consumer, no for another function.
        folder: where the places are made. Default: a temporary folder, which is removed afterwards.
        skip: promises (of dedup.testing) that the job does not make.

    Returns:
        The verdict. Its `require()` raises AssertionError if a promise is broken.
    """
    with tempfile.TemporaryDirectory(prefix="crash-kit-") as temporary:
        kit = _Kit(make, table_of(rows), seed, batches, frame or (lambda table: table), as_events, folder or Path(temporary))
        kit.run()
    skipped = set(skip)
    kit.verdict.findings = [finding for finding in kit.verdict.findings if finding.promise not in skipped]
    return kit.verdict


class _Kit:
    def __init__(
        self, make: Make, rows: pa.Table, seed: int, batches: int, frame: Callable[[pa.Table], Any], as_events: bool | None, folder: Path
    ) -> None:
        self._make, self._rows, self._seed, self._count = make, rows, seed, batches
        self._frame, self._as_events, self._folder = frame, as_events, folder
        self._unstable: dict[str, set[str]] = {}
        self._places = 0
        self.verdict = Verdict()

    # Playing

    def _life(self) -> Life:
        self._places += 1
        place = self._folder / f"place_{self._seed}_{self._places}"
        place.mkdir(parents=True)
        job = self._make(place)
        if self._as_events is None:
            self._as_events = isinstance(job.run, Consumer)
        return Life(job)

    def _play(self, schedule: Schedule) -> Played:
        self.verdict.tried.append(schedule.name)
        life, played = self._life(), Played()
        try:
            for number, batch in enumerate(schedule.batches):
                self._batch(life, played, schedule, number, batch)
        except Exception as error:  # noqa: BLE001  whatever the user's function raises is what is to be told
            played.raised = error
        played.effect = without(life.effect(), self._unstable)
        played.wrong, played.changed_input = life.contradictions(), life.changed_input
        life.close()
        return played

    def _batch(self, life: Life, played: Played, schedule: Schedule, number: int, batch: pa.Table) -> None:
        dies = schedule.death is not None and number == schedule.dies_in
        before = life.effect() if dies else {}
        try:
            life.batch(self._frame(for_spark(batch)), number, schedule.death if dies else None, schedule.now)
        except Died:
            life.restart()
            if _undecided(life, schedule.death):
                played.stayed += _visible(before, life.effect())
            played.after_death = True
            life.batch(self._frame(for_spark(batch)), number, None, schedule.now)
            played.after_death = False
        if schedule.twice:
            life.restart()
            life.batch(self._frame(for_spark(batch)), number, None, schedule.now)

    def _delivered(self, faults: Faults, batches: int | None = None, seed: int = 0) -> list[pa.Table]:
        planned = plan(self._rows.num_rows, self._seed, batches or self._count, faults, pace=seed)
        return planned.batches(self._envelope(planned.topic))

    def _envelope(self, topic: pa.Table) -> pa.Table:
        made = events(topic, self._rows) if self._as_events else self._rows.take(topic["row"])
        damaged = topic["damage"].to_numpy() > 0
        return _damage(made, damaged) if damaged.any() else made

    # Schedules

    def run(self) -> None:
        """All of them, the simple ones first: what a run over clean rows gives is what the others are compared with."""
        life = self._life()  # also says whether it is a consumer
        life.close()
        clean = self._delivered(CLEAN)
        base = self._play(Schedule("clean", clean))
        if base.raised:
            self.verdict.add(CLEAN_INPUT, f"{type(base.raised).__name__}: {base.raised}")
            return
        if base.changed_input:
            self.verdict.add(INPUT, "the rows it was given were others after a batch")
        base.effect = self._find_unstable(clean, base.effect)
        for schedule, promises in self._others(clean):
            # what depends on how batches are cut, or on the order, does so there as well: one broken promise is told once
            if {PART, ORDER} & self.verdict.broken - {promises[0]} and schedule.batches is not clean:
                continue
            self._compare(schedule, base.effect, self._play(schedule), *promises)
        for death in self._deaths(clean):
            schedule = Schedule(f"dies {death}", clean, death, dies_in=len(clean) // 2)
            self._compare(schedule, base.effect, self._play(schedule), DEATH, DEATH, DOUBLED)
        self._poison()

    def _find_unstable(self, clean: list[pa.Table], base: Effect) -> Effect:
        again = self._play(Schedule("the same again", clean)).effect
        later = self._play(Schedule("the same, another day", clean, now=NOW + LATER)).effect
        chance, clock = unstable(base, again), unstable(again, later)
        for sink, columns in sorted(chance.items()):
            self.verdict.add(CHANCE, f"run again over the same events, {sink} had other rows{_in(columns)}")
        for sink, columns in sorted(clock.items()):
            if columns - chance.get(sink, set()):
                self.verdict.add(CLOCK, f"run again on another day, {sink} had other rows{_in(columns)}")
        self._unstable = {sink: chance.get(sink, set()) | clock.get(sink, set()) for sink in {*chance, *clock}}
        return without(base, self._unstable)

    def _others(self, clean: list[pa.Table]) -> list[tuple[Schedule, tuple[str, str, str]]]:
        """Schedule, and the promises that are broken where it raises, loses, doubles."""
        other = Faults(0, 0, 0, 0, lagging=True)
        seen_twice = (TWICE, LOST, DOUBLED)
        return [
            (Schedule("all in one batch", self._delivered(CLEAN, 1)), (PART,) * 3),
            (Schedule("many small batches", self._delivered(CLEAN, max(4, 3 * self._count))), (PART,) * 3),
            *((Schedule(f"partitions in another order ({n})", self._delivered(other, seed=n)), (ORDER,) * 3) for n in range(3)),
            (Schedule("each batch again", clean, twice=True), seen_twice),
            (Schedule("partitions that go back", self._delivered(Faults(0, 0, 0.01, 1.0))), seen_twice),
            (Schedule("producers that send again", self._delivered(Faults(0.3, 5.0, 0.01, 0.5))), seen_twice),
        ]

    def _deaths(self, clean: list[pa.Table]) -> list[Death]:
        """After the batch, at each line of the user's function, and at each step that the store takes."""
        steps: dict[str, None] = {}
        visits: Counter[int] = Counter()
        life = self._life()
        file = file_of(life.function)
        for number, batch in enumerate(clean):
            dying = number == len(clean) // 2
            with life.told(lambda name: steps.setdefault(name), (lambda line: visits.update([line])) if dying else None):
                life.batch(self._frame(for_spark(batch)), number)
        life.close()
        at_lines = (
            [Death(line=(file, line), visit=n) for line, times in visits.items() for n in sorted({1, times // 2 + 1})] if file else []
        )
        return [AFTERWARDS, *at_lines, *(Death(step=name) for name in steps)]

    def _compare(self, schedule: Schedule, expected: Effect, played: Played, raises: str, loses: str, doubles: str) -> None:
        lost, doubled = ([], []) if played.raised else differences(expected, played.effect)
        if self._as_events or played.raised or lost or doubled:  # what a plain function leaves and then overwrites is no harm
            for told in played.stayed:
                self.verdict.add(OUTSIDE if self._as_events else STAYS, f"{schedule.name}: {told}")
        if played.raised:
            self.verdict.add(raises, f"{schedule.name}: {type(played.raised).__name__}: {str(played.raised)[:300]}")
            return
        for told in lost:
            self.verdict.add(loses, f"{schedule.name}: {told}")
        for told in doubled:
            self.verdict.add(doubles, f"{schedule.name}: {told}")
        for told in played.wrong:
            self.verdict.add(BOOKS, f"{schedule.name}: {told}")

    def _poison(self) -> None:
        """Bad events among good ones: what becomes of the good ones is what they become without the bad."""
        share = min(DAMAGED, MOST_DAMAGED / max(1, self._rows.num_rows))
        planned = plan(self._rows.num_rows, self._seed, self._count, Faults(0, 0, 0, 0, damaged=(share,)))
        damaged = planned.topic["damage"].to_numpy() > 0
        if not damaged.any():
            return
        made = self._envelope(planned.topic)
        flagged = planned.batches(made.append_column("_damaged", pa.array(damaged)))
        sound = [b.filter(pc.invert(b["_damaged"])).drop_columns("_damaged") for b in flagged]
        good = self._play(Schedule("without the bad events", sound))
        played = self._play(Schedule("bad events among them", [b.drop_columns("_damaged") for b in flagged]))
        lost, _ = differences(good.effect, played.effect)
        if played.raised:
            self.verdict.add(POISON, f"{type(played.raised).__name__}: {str(played.raised)[:300]}")
        elif lost:
            self.verdict.add(POISON, lost[0])


def _in(columns: set[str]) -> str:
    return f": other values of {', '.join(sorted(columns))}" if columns else ""


def _undecided(life: Life, death: Death | None) -> bool:
    """Whether nothing of the batch may be visible yet."""
    if death is None or death == AFTERWARDS:
        return False
    if life.consumer is None or death.step is None:
        return True
    names = list(life.consumer.store.steps)
    return names.index(death.step) <= names.index("decide" if "decide" in names else "commit")


def _visible(before: Effect, after: Effect) -> list[str]:
    lost, more = differences(before, after)
    return lost + more


def _damage(rows: pa.Table, damaged: Any) -> pa.Table:
    """Bodies that nobody can read; where there are none, rows of nulls."""
    mask = pa.array(np.asarray(damaged))
    if "body" in rows.column_names:
        broken = pc.binary_join_element_wise(pa.scalar(b"\xff\xfe"), rows["body"], pa.scalar(b""))
        return rows.set_column(rows.column_names.index("body"), "body", pc.if_else(mask, broken, rows["body"]))
    return pa.table({name: pc.if_else(mask, pa.scalar(None, rows[name].type), rows[name]) for name in rows.column_names})


class Life:
    """A job from its first batch to its last, with a restart after each death."""

    def __init__(self, job: Job) -> None:
        self._job, self._run = job, job.run
        self.changed_input = False
        if isinstance(self._run, Consumer):
            self._run = copy.copy(self._run)
            self._bring_here(self._run)

    @property
    def consumer(self) -> Consumer | None:
        """The consumer, if the job is one; else None."""
        return self._run if isinstance(self._run, Consumer) else None

    @property
    def function(self) -> Any:
        """The user's function."""
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
        """Make the job anew, as a new process would: with what was written, and nothing else."""
        if self.consumer:
            self.consumer.store.close()
        self._run = copy.copy(self._run) if self.consumer else self._run

    def batch(self, frame: Any, number: int, death: Death | None = None, now: dt.datetime = NOW) -> None:
        """Run one batch. Raises Died at the place of the death, and the job's own errors."""
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
        """Inside the block, call a function right before each step of the store and each line of the user's file."""
        with ExitStack() as stack:
            if on_step and self.consumer:
                store = self.consumer.store
                stack.callback(setattr, store, "on_step", store.on_step)
                store.on_step = on_step
            if on_line:
                stack.enter_context(watched(file_of(self.function), on_line))
            yield

    def effect(self) -> Effect:
        """Return the effect that is visible."""
        found = {name: rows_of(rows) for name, rows in self._job.read().items()}
        if self.consumer:
            kept = self.consumer.store.letters(Selection(consumer=self.consumer.name, limit=None), ["kind", "idempotence_key"])
            found[LETTERS] = rows_of(kept)
        return found

    def contradictions(self) -> list[str]:
        """Return the contradictions that `dedup verify` finds."""
        return verify(self.consumer.store, self.consumer.name).contradictions if self.consumer else []

    def close(self) -> None:
        """Close the connections."""
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
    """Return rows in the form in which they are compared: by all columns, with equal nulls, without an order."""
    return Counter(tuple(sorted((name, repr(value)) for name, value in row.items())) for row in table_of(rows).to_pylist())


def _copied(frame: Any) -> Any:
    """A copy of what can be changed; Arrow tables and Spark's frames cannot."""
    module = type(frame).__module__.split(".")[0]
    return None if isinstance(frame, pa.Table) or module == "pyspark" else copy.deepcopy(frame)


def _same(before: Any, after: Any) -> bool:
    if before is None:
        return True
    return bool(before.equals(after)) if hasattr(before, "equals") else bool(before == after)


@dataclass
class Finding:
    """One broken promise."""

    promise: str
    seen: str  # the first schedule that showed it, and what was there
    times: int = 1  # schedules that showed it

    def __str__(self) -> str:
        more = f" (and in {self.times - 1} more)" if self.times > 1 else ""
        return f"{self.promise}. Seen: {self.seen}{more}. {ADVICE[self.promise]}"


@dataclass
class Verdict:
    """What the kit tried, and what it found."""

    findings: list[Finding] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)  # the schedules, in order

    @property
    def ok(self) -> bool:
        """Whether the job kept each promise in each schedule."""
        return not self.findings

    @property
    def broken(self) -> set[str]:
        """The promises that the job broke."""
        return {finding.promise for finding in self.findings}

    def add(self, promise: str, seen: str) -> None:
        """Note a finding. The first one of each promise is kept."""
        for finding in self.findings:
            if finding.promise == promise:
                finding.times += 1
                return
        self.findings.append(Finding(promise, seen))

    def require(self) -> None:
        """Raise AssertionError with all findings, unless the verdict is ok."""
        if self.findings:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        told = [f"{len(self.tried)} schedules, {len(self.findings)} broken promises"]
        return "\n".join(told + [f"* {finding}" for finding in self.findings])


def differences(expected: Effect, found: Effect) -> tuple[list[str], list[str]]:
    """Return (lost, doubled) in words, by sink. A changed row is in both."""
    lost, more = [], []
    for sink in sorted({*expected, *found}):
        wanted, there = expected.get(sink, Counter()), found.get(sink, Counter())
        if missing := wanted - there:
            lost.append(f"{sink} lacks {missing.total()} rows, such as {_told(missing)}")
        if surplus := there - wanted:
            more.append(f"{sink} has {surplus.total()} rows too many, such as {_told(surplus)}")
    return lost, more


def _told(rows: Counter[Row]) -> str:
    return "(" + ", ".join(f"{name}={value[:60]}" for name, value in min(rows)) + ")"


def unstable(one: Effect, other: Effect) -> dict[str, set[str]]:
    """Return, by sink, the columns whose values differ between two runs over the same events."""
    found: dict[str, set[str]] = {}
    for sink in {*one, *other}:
        if one.get(sink) != other.get(sink):
            found[sink] = {name for name, _ in _columns(one, sink) ^ _columns(other, sink)}
    return found


def _columns(effect: Effect, sink: str) -> set[tuple[str, str]]:
    values: dict[tuple[str, str], int] = Counter()
    for row, times in effect.get(sink, Counter()).items():
        for cell in row:
            values[cell] += times
    return {(name, f"{value} {times}") for (name, value), times in values.items()}


def without(effect: Effect, columns: dict[str, set[str]]) -> Effect:
    """Return the effect without these columns."""
    return {sink: _less(rows, columns.get(sink, set())) for sink, rows in effect.items()}


def _less(rows: Counter[Row], columns: set[str]) -> Counter[Row]:
    kept: Counter[Row] = Counter()
    for row, times in rows.items():
        kept[tuple(cell for cell in row if cell[0] not in columns)] += times
    return kept
