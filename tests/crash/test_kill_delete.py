"""Who deletes a consumer is killed at every single step: the next call ends it, and nothing of another consumer is touched."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import ConfigError, Refused
from crash.test_kill_letters import BROKEN, dies, effects, standing, steps_of, task_at
from fixtures.fix_places import of_stores
from kit.child_letters import Steps, do, orders_of, prepare_place
from kit.children import Nursery
from kit.orders import assert_proven, batch, consumer, letters
from kit.places import Place

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600)]

TOLD = {"settings": {"letters_to": "dead", "sequence_key": None}}
"""Makes messages, too."""

WORK = [{**BROKEN, **TOLD}, {"do": "discard"}, {"do": "dispatch", **TOLD}]
"""Rows, letters, their history, messages that were sent and such that were not."""

VICTIM = {"do": "delete", "portion": 2}


def is_refused(store: Any, name: str) -> bool:
    """Whether nothing can be begun under the name, because the deletion is decided and not done."""
    with suppress(Refused):
        consumer(store, name=name)(batch(*orders_of(name, [50])), 0)
        return False
    return True


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("last", [True, pytest.param(False, marks=pytest.mark.full)], ids=["the last of its name", "an earlier one"])
def test_killed_anywhere_while_deleting(place: Place, nursery: Nursery, last: bool) -> None:
    """Before the decision everything is there; after it nothing can be begun, until a second call has deleted the rest."""
    prepare_place(place)
    work(place, "other")
    seen = steps_of_deletion(place)
    steps = seen.names
    chosen = [number for number in seen.to_die_before() if (steps[number - 1] not in steps[number:]) == last]
    if not chosen:
        pytest.skip("on a slow store only the last step of each name is tried")
    for number in chosen:
        name, step = f"shop{number}x", steps[number - 1]
        work(place, name)
        before = len(letters(place.store(), consumer=name))
        dies(place, nursery, {**VICTIM, "name": name}, number, step)
        if step == "decide_deletion":
            assert len(letters(place.store(), consumer=name)) == before
        else:
            assert is_refused(place.store(), name), f"died before {step}, the {number}. step"
        do(place.store(), task_at(place, **VICTIM, name=name))
        check_deleted(place, name)
        do(place.store(), task_at(place, **WORK[0], name=name))
        assert len(letters(place.store(), consumer=name)) == before
        assert_proven(place.store(), name)
        assert_proven(place.store(), "other")
        do(place.store(), task_at(place, **VICTIM, name=name))
    expected = {"delete_portion"} if place.kind == "postgres" else {"empty_table", "list_files", "sweep_files", "note_deletion"}
    assert set(steps) == {"decide_deletion", *expected} and len(steps) - steps.count("decide_deletion") >= 5


def work(place: Place, name: str) -> None:
    """What the consumer has done."""
    for task in WORK:
        do(place.store(), task_at(place, **task, name=name))


def steps_of_deletion(place: Place) -> Steps:
    """Of a consumer that has done as much as any other one here."""
    work(place, "shop0x")
    return steps_of(place, {**VICTIM, "name": "shop0x"})


def check_deleted(place: Place, name: str) -> None:
    """Nothing of it is left, and a second call says so."""
    store = place.store()
    assert name not in store.consumers() and letters(store, consumer=name) == [] and store.batches(name).num_rows == 0
    with pytest.raises(ConfigError, match="There is no consumer"):
        do(place.store(), task_at(place, **VICTIM, name=name))


STREAM = {"do": "stream", "batches": [[0, 1, 2, 3]], "bad": [1]}

SLEEPING = {"postgres": ["commit"], "delta": ["publish"]}
SLEEPING_TOO = {"postgres": ["handler"], "delta": ["handler", "decide", "read_back"]}
"""Store -> steps before which the old instance falls asleep: in the handler, right before the commit, and where it does not know of it."""


def asleep(child: Any) -> None:
    """Wait until the process is stopped."""
    stat = Path(f"/proc/{child.pid}/stat")
    until = time.monotonic() + 60
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        child.require_running()
        assert time.monotonic() < until
        time.sleep(0.01)


def last_step(place: Place, step: str) -> int:
    """Which step of the stream has this name, the last time."""
    seen = steps_of(place, {**STREAM, "name": "probe"}).names
    return len(seen) - seen[::-1].index(step)


@pytest.mark.parametrize(("place", "step"), [*of_stores(SLEEPING), *of_stores(SLEEPING_TOO, full=True)], indirect=["place"])
def test_a_process_that_slept_while_its_consumer_was_deleted_commits_nothing(place: Place, step: str, nursery: Nursery) -> None:
    """A laptop lid, a paused machine: it wakes when a new consumer has its name, and that one has its own events once, and no others."""
    prepare_place(place)
    number = last_step(place, step)
    old = nursery.start(task_at(place, **STREAM, name="shop", die_at=number, sleeps=True))
    asleep(old)
    do(place.store(), task_at(place, **VICTIM, name="shop"))
    decided = effects(place)
    assert decided == ([0, 2, 3] if step in ("read_back", "publish") else [])
    do(place.store(), task_at(place, do="stream", batches=[[5, 6]], bad=[6], name="shop"))
    old.send(signal.SIGCONT)
    code, errors = old.wait()
    assert code == 0 or "Fenced" in errors or "StoreUnavailable" in errors, errors
    assert (code == 0) <= bool(decided)
    assert effects(place) == [*decided, 5]
    assert standing(place, "shop") == {6: "OPEN"}
    assert_proven(place.store())
