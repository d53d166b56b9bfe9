"""`python -m simulation 100000`: so many schedules on all cores, until one fails; `--seed N`: that one, told turn by turn."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time

from simulation import run
from simulation.schedule import Schedule

PORTION = 250
"""Schedules that a process plays before it says how it went."""


def main() -> int:
    """Exit code 1 where an invariant is broken."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000, help="schedules (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, help="play this one alone, and tell what happens; where it fails, the smallest one that does")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one for each core)")
    asked = parser.parse_args()
    run.quiet()
    if asked.seed is not None:
        said = run.failure(asked.seed)
        print(said or run.story(Schedule.of(asked.seed)))
        return bool(said)
    begun = time.monotonic()
    played, crashes, said = _search(range(asked.first, asked.first + asked.count), asked.jobs)
    seeds, seconds = f"seeds {asked.first}-{asked.first + asked.count - 1}", f"{time.monotonic() - begun:.0f} s"
    print(said or f"{played} schedules ({seeds}), {crashes} dead instances, {seconds} on {asked.jobs} cores: nothing is broken")
    return bool(said)


def _search(seeds: range, jobs: int) -> tuple[int, int, str]:
    portions = [seeds[i : i + PORTION] for i in range(0, len(seeds), PORTION)]
    played = crashes = 0
    with multiprocessing.get_context("spawn").Pool(jobs, run.quiet) as pool:
        for number, dead, said in pool.imap_unordered(run.search, portions):
            played, crashes = played + number, crashes + dead
            if said:
                return played, crashes, said
    return played, crashes, ""


if __name__ == "__main__":
    raise SystemExit(main())
