"""A process is killed with SIGKILL right before each named step of the protocol, and restarted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import child
import pytest
from orders import assert_proven, letters
from places import DeltaPlace, Place

from dedup.delta import DeltaStore
from dedup.postgres import PostgresStore

pytestmark = pytest.mark.crash

STEPS = {"postgres": list(PostgresStore.steps), "delta": list(DeltaStore.steps)}


def spawn(place: Place, folder: Path, **task: Any) -> subprocess.Popen[str]:
    """Start tests/contract/child.py."""
    kind = "delta" if isinstance(place, DeltaPlace) else "postgres"
    where = str(place.folder) if isinstance(place, DeltaPlace) else place.url
    task = {"kind": kind, "place": where, "progress": str(folder / "progress"), **task}
    here = Path(child.__file__)
    return subprocess.Popen([sys.executable, here, json.dumps(task)], cwd=here.parent, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    """It must end well."""
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def check(place: Place) -> None:
    """Each key has one effect in each sink or one letter that holds it; the tables prove themselves."""
    store = place.store()
    store.publish("shop")
    events = [e for p in range(child.PARTITIONS) for e in child.log(p)]
    decodable = [json.loads(e["body"]) for e in events if not e["body"].startswith(b"junk")]
    wanted = {o["id"] for o in decodable if o["id"] is not None}
    held = [x["idempotence_key"] for x in letters(store) if x["holds_key"]]
    for sink in ("orders", "audit"):
        assert Counter([r["id"] for r in place.read(sink)] + held) == Counter(wanted)
    assert len(letters(store)) - len(held) == len(events) - len(decodable) + sum(o["id"] is None for o in decodable)
    points = [c.sequence_number for c in store.head("shop").checkpoints.values()]
    assert points == [2 * (child.LENGTH - 1)] * child.PARTITIONS
    assert_proven(store)


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("step", sorted({*STEPS["postgres"], *STEPS["delta"]}))
def test_a_kill_at_any_step_loses_and_doubles_nothing(place: Place, tmp_path: Path, step: str, nth: int) -> None:
    """Dead right before the step, restarted: sinks, reservations, letters, checkpoint and records agree."""
    kind = "delta" if isinstance(place, DeltaPlace) else "postgres"
    if step not in STEPS[kind]:
        return  # the other store's step
    place.create_sink("audit")
    victim = spawn(place, tmp_path, die_at=step, nth=nth)
    _, errors = victim.communicate(timeout=120)
    assert victim.returncode == -signal.SIGKILL, f"never reached {step} a {nth}. time: {errors}"
    finish(spawn(place, tmp_path))
    check(place)


def test_two_copies_at_once_have_one_effect(place: Place, tmp_path: Path) -> None:
    """Two processes of one consumer over the same batches: one is fenced or waits, and nothing is doubled."""
    place.create_sink("audit")
    copies = [spawn(place, tmp_path, after=0.5) for _ in range(2)]
    codes = []
    for process in copies:
        _, errors = process.communicate(timeout=120)
        codes.append(process.returncode)
        assert process.returncode == 0 or "Fenced" in errors or "StillHeld" in errors, errors
    finish(spawn(place, tmp_path))
    check(place)


@pytest.mark.parametrize("step", ["handler", "write", "record", "commit", "decide", "publish"])
def test_a_copy_that_was_stopped_and_continued_after_a_takeover_commits_nothing(place: Place, tmp_path: Path, step: str) -> None:
    """SIGSTOP in the middle of a transaction for longer than the time-out; another copy takes over; SIGCONT: it is fenced."""
    kind = "delta" if isinstance(place, DeltaPlace) else "postgres"
    if step not in STEPS[kind]:
        return
    place.create_sink("audit")
    reached, resume = tmp_path / "reached", tmp_path / "resume"
    zombie = spawn(place, tmp_path, wait_at=step, reached=str(reached), resume=str(resume), query="q")
    while not reached.exists():
        assert zombie.poll() is None, zombie.communicate()[1]
    zombie.send_signal(signal.SIGSTOP)
    resume.touch()
    finish(spawn(place, tmp_path))
    zombie.send_signal(signal.SIGCONT)
    _, errors = zombie.communicate(timeout=120)
    assert zombie.returncode != 0 and "Fenced" in errors, errors
    check(place)
