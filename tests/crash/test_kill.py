"""A process is killed with SIGKILL right before each named step of the protocol, and restarted."""

from __future__ import annotations

import json
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dedup.delta import DeltaStore
from dedup.outbox import Call, Dispatcher, Message
from dedup.postgres import PostgresStore
from dedup.spark import keeping
from fixtures.fix_places import of_stores
from kit import child
from kit.child_letters import Steps
from kit.children import Child, Nursery
from kit.local_tasks import JOBS
from kit.orders import assert_proven, consumer, letters
from kit.places import SLOW, Place

pytestmark = pytest.mark.crash

ON_DELTA = ("delta", "delta-spark", "delta-az", "delta-s3")
STEPS = {"postgres": list(PostgresStore.steps), **{store: list(DeltaStore.steps) for store in ON_DELTA}}
DECIDING = {"postgres": ["commit", "committed"], "delta": ["decide", "publish"]}
"""Store -> the steps right before and after its decision. tests/contract/test_end.py ends before all others, without a kill."""
SAME = frozenset({"redeliveries", "reserve", "record", "advance", "commit"})
"""Steps of Delta that find what the step before them finds: who dies there dies the death of that one. Slow places leave them out."""
OTHERS = {
    store: [s for s in steps if s not in DECIDING.get(store, []) and (store not in SLOW or s not in SAME)] for store, steps in STEPS.items()
}
STOPPED = {"postgres": ["commit"], **{store: ["decide"] for store in ON_DELTA}}
STOPPED_TOO = {
    store: [s for s in ("handler", "write", "record", "commit", "decide", "publish") if s in steps and s not in STOPPED[store]]
    for store, steps in STEPS.items()
}


def spawn(place: Place, nursery: Nursery, folder: Path, **task: Any) -> Child:
    """Start a process that runs child.py."""
    kind = place.kind
    where = place.where
    return nursery.start({"module": "kit.child", "kind": kind, "place": where, "progress": str(folder / "progress"), **task})


def check(place: Place) -> None:
    """Each key has one effect in each sink and one message, or one letter that holds it; the tables prove themselves."""
    store = place.store()
    store.publish("shop")
    events = [e for p in range(child.PARTITIONS) for e in child.log(p)]
    decodable = [json.loads(e["body"]) for e in events if not e["body"].startswith(b"junk")]
    wanted = {o["id"] for o in decodable if o["id"] is not None}
    held = [x["idempotence_key"] for x in letters(store) if x["holds_key"]]
    for sink in ("orders", "audit"):
        assert Counter([r["id"] for r in place.read(sink)] + held) == Counter(wanted)
    messages: list[Message] = []
    Dispatcher(store.outbox("shop"), Call(messages.extend)).once()
    assert Counter([(m.body or b"").decode() for m in messages] + held) == Counter(wanted)
    assert len(letters(store)) - len(held) == len(events) - len(decodable) + sum(o["id"] is None for o in decodable)
    points = [c.sequence_number for c in store.head("shop").checkpoints.values()]
    assert points == [2 * (child.LENGTH - 1)] * child.PARTITIONS
    assert_proven(store)


TIMES = pytest.mark.parametrize("times", [(2,), pytest.param((1, 3), marks=pytest.mark.full)], ids=["one death", "two deaths"])
"""Before which of a process's steps of one name it dies: one process, or that one and the next."""


@TIMES
@pytest.mark.parametrize(("place", "step"), [*of_stores(DECIDING), *of_stores(OTHERS, full=True)], indirect=["place"])
def test_a_kill_at_any_step_loses_and_doubles_nothing(
    place: Place, nursery: Nursery, tmp_path: Path, step: str, times: tuple[int, ...]
) -> None:
    """Dead right before the step, restarted and dead at a later one: sinks, reservations, letters, checkpoint and records agree."""
    place.create_sink("audit")
    for nth in times:
        code, errors = spawn(place, nursery, tmp_path, die_at=step, nth=nth).wait()
        assert code == -signal.SIGKILL, f"never reached {step} a {nth}. time: {errors}"
    spawn(place, nursery, tmp_path).finish()
    check(place)


LOOKED_AT = [*of_stores({"delta": [child.MANY]}), *of_stores({store: [child.FEW] for store in sorted(SLOW)}, full=True)]


@pytest.mark.parametrize(("place", "plan"), LOOKED_AT, indirect=["place"], ids=lambda value: value if isinstance(value, str) else "")
def test_steps_that_slow_places_leave_out_find_nothing_new(place: Place, plan: tuple[list[tuple[int, int]], int]) -> None:
    """A process that dies leaves what is written: nothing is, between such a step and the one before it, in any transaction."""
    place.create_sink("audit")
    seen, (batches, most) = Steps(place, looks=True), plan
    run = consumer(place.store(on_step=seen), query="q", max_events_per_transaction=most)
    run._handler = None
    run.foreach_batch(child.handle)
    for number, (first, end) in enumerate(batches):
        run(child.planned(first, end), number)
    assert set(seen.names) >= SAME and seen.new().isdisjoint(SAME)


IN_TASKS = {"delta": [JOBS[-1], "publish"], "postgres": [JOBS[-1]]}
IN_TASKS_TOO = {
    "delta": [s for s in (*JOBS, *STEPS["delta"]) if s not in (*IN_TASKS["delta"], "park", "note", "advance")],
    "postgres": [*JOBS[:-1], "commit"],
}


@TIMES
@pytest.mark.parametrize(("place", "step"), [*of_stores(IN_TASKS), *of_stores(IN_TASKS_TOO, full=True)], indirect=["place"])
def test_a_kill_at_any_step_of_a_batch_in_tasks_loses_and_doubles_nothing(
    place: Place, nursery: Nursery, tmp_path: Path, step: str, times: tuple[int, ...]
) -> None:
    """The same where tasks keep the rows and run the handler, also before and after their jobs; the kept rows of the dead are gone."""
    place.create_sink("audit")
    dead = []
    for nth in times:
        process = spawn(place, nursery, tmp_path, die_at=step, nth=nth, in_tasks=True)
        code, errors = process.wait()
        assert code == -signal.SIGKILL, f"never reached {step} a {nth}. time: {errors}"
        dead.append(process.pid)
    spawn(place, nursery, tmp_path, in_tasks=True).finish()
    assert not [f for pid in dead for f in Path(tempfile.gettempdir()).glob(f"{keeping.PREFIX}*-{pid}-*")]
    check(place)


@pytest.mark.fast_on("delta")
def test_two_instances_at_once_have_one_effect(place: Place, nursery: Nursery, tmp_path: Path) -> None:
    """Two processes of one consumer over the same batches: one is fenced or waits, and nothing is doubled."""
    place.create_sink("audit")
    instances = [spawn(place, nursery, tmp_path, after=0.5) for _ in range(2)]
    for process in instances:
        code, errors = process.wait()
        assert code == 0 or "Fenced" in errors or "StillHeld" in errors, errors
    spawn(place, nursery, tmp_path).finish()
    check(place)


@pytest.mark.parametrize(("place", "step"), [*of_stores(STOPPED), *of_stores(STOPPED_TOO, full=True)], indirect=["place"])
def test_an_instance_that_was_stopped_and_continued_after_a_takeover_commits_nothing(
    place: Place, nursery: Nursery, tmp_path: Path, step: str
) -> None:
    """SIGSTOP in the middle of a transaction for longer than the time-out; another instance takes over; SIGCONT: it is fenced."""
    place.create_sink("audit")
    reached, resume = tmp_path / "reached", tmp_path / "resume"
    zombie = spawn(place, nursery, tmp_path, wait_at=step, reached=str(reached), resume=str(resume), query="q")
    while not reached.exists():
        zombie.require_running()
    zombie.send(signal.SIGSTOP)
    resume.touch()
    spawn(place, nursery, tmp_path).finish()
    zombie.send(signal.SIGCONT)
    code, errors = zombie.wait()
    assert code != 0 and "Fenced" in errors, errors
    check(place)
