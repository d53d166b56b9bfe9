"""`python -m kit.year`: a year of a consumer with retention, its time set by the story, its processes real.

365 days of 27 batches with repeated events, transaction markers, rejected events, slow handlers, processes that are killed in a batch,
rotations, purges and compactions by the consumer's own upkeep; each alarm's fault once. Then: is every row there, once; what do the tables
contradict; which alarms were raised on which days; how large is what; what did a batch take.

    make year YEAR_ARGS="--store delta --batches 4"
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kit.year import alarms
from kit.year.faults import FAULTS
from kit.year.story import Story, begun

SHORTEST = 45


def play(kind: str, folder: Path, *, days: int, batches: int, turn: float, seed: int = 1) -> dict[str, Any]:
    """What there is to tell of a year. Raises RuntimeError where a batch or a command fails."""
    with begun(kind, folder, days=days, batches=batches, turn=turn, seed=seed) as story:
        _play(story, days, kind)
        wrong = story.end()
    program = alarms.promtool()
    return {
        "wrong": wrong + (alarms.contradictions(story.days, folder, program) if program else []),
        "alarms": "looked at" if program else "not looked at: promtool is not there",
        "batches": story.taken.told(),
        "killed": story.deaths,
        "events": {"orders": len(story.topic.orders), "repeated": story.topic.repeated, "rejected": story.topic.rejected},
        "sizes": story.sizes,
    }


def _play(story: Story, days: int, kind: str) -> None:
    days_of = {name: at * days // SHORTEST for name, (at, _) in FAULTS.items() if kind == "delta" or name != "DedupPublicationLate"}
    when, behind, old = {day: name for name, day in days_of.items()}, days_of["DedupPurgeBehind"], days_of["DedupLetterIsOld"]
    story.vacation = (old - 7, old)
    started = time.monotonic()
    for day in range(days):
        if behind - 4 < day < behind:
            continue  # nobody is there
        if day == behind - 5:
            story.upkeep = False
            story.restart()
        alarm = when.get(day, "")
        story.day(day, alarm, FAULTS[alarm][1] if alarm else None)
        if day == old - 8:
            story.look_at_letters()
        print(f"day {day + 1} of {days}, {time.monotonic() - started:.0f} s {alarm}", file=sys.stderr, flush=True)


def main() -> int:
    """Play it, and print what there is to tell as JSON."""
    parser = argparse.ArgumentParser(prog="python -m kit.year", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["delta", "postgres"], default="postgres")
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--batches", type=int, default=27)
    parser.add_argument("--turn", type=float, default=1.0, help="seconds between two turns of the upkeep")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="year-") as folder:
        told = play(given.store, Path(folder), days=given.days, batches=given.batches, turn=given.turn, seed=given.seed)
    print(json.dumps(told, indent=1))
    return bool(told["wrong"])


if __name__ == "__main__":
    sys.exit(main())
