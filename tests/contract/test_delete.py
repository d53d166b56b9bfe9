"""A consumer that nobody uses is deleted, on every store: nothing of it is left, nothing of others goes, no old instance commits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from checkpoint.errors import ConfigError, DedupError, Fenced, Refused, StoreRestored
from deadletter.store import Commit
from dedup import DeadLetters, Selection
from dedup.core.messages import Chosen
from dedup.outbox import Call, Dispatcher
from kit.child_letters import worth_dying
from kit.children import Nursery
from kit.orders import assert_proven, batch, consumer, event, ids, letters, orders
from kit.outgoing import Receiver, publisher
from kit.people import ANN
from kit.pg_help import WAITING
from kit.places import Place, PostgresPlace

WHO = {"by": "ann", "reason": "replaced"}

SURE = {**WHO, "although_running": True, "although_waiting": True}


def delete(place: Place, name: str = "shop", **said: Any) -> Any:
    """From a process of its own."""
    return place.store().delete_consumer(name, **{**SURE, **said})


def used(place: Place, name: str = "shop", **settings: Any) -> Any:
    """A consumer with three orders, a letter that was discarded, and messages that were sent."""
    run = publisher(place.store(), name=name, sequence_key="data.id", budget=None, **settings)
    run(batch(*orders(range(3)), event(3, "bad", -1)), 0)
    DeadLetters(place.store()).discard(Selection(consumer=name, limit=None), **ANN)
    Dispatcher(place.store().outbox(name), Call(Receiver())).once()
    return run


@pytest.mark.fast_on("postgres")
def test_nothing_of_a_deleted_consumer_is_left(place: Place) -> None:
    """It is not listed, has no letters, messages, records or checkpoints; what was there is told; its rows stay in the sink."""
    used(place)
    done = delete(place)
    told = {"checkpoints": 1, "dead letters": 1, "messages": 3}
    assert {name: done.parts[name] for name in told} == told and not done.dry_run
    store = place.store()
    assert (store.consumers(), letters(store), store.batches("shop").num_rows) == ([], [], 0)
    assert store.outbox("shop").entries(Chosen(limit=None)) == []
    assert (store.head("shop").checkpoints, store.head("shop").seq, store.present("shop")) == ({}, 0, [])
    assert len(place.read()) == 3
    with pytest.raises(ConfigError, match="There is no consumer 'shop'"):
        delete(place)


def test_a_consumer_of_the_same_name_begins_as_new(place: Place) -> None:
    """It reads the log from its beginning, keys of before do not count, also those that a letter held, and everything adds up."""
    used(place)
    delete(place)
    run = publisher(place.store(), name="shop", sequence_key="data.id", budget=None)
    report = run(batch(*orders(range(3)), event(3, "bad", 5)), 0)
    assert (report.processed, report.duplicates, report.redelivered) == (4, 0, 0)
    assert sorted(ids(place.read())) == ["bad", *sorted(["p0-0", "p0-1", "p0-2"] * 2)]
    assert run(batch(event(4, "p0-1", 1)), 1).duplicates == 1
    store = place.store()
    assert store.consumers() == ["shop"]
    assert len(store.outbox("shop").entries(Chosen(limit=None))) == 4
    assert_proven(store)
    delete(place)
    assert place.store().consumers() == []
    assert publisher(place.store(), name="shop")(batch(*orders(range(3))), 0).processed == 3
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_query_that_goes_on_where_the_deleted_consumer_was_is_refused(place: Place) -> None:
    """A job that somebody forgot to remove, and that is started again, does not become a new consumer in the middle of its log."""
    used(place)
    delete(place)
    with pytest.raises(StoreRestored, match="is at batch 1, and the store has no state of it"):
        consumer(place.store())(batch(*orders(range(4, 6))), 1)
    assert len(place.read()) == 3


def test_what_others_have_stays(place: Place) -> None:
    """Another consumer goes on where it is: its duplicates are duplicates, its letters and messages are there, and its records add up."""
    used(place)
    other = used(place, "other")
    before = place.store().head("other")
    delete(place)
    store = place.store()
    assert (store.consumers(), store.head("other")) == (["other"], before)
    assert len(letters(store)) == 1 and len(store.outbox("other").entries(Chosen(limit=None))) == 3
    assert other(batch(event(7, "p0-1", 1)), 1).duplicates == 1
    assert_proven(place.store(), "other")


@pytest.mark.fast_on("postgres")
def test_a_look_changes_nothing(place: Place) -> None:
    """A dry run says what there is and what speaks against it, and the consumer goes on."""
    run = used(place)
    before = place.store().head("shop")
    done = delete(place, dry_run=True)
    assert done.dry_run and done.parts["dead letters"] == 1 and done.running
    assert place.store().head("shop") == before
    assert run(batch(*orders(range(4, 6))), 1).processed == 2


@pytest.mark.fast_on("postgres")
def test_one_that_may_run_is_not_deleted(place: Place) -> None:
    """The process is named, and nothing has changed."""
    run = used(place)
    with pytest.raises(Refused, match=r"it runs, or may run: process \d+ on .*--although-running"):
        delete(place, although_running=False)
    assert run(batch(*orders(range(4, 6))), 1).processed == 2


@pytest.mark.parametrize("what", ["letter", "message"])
def test_one_with_work_that_waits_is_not_deleted(place: Place, what: str) -> None:
    """Open letters and unsent messages are work that was not done; they are counted, and go only where somebody says so."""
    made, told = (consumer, "1 open or blocked dead letters") if what == "letter" else (publisher, "2 messages that are not sent")
    made(place.store(), budget=None)(batch(event(0, "a", 1), event(1, "b", -1 if what == "letter" else 2)), 0)
    with pytest.raises(Refused, match=rf"it has {told}.*--although-waiting"):
        delete(place, although_waiting=False)
    assert place.store().consumers() == ["shop"]
    delete(place)
    assert place.store().consumers() == []


@pytest.mark.fast_on("delta")
def test_one_that_was_stopped_is_deleted_without_more_ado(place: Place, nursery: Nursery) -> None:
    """Its process is gone, nothing waits: no option is needed, and the second call says that there is none."""
    task = {"module": "kit.child_letters", "kind": place.kind, "place": place.where, "name": "shop", "do": "stream", "batches": [[0, 1]]}
    nursery.start(task).finish()
    place.store().delete_consumer("shop", **WHO)
    assert place.store().consumers() == []


class Stopped:
    """An instance that stops right before the n-th step of a batch, as a machine that sleeps, and goes on when it is told to."""

    def __init__(self, place: Place, stop_at: int, events: list[dict[str, Any]]) -> None:
        self.steps: list[str] = []
        self._stop_at, self._reached, self._goes_on = stop_at, threading.Event(), threading.Event()
        self._events = batch(*events)
        self._run = consumer(place.store(on_step=self._step), name="shop", budget=None)
        self.error: DedupError | None = None
        self._thread = threading.Thread(target=self._be, daemon=True)
        self._thread.start()
        while not self._reached.wait(0.01) and self._thread.is_alive():
            pass

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if len(self.steps) == self._stop_at:
            self._reached.set()
            assert self._goes_on.wait(600)

    def _be(self) -> None:
        try:
            self._run(self._events, 0)
        except DedupError as error:
            self.error = error

    def ends(self) -> None:
        """It goes on, to its end."""
        self._goes_on.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def again(self) -> None:
        """What a query does that is started again in the same process: the same batch, by the same instance."""
        self._stop_at = 0
        self._run(self._events, 0)


def stops(place: Place) -> list[str]:
    """The steps of such a batch."""
    seen = Stopped(place, 0, old_events())
    seen.ends()
    assert seen.error is None
    delete(place)
    return seen.steps


def old_events() -> list[dict[str, Any]]:
    """Rows and a letter."""
    return [event(20, "old-1", 1), event(21, "old-2", -1)]


def begin_anew(place: Place) -> None:
    """A new consumer of that name, with another epoch, whose first batch is committed."""
    consumer(place.store(), name="shop", budget=None)(batch(event(0, "new-0", 1), event(1, "new-1", -1)), 0)


def leave_it(_place: Place) -> None:
    """Nobody uses the name."""


MANY_DEATHS = pytest.mark.timeout(3600)
"""Where Spark commits, a deletion takes many seconds, and here is one for each step."""


@MANY_DEATHS
@pytest.mark.full
@pytest.mark.parametrize("then", [leave_it, begin_anew])
def test_an_instance_that_comes_back_after_the_deletion_commits_nothing(place: Place, then: Callable[[Place], None]) -> None:
    """Wherever in a batch it was stopped: it ends with an error, then with `Fenced`, whether the name is used again or not."""
    steps = stops(place)
    for number in worth_dying(place, steps):
        step, before = steps[number - 1], len(place.read())
        old = Stopped(place, number, old_events())
        assert old.steps[-1] == step
        done = delete(place)
        then(place)
        old.ends()
        new = ["new-0"] if then is begin_anew else []
        # What it had decided when the deletion came is in its sink; nothing else is.
        decided = done.parts["checkpoints"]
        assert len(place.read()) - before == len(new) + decided, f"stopped before {step}: {old.error!r}"
        assert old.error is not None or decided, f"stopped before {step}"
        with pytest.raises(Fenced, match=r"deleted, by ann|taken over"):
            old.again()
        store = place.store()
        assert store.consumers() == (["shop"] if new else [])
        assert [x["idempotence_key"] for x in letters(store)] == (["new-1"] if new else [])
        if new:
            assert_proven(store)
            delete(place)


class Slow(Stopped):
    """Who deletes, and is stopped right before the n-th step."""

    def __init__(self, place: Place, stop_at: int) -> None:
        self._store = place.store(on_step=self._step)
        super().__init__(place, stop_at, [])

    def _be(self) -> None:
        try:
            self._store.delete_consumer("shop", **SURE)
        except DedupError as error:
            self.error = error


@pytest.mark.full
@MANY_DEATHS
def test_who_deletes_slowly_touches_nothing_of_a_new_consumer(place: Place) -> None:
    """Stopped at any step of its own, while another call ends the deletion and a new consumer begins: that one is whole afterwards."""
    used(place)
    steps: list[str] = []
    place.store(on_step=steps.append).delete_consumer("shop", **SURE)
    for number in worth_dying(place, steps):
        used(place)
        slow, step = Slow(place, number), steps[number - 1]
        assert slow.steps[number - 1 :] == [step]
        delete(place)
        run = used(place)
        slow.ends()
        if step == "decide_deletion":  # it has decided nothing yet, and may delete the new one, which is what it was told
            assert place.store().consumers() == [] or slow.error is not None
        else:
            assert slow.error is None, f"stopped before {step}: {slow.error!r}"
            assert len(letters(place.store())) == 1 and len(place.store().outbox("shop").entries(Chosen(limit=None))) == 3
            assert run(batch(event(9, "p0-1", 1), event(10, "fresh", 1)), 1).duplicates == 1
            again = publisher(place.store(), name="shop", sequence_key="data.id", budget=None)
            assert again(batch(event(11, "fresh", 1)), 2).duplicates == 1
            assert_proven(place.store())
        with suppress(ConfigError):
            delete(place)
    assert set(steps) >= {"decide_deletion", "delete_portion"} or set(steps) >= {"empty_table", "sweep_files", "note_deletion"}


@pytest.mark.fast_on("postgres")
def test_who_waits_for_the_decision_with_letters_is_refused(place: Place) -> None:
    """A person who changes letters in the very moment of the decision gets nothing done, and is told what happens."""
    used(place)
    told: list[BaseException] = []

    def change() -> None:
        try:
            with place.store().begin_letters("shop") as tx:
                tx.execute(Commit())
        except DedupError as error:
            told.append(error)

    meanwhile = threading.Thread(target=change)

    def step(name: str) -> None:
        if name == "decide_deletion" and isinstance(place, PostgresPlace):
            meanwhile.start()
            while place.execute(WAITING)[0][0] == 0:
                time.sleep(0.01)
        elif name in ("delete_portion", "empty_table") and not told:
            if not isinstance(place, PostgresPlace):
                meanwhile.start()
            meanwhile.join(60)  # told before the deletion has ended: afterwards there is no such consumer

    place.store(on_step=step).delete_consumer("shop", **SURE)
    meanwhile.join(60)
    assert [type(error) for error in told] == [Refused]
