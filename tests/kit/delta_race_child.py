"""The other instance of a race: `python -m kit.delta_race_child FOLDER ROUNDS ME`. Starts a Spark of its own."""

from __future__ import annotations

import datetime as dt
import sys
import time
import uuid
from pathlib import Path

from checkpoint.errors import CommitConflict
from dedup.delta import DeltaStore
from dedup.delta.commit import Decision, commit_decision

NAME = "shop"


def race(folder: Path, rounds: int, me: int) -> list[bool]:
    """Decide each number together with another instance: both have planned on the same head before either commits. Which did we win?"""
    store, won = DeltaStore(str(folder / "state"), engine="spark"), []
    for number in range(rounds):
        with store._states.caught_up(NAME) as state:
            attempt = uuid.uuid4().hex
            header = state.following("amend", attempt, dt.datetime.now(dt.UTC), state.header.head, by=f"instance {me}")

            def on_step(name: str, number: int = number) -> None:
                if name == "decide":
                    _meet(folder, f"planned-{number}", me)

            try:
                commit_decision(state, Decision(header), on_step)
                won.append(True)
            except CommitConflict:
                won.append(False)
        _meet(folder, f"decided-{number}", me)
    return won


def _meet(folder: Path, what: str, me: int) -> None:
    """Go on when the other instance is here, too."""
    (folder / f"{what}-{me}").touch()
    while not (folder / f"{what}-{1 - me}").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    from dedup.spark.session import local_session

    local_session("the other instance", cores=1)
    where, mine = Path(sys.argv[1]), int(sys.argv[3])
    answer = race(where, int(sys.argv[2]), mine)
    (where / f"won-{mine}").write_text("".join(str(int(w)) for w in answer))
