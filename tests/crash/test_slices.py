"""Slices of a batch as tasks commit them: killed, tried again, by two at once, by one that was stopped, by those of an older driver."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from checkpoint.head import Head
from checkpoint.holders import take_epoch
from dedup.core.planning import NEW
from dedup.outbox import Call, Dispatcher, Message
from dedup.postgres import PostgresStore
from kit import slice_child
from kit.children import Child, Nursery
from kit.orders import assert_proven, ids, letters
from kit.places import PostgresPlace

pytestmark = [pytest.mark.postgres, pytest.mark.crash]

DECIDING = ("commit", "committed")
OTHERS = [pytest.param(step, marks=pytest.mark.full) for step in PostgresStore.steps if step not in ("redeliveries", *DECIDING)]


class Scene:
    """A database, a driver's plan, and tasks."""

    def __init__(self, url: str, nursery: Nursery, folder: Path) -> None:
        self.place, self.nursery, self.folder, self._tasks = PostgresPlace(url), nursery, folder, 0
        self.place.create_sink()

    def drive(self, name: str = "one") -> Head:
        """A driver takes the epoch, by force."""
        return take_epoch(self.place.store(), "shop", name, 1.0, force=True)

    def plan(self, head: Head, batch_id: int = 0, events: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
        """A batch of it."""
        path = self.folder / f"plan {head.epoch} {batch_id}"
        made = slice_child.orders_consumer(self.place.store(), **settings)
        return slice_child.plan(made, head, batch_id, path, events or slice_child.log())

    def task(self, work: Path, **more: Any) -> Child:
        """A process that runs it."""
        self._tasks += 1
        said = self.folder / f"said {self._tasks}"
        child = self.nursery.start({"module": "kit.slice_child", "place": self.place.url, "work": str(work), "said": str(said), **more})
        child.answer = lambda: json.loads(said.read_text())  # type: ignore[attr-defined]
        return child

    def waiting(self, work: Path, at: str, nth: int = 1) -> Child:
        """A process that has come to this step, and waits there for `resume`."""
        reached = self.folder / "reached"
        reached.unlink(missing_ok=True)
        child = self.task(work, at=at, nth=nth, reached=str(reached), resume=str(self.folder / "resume"))
        while not reached.exists():
            child.require_running()
            time.sleep(0.01)
        return child

    def resume(self) -> None:
        """Those that wait go on."""
        (self.folder / "resume").touch()

    def check(self) -> None:
        """Each key has one effect and one message, or one letter, or was skipped; the tables prove themselves."""
        store = self.place.store()
        keys = {json.loads(e["body"])["id"]: e for e in reversed(slice_child.log())}
        bad = {k for k, e in keys.items() if slice_child.bad(e["sequence_number"]) and json.loads(e["body"])["amount"]}
        skipped = {k for k, e in keys.items() if not json.loads(e["body"])["amount"]}
        assert Counter(ids(self.place.read())) == Counter(keys.keys() - bad - skipped)
        assert Counter(x["idempotence_key"] for x in letters(store)) == Counter(bad)
        sent: list[Message] = []
        Dispatcher(store.outbox("shop"), Call(sent.extend)).once()
        assert Counter((m.body or b"").decode() for m in sent) == Counter(keys.keys() - bad - skipped)
        assert [c.sequence_number for c in store.head("shop").checkpoints.values()] == [slice_child.EVENTS - 1] * 2
        assert_proven(store)


@pytest.fixture
def scene(postgres: str, nursery: Nursery, tmp_path: Path) -> Scene:
    """Nothing yet but a sink."""
    return Scene(postgres, nursery, tmp_path)


@pytest.mark.parametrize("times", [(2,), pytest.param((2, 3), marks=pytest.mark.full)], ids=["one death", "two deaths"])
@pytest.mark.parametrize("step", [*DECIDING, *OTHERS])
def test_a_task_that_is_killed_at_any_step_is_tried_again(scene: Scene, step: str, times: tuple[int, ...]) -> None:
    """Dead at the step of a chunk in the middle of a slice, tried again and dead later, and again: one effect for each key."""
    work = scene.plan(scene.drive())
    for nth in times:
        code, errors = scene.task(work, at=step, nth=nth).wait()
        assert code in (-signal.SIGKILL, 0), errors
        if nth == 2:
            assert code == -signal.SIGKILL, f"{step} was not reached"
    scene.task(work).finish()
    scene.check()


def test_two_tasks_of_one_slice_take_turns(scene: Scene) -> None:
    """A speculative twin waits while the other one has a transaction open; both end well, and every event was processed by one of them."""
    work = scene.plan(scene.drive())
    first = scene.waiting(work, "handler")
    twin = scene.task(work)
    scene.resume()
    first.finish()
    twin.finish()
    answers = [*first.answer(), *twin.answer()]  # type: ignore[attr-defined]
    assert not any(a["error"] for a in answers)
    assert sum(a["states"][NEW] for a in answers) == len(scene.place.read())
    scene.check()


@pytest.mark.full
def test_a_twin_goes_on_where_the_other_one_was_killed(scene: Scene) -> None:
    """The slice of a task that dies with its transaction open is free at once."""
    work = scene.plan(scene.drive())
    first = scene.waiting(work, "record", nth=2)
    twin = scene.task(work)
    first.send(signal.SIGKILL)
    twin.finish()
    scene.check()


def test_a_stopped_task_gives_up_its_slice_where_handlers_have_a_limit(scene: Scene) -> None:
    """The session of a process that outlasts handler_timeout inside a transaction is ended by its twin; continued, it commits nothing."""
    work = scene.plan(scene.drive(), handler_timeout=300.0)
    first = scene.waiting(work, "write")
    first.send(signal.SIGSTOP)
    scene.task(work, margin=-299.0).finish()  # as if the limit were a second
    scene.resume()
    first.send(signal.SIGCONT)
    first.finish()
    assert [a["error"] for a in first.answer()] == ["StoreUnavailable"]  # type: ignore[attr-defined]
    scene.check()


@pytest.mark.parametrize("step", [pytest.param("fence", marks=pytest.mark.full), "handler", pytest.param("commit", marks=pytest.mark.full)])
def test_tasks_of_a_driver_that_was_taken_over_commit_nothing(scene: Scene, step: str) -> None:
    """A newer driver takes the epoch while a task is before, in or at the end of its second transaction: Fenced, and nothing is doubled."""
    old = scene.plan(scene.drive("one"))
    zombie = scene.waiting(old, step, nth=2)
    head = scene.drive("two")
    scene.task(scene.plan(head)).finish()
    scene.resume()
    zombie.finish()
    assert [a["error"] for a in zombie.answer()] == ["Fenced"]  # type: ignore[attr-defined]
    scene.check()


def test_a_task_of_an_older_batch_finds_its_checkpoint_elsewhere(scene: Scene) -> None:
    """A zombie of batch 0 that begins after batch 1 was committed is refused, also with events that nobody has seen; nothing is written."""
    head = scene.drive()
    events = slice_child.log()
    first = [e for e in events if e["sequence_number"] < 10 and e["sequence_number"] != 4]
    zombie = scene.plan(head, 7, [e for e in events if e["sequence_number"] < 10])
    scene.task(scene.plan(head, 0, first)).finish()
    scene.task(scene.plan(scene.place.store().head("shop"), 1, [e for e in events if e["sequence_number"] >= 10])).finish()
    before = scene.place.read()
    late = scene.task(zombie)
    late.finish()
    assert [a["error"] for a in late.answer()] == ["CommitConflict"]  # type: ignore[attr-defined]
    assert scene.place.read() == before
    assert_proven(scene.place.store())
