"""The crash kit: a job is run over clean rows, then through everything that streaming does to it, and its effect is compared.

Replays, redeliveries, producers' duplicates, partitions in another order, other batches, bad events, and deaths at every step of the store
and every line of the user's function. Promises: the same seed tries the same. Called by tests of users.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dedup.consumer import Consumer
from dedup.rows import for_spark
from dedup.testing import verdict as v
from dedup.testing.delivery import Faults, events, plan, table_of
from dedup.testing.dying import AFTERWARDS, Death, Died, file_of
from dedup.testing.job import NOW, Effect, Job, Life
from dedup.testing.verdict import Verdict

LATER = dt.timedelta(days=400, hours=7, seconds=3)
"""How far the clock is moved: another year, month, day, hour and second."""

CLEAN = Faults(copied=0, unused=0, rebalanced=0)

Make = Callable[[Path], Job]
"""Makes the job at an empty place: a new folder, whose name no other one has (good for a schema or a table name)."""


@dataclass(frozen=True)
class Schedule:
    """Batches, and what happens on the way."""

    name: str
    batches: list[pa.Table]
    death: Death | None = None
    dies_in: int = 0  # batch
    twice: bool = False  # each batch is given again, to a new process
    now: dt.datetime = NOW


@dataclass
class Played:
    """How it went."""

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
    """Run the job through everything, and say in plain words which promise it breaks.

    Args:
        make: makes the job at a new, empty place; called once for each schedule.
        rows: clean rows, each of which is one event: Arrow table, DataFrame or list of dicts. A few dozen are enough. A column `body`
            is the event's body; without one, the row as JSON is.
        frame: what the job is given for a batch, such as `spark.createDataFrame` or `pa.Table.to_pandas`. Default: the Arrow table.
        as_events: rows in the envelope. Default: for a Consumer yes, for another function no.
        folder: where the places are made. Default: a temporary folder, removed afterwards.
        skip: promises (of dedup.testing) that the job does not make.

    Returns:
        The verdict; `require()` turns broken promises into an AssertionError.
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
        played.effect = v.without(life.effect(), self._unstable)
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
            self.verdict.add(v.CLEAN, f"{type(base.raised).__name__}: {base.raised}")
            return
        if base.changed_input:
            self.verdict.add(v.INPUT, "the rows it was given were others after a batch")
        base.effect = self._find_unstable(clean, base.effect)
        for schedule, promises in self._others(clean):
            # what depends on how batches are cut, or on the order, does so there as well: one broken promise is told once
            if {v.PART, v.ORDER} & self.verdict.broken - {promises[0]} and schedule.batches is not clean:
                continue
            self._compare(schedule, base.effect, self._play(schedule), *promises)
        for death in self._deaths(clean):
            schedule = Schedule(f"dies {death}", clean, death, dies_in=len(clean) // 2)
            self._compare(schedule, base.effect, self._play(schedule), v.DEATH, v.DEATH, v.DOUBLED)
        self._poison()

    def _find_unstable(self, clean: list[pa.Table], base: Effect) -> Effect:
        again = self._play(Schedule("the same again", clean)).effect
        later = self._play(Schedule("the same, another day", clean, now=NOW + LATER)).effect
        chance, clock = v.unstable(base, again), v.unstable(again, later)
        for sink, columns in sorted(chance.items()):
            self.verdict.add(v.CHANCE, f"run again over the same events, {sink} had other rows{_in(columns)}")
        for sink, columns in sorted(clock.items()):
            if columns - chance.get(sink, set()):
                self.verdict.add(v.CLOCK, f"run again on another day, {sink} had other rows{_in(columns)}")
        self._unstable = {sink: chance.get(sink, set()) | clock.get(sink, set()) for sink in {*chance, *clock}}
        return v.without(base, self._unstable)

    def _others(self, clean: list[pa.Table]) -> list[tuple[Schedule, tuple[str, str, str]]]:
        """Schedule, and the promises that are broken where it raises, loses, doubles."""
        other = Faults(0, 0, 0, 0, lagging=True)
        seen_twice = (v.TWICE, v.LOST, v.DOUBLED)
        return [
            (Schedule("all in one batch", self._delivered(CLEAN, 1)), (v.PART,) * 3),
            (Schedule("many small batches", self._delivered(CLEAN, max(4, 3 * self._count))), (v.PART,) * 3),
            *((Schedule(f"partitions in another order ({n})", self._delivered(other, seed=n)), (v.ORDER,) * 3) for n in range(3)),
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
        lost, doubled = ([], []) if played.raised else v.differences(expected, played.effect)
        if self._as_events or played.raised or lost or doubled:  # what a plain function leaves and then overwrites is no harm
            for told in played.stayed:
                self.verdict.add(v.OUTSIDE if self._as_events else v.STAYS, f"{schedule.name}: {told}")
        if played.raised:
            self.verdict.add(raises, f"{schedule.name}: {type(played.raised).__name__}: {str(played.raised)[:300]}")
            return
        for told in lost:
            self.verdict.add(loses, f"{schedule.name}: {told}")
        for told in doubled:
            self.verdict.add(doubles, f"{schedule.name}: {told}")
        for told in played.wrong:
            self.verdict.add(v.BOOKS, f"{schedule.name}: {told}")

    def _poison(self) -> None:
        """Bad events among good ones: what becomes of the good ones is what they become without the bad."""
        planned = plan(self._rows.num_rows, self._seed, self._count, Faults(0, 0, 0, 0, damaged=(0.1,)))
        damaged = planned.topic["damage"].to_numpy() > 0
        if not damaged.any():
            return
        made = self._envelope(planned.topic)
        flagged = planned.batches(made.append_column("_damaged", pa.array(damaged)))
        sound = [b.filter(pc.invert(b["_damaged"])).drop_columns("_damaged") for b in flagged]
        good = self._play(Schedule("without the bad events", sound))
        played = self._play(Schedule("bad events among them", [b.drop_columns("_damaged") for b in flagged]))
        lost, _ = v.differences(good.effect, played.effect)
        if played.raised:
            self.verdict.add(v.POISON, f"{type(played.raised).__name__}: {str(played.raised)[:300]}")
        elif lost:
            self.verdict.add(v.POISON, lost[0])


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
    lost, more = v.differences(before, after)
    return lost + more


def _damage(rows: pa.Table, damaged: Any) -> pa.Table:
    """Bodies that nobody can read; where there are none, rows of nulls."""
    mask = pa.array(np.asarray(damaged))
    if "body" in rows.column_names:
        broken = pc.binary_join_element_wise(pa.scalar(b"\xff\xfe"), rows["body"], pa.scalar(b""))
        return rows.set_column(rows.column_names.index("body"), "body", pc.if_else(mask, broken, rows["body"]))
    return pa.table({name: pc.if_else(mask, pa.scalar(None, rows[name].type), rows[name]) for name in rows.column_names})
