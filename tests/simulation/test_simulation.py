"""Seeded schedules of the real pipeline and planning code against model stores; and that a broken plan does not pass them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tenacity

from checkpoint import changes, guards
from dedup.core import decision, planning
from dedup.core.steps import Advance
from fixtures.variants import of_which
from kit.paths import ROOT
from simulation import clock, invariants, run, runners
from simulation.log import Log
from simulation.schedule import DEEDS, Schedule
from simulation.shared import Shared
from simulation.store import SimStore

FIRST = int(os.environ.get("DEDUP_SCHEDULES", "3000"))
"""Schedules that every run of the tests plays."""

ALL = max(FIRST, 100_000)
"""Schedules that the slow tests complete."""

PORTION = 5_000
"""Schedules of one slow test at most: several processes of pytest play them beside each other, and beside other tests."""

FIRST_PORTION = 1_000
"""The same of the tests that every run has: no process of a run then ends long after the others."""

JOBS = "1" if "PYTEST_XDIST_WORKER" in os.environ else str(len(os.sched_getaffinity(0)))


@pytest.fixture
def silence() -> Iterator[None]:
    """No log while thousands of instances fail on purpose; other tests hear theirs again."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m simulation`, of this tree."""
    line = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def portions() -> Iterator[Any]:
    """All schedules, by what a test of its own plays; those behind the first ones are slow."""
    starts = sorted({*range(0, FIRST, FIRST_PORTION), *range(FIRST, ALL, PORTION)})
    for number, (start, end) in enumerate(pairwise([*starts, ALL])):
        if start < end:
            marks = [pytest.mark.xdist_group(f"simulation {number}"), *([pytest.mark.full] if start >= FIRST else [])]
            yield pytest.param(range(start, end), id=f"seeds {start}-{end - 1}", marks=marks)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", list(portions()))
def test_no_schedule_of_crashes_instances_and_replays_breaks_an_invariant(seeds: range) -> None:
    """Whatever dies, sleeps, is replayed, reset or restored: each invariant holds, at every commit and at the end."""
    done = command(str(len(seeds)), "--first", str(seeds[0]), "--jobs", JOBS)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{len(seeds)} schedules (seeds {seeds[0]}-{seeds[-1]})" in done.stdout and "nothing is broken" in done.stdout
    print(done.stdout)


def test_a_schedule_is_a_number() -> None:
    """The same number is the same schedule and the same story, in another process as well."""
    schedule = Schedule.of(11)
    assert schedule == Schedule.of(11)
    told = run.story(schedule)
    assert told == run.story(schedule)
    assert command("--seed", "11").stdout.strip() == told


def test_schedules_have_everything_that_can_be_done() -> None:
    """Both stores, runners and queries, and each deed, within the first schedules already."""
    first = [Schedule.of(seed) for seed in range(300)]
    assert {move.deed for schedule in first for move in schedule.moves} == set(DEEDS)
    assert {(schedule.ledger, schedule.runners) for schedule in first} == {(a, b) for a in (False, True) for b in (False, True)}
    assert any(e.held for schedule in first for e in schedule.events) and any(schedule.shuffled for schedule in first)


def batches_of(seed: int) -> tuple[Log, list[list[tuple[int, int]]]]:
    """The log of a schedule, and the batches of a query that reads all of it."""
    world = run.world_of(Schedule.of(seed))
    reads = world.checkpoints[0]
    while reads.plan(len(reads.planned), world.coin):
        pass
    return world.log, [reads.batch(number) for number in range(len(reads.planned))]


def test_batches_leave_partitions_idle_and_no_event_out() -> None:
    """Of partitions that have more, some have nothing in a batch, also in the first one; each event comes once, and no batch is empty."""
    idle = []
    for seed in range(300):
        log, batches = batches_of(seed)
        assert sorted(at for places in batches for at in places) == sorted(e.at for e in log.events)
        if len(log.partitions) > 1:
            idle += [number for number, places in enumerate(batches[:2]) if len({p for p, _ in places}) == 1]
        assert all(batches) or any(e.held for e in log.events), "only events that come late leave a batch empty"
    assert idle.count(0) >= 10 and idle.count(1) >= 10


@pytest.mark.parametrize(("jumps", "attempts"), [((1,), 1), ((0, 2, 0, 1), 4)])
def test_a_jump_of_the_clock_ends_patience_and_a_step_back_does_not(jumps: tuple[int, ...], attempts: int) -> None:
    """What time.monotonic counts has passed when a stopped process goes on; that a clock is put back (even numbers) changes nothing."""
    left = iter((*jumps, *range(0, 20, 4)))

    def fails() -> None:
        clock.jump(next(left))
        raise ConnectionError

    ends = tenacity.stop_any(tenacity.stop_after_delay(300), tenacity.stop_after_attempt(6))
    patient = tenacity.Retrying(stop=ends, sleep=lambda _: None)
    with clock.simulated(run.world_of(Schedule.of(0))), pytest.raises(tenacity.RetryError) as told:
        patient(fails)
    assert told.value.last_attempt.attempt_number == attempts


def forgets_redeliveries(patch: pytest.MonkeyPatch) -> None:
    """What was seen is handled again."""
    sift = planning.sift
    patch.setattr(planning, "sift", lambda index, head, seen, repeats: sift(index, head, {}, repeats))


def reserves_nothing(patch: pytest.MonkeyPatch) -> None:
    """Every key is new."""
    settle = planning.settle
    patch.setattr(planning, "settle", lambda sifted, known, on_conflict: settle(sifted, known.slice(0, 0), on_conflict))


def remembers_the_query(patch: pytest.MonkeyPatch) -> None:
    """After an accepted restore the old query may leave positions out."""
    accept = changes.accept_restore
    patch.setattr(changes, "accept_restore", lambda head: replace(accept(head), checkpoints=head.checkpoints))


def compares_no_claim(patch: pytest.MonkeyPatch) -> None:
    """A runner goes on with a partition that it has lost."""
    patch.setattr(run, "JoinedWorld", lambda schedule, tell=None: runners.JoinedWorld(schedule, tell, careless=True))


def blocks_nothing(patch: pytest.MonkeyPatch) -> None:
    """What comes behind a letter goes first."""
    patch.setattr(planning.Order, "block_behind", lambda self, rows: None)
    patch.setattr(planning.Order, "block_behind_letters", lambda self, tails: None)


def takes_half_a_batch_for_one(patch: pytest.MonkeyPatch) -> None:
    """A state between two chunks of a batch passes for one that has the batch."""
    guard = guards.guard
    patch.setattr(guards, "guard", lambda head, *rest: guard(replace(head, batch_ended=True), *rest))


def moves_no_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """Everything is decided, and the checkpoint stays."""
    decide = decision.decide
    patch.setattr(decision, "decide", lambda *given: tuple(s for s in decide(*given) if not isinstance(s, Advance)))


def counts_wrongly(patch: pytest.MonkeyPatch) -> None:
    """A batch record whose counts do not add up."""
    record = decision._partition_record

    def wrong(*given: Any) -> dict[str, Any]:
        made = record(*given)
        return {**made, "processed": made["processed"] + 1}

    patch.setattr(decision, "_partition_record", wrong)


BREAKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], range]] = {
    invariants.ONE_OUTCOME: (forgets_redeliveries, range(400)),
    invariants.ONE_EFFECT: (reserves_nothing, range(400)),
    invariants.NOTHING_PASSED: (remembers_the_query, range(4000)),
    invariants.FENCED: (compares_no_claim, range(2000)),
    invariants.ORDER: (blocks_nothing, range(400)),
    invariants.RESTORED: (takes_half_a_batch_for_one, range(6200, 6400)),
    invariants.COMPLETE: (moves_no_checkpoint, range(400)),
    invariants.PROVABLE: (counts_wrongly, range(400)),
}
"""Invariant -> a break of the planning code (or of what a store compares) that it tells, and where to look."""


def first_broken(name: str, seeds: range) -> Schedule:
    """The first schedule that breaks this."""
    restores = name in (invariants.NOTHING_PASSED, invariants.RESTORED)
    for schedule in map(Schedule.of, seeds):
        if restores and not any(move.deed == "restore" for move in schedule.moves):
            continue
        if run.broken(schedule) == name:
            return schedule
    raise AssertionError(f"nothing in {seeds} breaks: {name}")


SLOW = frozenset({invariants.NOTHING_PASSED, invariants.RESTORED})
"""Their breaks show in few schedules, so that it takes many times as long to find one."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in SLOW)) for n in invariants.NAMES])
@pytest.mark.usefixtures("silence")
def test_each_invariant_is_told_by_its_name_and_shrunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deliberate break is found within a few schedules, and what is shown is the smallest one that still breaks the same."""
    breaks, seeds = BREAKS[name]
    breaks(monkeypatch)
    found = first_broken(name, seeds)
    smallest = run.shrunk(found)
    assert run.broken(smallest) == name
    assert smallest.size <= found.size and sum(smallest.size) <= 9, smallest
    monkeypatch.undo()
    assert run.broken(smallest) == "", "the schedule is broken without the break, too"


@pytest.mark.parametrize(("deed", "where", "unless"), of_which(1, [("sink", Shared, "behind"), ("copy", SimStore, "require_in_step")]))
@pytest.mark.usefixtures("silence")
def test_tables_of_different_times_that_nobody_compares_are_noticed(
    deed: str, where: type, unless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger model whose sink is not compared with the state loses or doubles something where one of them was copied back."""
    monkeypatch.setattr(where, unless, lambda self: None) if deed == "copy" else monkeypatch.setattr(where, unless, False)
    asked = (s for s in map(Schedule.of, range(1, 8000, 2)) if not s.runners and any(m.deed == deed for m in s.moves))
    found = next(s for s in asked if run.broken(s))
    assert run.broken(found) in invariants.NAMES
    monkeypatch.undo()
    assert run.broken(found) == ""


@pytest.mark.full
@pytest.mark.usefixtures("silence")
def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the invariant, the smallest schedule turn by turn, and the one number that replays it."""
    forgets_redeliveries(monkeypatch)
    seed = first_broken(invariants.ONE_OUTCOME, range(400)).seed
    _, _, said = run.search(range(seed, seed + 1))
    assert said.startswith(f"seed {seed} breaks: {invariants.ONE_OUTCOME}")
    assert f"make simulate SEED={seed}" in said and "does commit" in said
    assert all(f"event {e}" in said for e in run.shrunk(Schedule.of(seed)).events)
