"""Dispatchers are killed between each two of their steps, and several work at once: nothing is lost, ids stay, keys keep their order."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dedup.outbox.dispatch import STEPS
from kit.children import Child, Nursery
from kit.orders import batch, event
from kit.outgoing import publisher, states
from kit.places import DeltaPlace, Place, wait_for_rollback

pytestmark = pytest.mark.crash

KEYS = 7


def spawn(place: Place, nursery: Nursery, file: Path, **task: Any) -> Child:
    """Start a process that runs outbox_child.py."""
    kind = place.kind
    where = place.where
    return nursery.start({"module": "kit.outbox_child", "kind": kind, "place": where, "file": str(file), **task})


def fill(place: Place, first: int, count: int, batch_id: int) -> None:
    """A batch of orders, each with a message."""
    publisher(place.store())(batch(*[event(n, f"{n}", n % KEYS) for n in range(first, first + count)]), batch_id)


def check(file: Path, count: int) -> int:
    """Each message arrived; a duplicate has the id of the first; of each key the first arrivals are in order. Returns the duplicates."""
    ids, order, lines = defaultdict[str, set[str]](set), defaultdict[str, list[int]](list), file.read_text().splitlines()
    for line in lines:
        key, body, id = line.split(" ")
        if body not in ids:
            order[key].append(int(body))
        ids[body].add(id)
    assert sorted(map(int, ids)) == list(range(count))
    assert all(len(found) == 1 for found in ids.values())
    assert all(numbers == sorted(numbers) for numbers in order.values())
    return len(lines) - count


@pytest.mark.parametrize("step", STEPS)
def test_a_dispatcher_killed_at_any_step_loses_nothing(place: Place, nursery: Nursery, tmp_path: Path, step: str) -> None:
    """Dead right before a step, several times: all messages arrive, duplicates have their ids, and the order of keys holds."""
    fill(place, 0, 60, 0)
    fill(place, 60, 40, 1)
    file = tmp_path / "received"
    for nth in (1, 2):
        code, errors = spawn(place, nursery, file, die_at=step, nth=nth, limit=20).wait()
        assert code == -signal.SIGKILL, errors
        wait_for_rollback(place)
    spawn(place, nursery, file).finish()
    duplicates = check(file, 100)
    assert (duplicates > 0) == (step == "sent")
    assert states(place) == {"SENT": 100}


@pytest.mark.full
def test_dispatchers_at_once_share_the_work_and_keep_the_order(place: Place, nursery: Nursery, tmp_path: Path) -> None:
    """Three of them while batches commit, one killed at random every moment: each message arrives, first arrivals in order.

    On Delta the one that began last goes on, and the others end.
    """
    file, until, dice = tmp_path / "received", tmp_path / "until", random.Random(1)
    file.touch()
    running = [spawn(place, nursery, file, until=str(until), limit=32) for _ in range(3)]
    for number in range(8):
        fill(place, number * 50, 50, number)
        victim = dice.randrange(3)
        time.sleep(dice.random() * 0.2)
        if not running[victim].ended:
            running[victim].send(signal.SIGKILL)
        running[victim].wait()
        running[victim] = spawn(place, nursery, file, until=str(until), limit=32)
    for _ in range(1_500):
        if states(place) == {"SENT": 400}:
            break
        time.sleep(0.02)
    until.touch()
    for one in running:
        code, errors = one.wait()
        assert code == 0 or "Fenced" in errors, errors
    spawn(place, nursery, file).finish()
    duplicates = check(file, 400)
    assert duplicates <= 8 * 32 or isinstance(place, DeltaPlace)  # what eight dead ones had in hand; without locks it is more
    assert states(place) == {"SENT": 400}
