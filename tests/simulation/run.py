"""Schedules one after another: run, checked, made smaller where one fails, and told."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable

import pyarrow as pa

from simulation import invariants
from simulation.runners import JoinedWorld
from simulation.schedule import Schedule
from simulation.world import World

SWEPT = 50
"""After so many schedules garbage is collected, where it is not collected all the time."""

PROVED = 10
"""Of so many schedules one is proved by the real `verify`, too."""


def quiet() -> None:
    """One thread, and no log: each process has a core of its own. For processes that do nothing else: it stays that way."""
    logging.disable(logging.ERROR)
    pa.set_cpu_count(1)
    os.environ.setdefault("PYARROW_IGNORE_TIMEZONE", "")  # what it is without; each array of Python values asks, and a miss costs more
    gc.collect()
    gc.freeze()
    gc.disable()


def world_of(schedule: Schedule, tell: Callable[[str], None] | None = None) -> World:
    """The world that the schedule asks for."""
    return (JoinedWorld if schedule.runners else World)(schedule, tell)


def play(schedule: Schedule, tell: Callable[[str], None] | None = None) -> World:
    """Run it and check everything. Raises Broken, or whatever the code under test raised that is no answer of its own."""
    world = world_of(schedule, tell)
    world.run()
    invariants.check(world, prove=schedule.seed // 10 % PROVED == 0)
    return world


def broken(schedule: Schedule) -> str:
    """The name of what a schedule breaks; empty where it breaks nothing."""
    try:
        play(schedule)
    except invariants.Broken as error:
        return error.name
    except Exception as error:  # noqa: BLE001 - a defect of the code under test
        return type(error).__name__
    return ""


def shrunk(schedule: Schedule) -> Schedule:
    """The smallest one to be found that breaks the same: events, faults and instances are left out while it still does."""
    name, smallest = broken(schedule), schedule
    while smaller := next((s for s in smallest.smaller() if broken(s) == name), None):
        smallest = smaller
    return smallest


def story(schedule: Schedule) -> str:
    """The schedule and what happens in it, turn by turn, to its end."""
    told = [str(schedule)]
    try:
        play(schedule, told.append)
        told.append("nothing is broken")
    except Exception as error:  # noqa: BLE001 - as in `broken`
        told.append(f"{type(error).__name__}: {error}")
    return "\n".join(told)


def failure(seed: int) -> str:
    """What to say of a seed that fails; empty where it does not."""
    whole = Schedule.of(seed)
    if not broken(whole):
        return ""
    smallest = shrunk(whole)
    (events, moves), (few, fewer) = whole.size, smallest.size
    return (
        f"seed {seed} breaks: {broken(whole)}\n"
        f"The smallest schedule that does ({few} of {events} events, {fewer} of {moves} moves):\n{story(smallest)}\n"
        f"Again: make simulate SEED={seed}"
    )


def search(seeds: range) -> tuple[int, int, str]:
    """Plays them until one fails. Returns how many were played, how many instances died, and what to say of the one that failed."""
    crashes = 0
    for number, seed in enumerate(seeds, 1):
        if number % SWEPT == 0 and not gc.isenabled():
            gc.collect()
        try:
            crashes += play(Schedule.of(seed)).crashes
        except Exception:  # noqa: BLE001 - told in full below
            return number, crashes, failure(seed)
    return len(seeds), crashes, ""
