"""What a deletion leaves in the folder of a store on Delta, and why a slow one cannot harm files that a new consumer has just written."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import CommitFailedError, DeltaError

from checkpoint import changes
from checkpoint.errors import DedupError, Refused, StoreUnavailable
from dedup import DeadLetters, Selection
from dedup.delta.commit import SinkPublisher
from dedup.delta.ledger import DELETE, DELETED, Header
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, ids, letters, orders
from kit.outgoing import publisher
from kit.people import ANN
from kit.places import DeltaPlace

SURE: dict[str, Any] = {"by": "ann", "reason": "replaced", "although_running": True, "although_waiting": True}


@pytest.fixture
def place(tmp_path: Path) -> DeltaPlace:
    """An empty place with the sink `orders`."""
    made = DeltaPlace(tmp_path)
    made.create_sink()
    return made


def used(place: DeltaPlace, name: str = "shop") -> None:
    """Rows, letters with a history, messages that wait, files of keys."""
    run = publisher(place.store(), name=name, sequence_key="data.id", budget=None)
    for number in range(3):
        run(batch(*orders(range(10 * number, 10 * number + 9)), event(10 * number + 9, f"secret-{number}", -1)), number)
    DeadLetters(place.store()).discard(Selection(consumer=name, limit=1), **ANN)


def files_of(place: DeltaPlace, name: str = "shop") -> list[Path]:
    """Files of a consumer, without the logs of tables."""
    state = place.folder / "state"
    found = [path for path in state.rglob("*") if path.is_file() and name in path.relative_to(state).parts]
    return [path for path in found if "_delta_log" not in path.parts]


@pytest.mark.full
def test_two_decisions_and_the_logs_are_left(place: DeltaPlace) -> None:
    """No letter, message, key or reservation is in any file any more; the two decisions say who deleted the consumer, and why."""
    used(place)
    used(place, "other")
    assert {"keys", "dead_letters", "outbox", "ledger"} <= {path.relative_to(place.folder / "state").parts[0] for path in files_of(place)}
    place.store().delete_consumer("shop", **SURE)
    left = files_of(place)
    assert sorted({path.relative_to(place.folder / "state").parts[0] for path in left}) == ["deleted", "ledger"]
    rows = [row for path in left if path.suffix == ".parquet" for row in pq.ParquetFile(path).read().to_pylist()]
    headers = [Header.from_json(row["doc"]) for row in sorted(rows, key=lambda row: row["seq"])]
    assert [(one.kind, one.by, one.reason) for one in headers] == [(DELETE, "ann", "replaced"), (DELETED, "ann", "replaced")]
    assert_proven(place.store(), "other")
    assert len(letters(place.store())) == 3


@pytest.mark.full
def test_files_of_attempts_that_died_go_and_those_of_another_call_stay(place: DeltaPlace) -> None:
    """What no commit names and is older than the decision is gone; a file that is just being written may be that of the last decision."""
    used(place)
    folder = place.folder / "state" / "ledger" / "shop"
    old, new = folder / "old.parquet", folder / "new.parquet"
    old.write_bytes(b"secret")

    def step(name: str) -> None:
        if name == "list_files":
            new.write_bytes(b"another call is about to commit this")

    place.store(on_step=step).delete_consumer("shop", **SURE)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.full
def test_a_deleted_consumer_whose_ledger_cannot_be_read_hides_no_other_one(place: DeltaPlace) -> None:
    """It is listed again, and whoever asks for it is told why; the others can be listed and used."""
    used(place)
    used(place, "other")
    place.store().delete_consumer("shop", **SURE)
    for path in (place.folder / "state" / "ledger" / "shop").rglob("*.parquet"):
        path.unlink()
    assert place.store().consumers() == ["other", "shop"]
    assert_proven(place.store(), "other")
    with pytest.raises(DedupError):
        place.store().head("shop")


def stopped(place: DeltaPlace, step: str, act: Callable[[Any], None]) -> tuple[threading.Thread, threading.Event]:
    """A thread that has come to this step of `act`, and waits for the event."""
    reached, goes_on = threading.Event(), threading.Event()

    def on_step(name: str) -> None:
        if name == step and not reached.is_set():
            reached.set()
            assert goes_on.wait(60)

    thread = threading.Thread(target=act, args=(place.store(on_step=on_step),), daemon=True)
    thread.start()
    assert reached.wait(60)
    return thread, goes_on


@pytest.mark.full
@pytest.mark.parametrize("step", of_which(1, ["sweep_files", "list_files"]))
def test_files_that_no_commit_names_yet_are_safe_from_a_slow_deletion(place: DeltaPlace, step: str) -> None:
    """A new consumer has written the files of its first batch, and not decided yet, while an old call looks for files that nobody needs."""
    used(place)
    slow, deletes_on = stopped(place, step, lambda store: store.delete_consumer("shop", **SURE))
    place.store().delete_consumer("shop", **SURE)
    rows = batch(event(0, "new-0", 1), event(1, "new-1", -1))
    new, decides_on = stopped(place, "decide", lambda store: consumer(store, budget=None)(rows, 0))
    before = len(place.read())
    deletes_on.set()
    slow.join(60)
    decides_on.set()
    new.join(60)
    assert not slow.is_alive() and not new.is_alive()
    assert len(place.read()) == before + 1 and "new-0" in ids(place.read())
    assert [x["idempotence_key"] for x in letters(place.store())] == ["new-1"]
    assert_proven(place.store())


@pytest.mark.full
def test_a_process_that_knew_the_deleted_consumer_reads_the_new_one(place: DeltaPlace) -> None:
    """A monitor or a command that has read everything before forgets what is blocked, held and reserved by the old one."""
    watcher = place.store()
    run = consumer(place.store(), sequence_key="data.id", budget=None)
    run(batch(event(0, "a", -1), event(1, "a", 5)), 0)
    assert len(letters(watcher)) == 2 and watcher.reserved("shop") == 1
    place.store().delete_consumer("shop", **SURE)
    assert letters(watcher) == [] and watcher.consumers() == []
    made = consumer(watcher, sequence_key="data.id", budget=None)
    assert made(batch(event(0, "a", 5)), 0).processed == 1
    assert letters(watcher) == [] and watcher.reserved("shop") == 1
    assert_proven(watcher)


def broken(place: DeltaPlace) -> Path:
    """The sink's log cannot be read; where it was moved to."""
    folder = place.folder / "sinks" / "orders" / "_delta_log"
    kept = folder.rename(folder.with_name("kept"))
    folder.mkdir()
    (folder / f"{0:020}.json").write_text("{broken")
    return kept


def repaired(kept: Path) -> None:
    """It is the log of before."""
    shutil.rmtree(kept.with_name("_delta_log"))
    kept.rename(kept.with_name("_delta_log"))


def test_one_whose_sink_cannot_be_read_is_deleted_if_somebody_says_so(place: DeltaPlace) -> None:
    """What it shows, nobody can tell: that speaks against it. When the sink is back, a new consumer of the name goes on in it."""
    consumer(place.store())(batch(*orders(range(3))), 0)
    kept = broken(place)
    told = place.store().delete_consumer("shop", **SURE, dry_run=True)
    assert len(told.waiting) == 1 and "a sink of which nobody can tell what it shows" in told.waiting[0]
    with pytest.raises(Refused, match=r"sinks/orders.*--although-waiting"):
        place.store().delete_consumer("shop", **SURE | {"although_waiting": False})
    place.store().delete_consumer("shop", **SURE)
    assert place.store().consumers() == []
    repaired(kept)
    assert consumer(place.store())(batch(*orders(range(3))), 0).processed == 3
    assert len(place.read()) == 6
    assert_proven(place.store())


@pytest.mark.full
def test_one_whose_sink_has_all_of_it_is_deleted_although_the_sink_cannot_be_read(place: DeltaPlace) -> None:
    """The ledger knows that no decision waits for it."""
    consumer(place.store())(batch(*orders(range(3))), 0)
    place.store().amend("shop", changes.accept_gap, by="ann", reason="a decision behind it")
    broken(place)
    assert place.store().delete_consumer("shop", **SURE, dry_run=True).waiting == ()
    place.store().delete_consumer("shop", **SURE)
    assert place.store().consumers() == []


@pytest.mark.full
def test_a_reset_gives_up_what_a_sink_out_of_reach_does_not_show(place: DeltaPlace, caplog: pytest.LogCaptureFixture) -> None:
    """The events come again. So rows of the old life do not come up in the sink when it is back, and the log says which decision it was."""
    kept = list[Path]()

    def step(name: str) -> None:
        if name == "publish":
            kept.append(broken(place))

    with pytest.raises(DedupError):
        consumer(place.store(on_step=step))(batch(*orders(range(3))), 0)
    place.store().amend("shop", changes.reset, by="ann", reason="again")
    repaired(kept[0])
    assert "decisions [2] are not published, and given up" in caplog.text
    assert consumer(place.store())(batch(*orders(range(3))), 1).processed == 3
    assert sorted(ids(place.read())) == [f"p0-{n}" for n in range(3)]
    assert_proven(place.store())


@pytest.mark.parametrize(
    "error", of_which(1, [DeltaError("Generic S3 error: 503 SlowDown"), CommitFailedError("Failed to commit transaction: 7")])
)
def test_a_reset_gives_nothing_up_that_the_next_call_may_publish(
    place: DeltaPlace, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink that can be read and does not take rows now, or that others commit to, is no reason: the command says so."""

    def refuses(*_: Any, **__: Any) -> None:
        raise error

    def step(name: str) -> None:
        if name == "publish":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consumer(place.store(on_step=step))(batch(*orders(range(3))), 0)
    with monkeypatch.context() as busy, pytest.raises(StoreUnavailable):
        busy.setattr(SinkPublisher, "_add", refuses)
        busy.setattr(SinkPublisher, "sleep", lambda self, seconds: None)
        place.store().amend("shop", changes.reset, by="ann", reason="again")
    place.store().amend("shop", changes.reset, by="ann", reason="again")
    assert len(place.read()) == 3


@pytest.mark.full
def test_one_whose_own_tables_cannot_be_read_is_not_deleted(place: DeltaPlace) -> None:
    """Then the store is away, and not a sink: nothing is given up for that."""
    used(place)
    shutil.move(place.folder / "state" / "dead_letters" / "shop" / "_delta_log", place.folder / "kept")
    (place.folder / "state" / "dead_letters" / "shop" / "_delta_log").mkdir()
    (place.folder / "state" / "dead_letters" / "shop" / "_delta_log" / f"{0:020}.json").write_text("{broken")
    with pytest.raises(StoreUnavailable):
        place.store().delete_consumer("shop", **SURE)
    with pytest.raises(StoreUnavailable):
        place.store().amend("shop", changes.reset, by="ann", reason="again")
