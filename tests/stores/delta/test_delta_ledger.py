"""What the ledger holds: letters, batch records, reservations and the epoch, and that upkeep changes no answer."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError

from checkpoint.errors import (
    ConfigError,
    StillHeld,
    StoreUnavailable,
)
from checkpoint.head import Holder
from checkpoint.position import Partition, Ranges
from deadletter.selection import Selection
from deadletter.store import KEYS, Commit
from dedup.delta import state
from dedup.delta import store as of_store
from dedup.delta.engine import DeltaRs
from dedup.delta.ledger import SCHEMA
from dedup.delta.outbox import MessageWrites
from dedup.delta.snapshot import Snapshot
from dedup.pipeline.member import Member
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.delta_kit import NAME, ledger, open_store, show
from kit.orders import batch, consumer, orders
from kit.outgoing import made

pytestmark = pytest.mark.delta


def test_the_ledger_says_its_properties(folder: Path) -> None:
    """Catalogs have other defaults: what the protocol needs is set explicitly, and the forbidden property is not."""
    kit.epoch(open_store(folder))
    settings = ledger(folder).metadata().configuration
    assert settings["delta.enableDeletionVectors"] == "false" and settings["delta.checkpointInterval"] == "50"
    assert not any("setTransactionRetention" in name for name in settings)


@pytest.mark.full
def test_processes_that_are_no_more_are_forgotten_one_day(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those killed on hosts that are gone look like living ones, and each decision repeats them: only the last that joined stay."""
    monkeypatch.setattr(of_store, "MEMBERS", 3)
    skipping = consumer(open_store(folder), query=None)
    skipping._handler = lambda rows, tx: None
    first = Member(skipping.job())
    first.join()
    assignment, store = first.claim(Partition("broker", "orders", 0)), open_store(folder)
    others = [Holder(f"host-{n}", 1, "0", f"run-{n}") for n in range(5)]
    for other in others:
        store.join(NAME, other, takeover_after=0.1)
    assert store._states.header(NAME).members == tuple(others[-3:])
    assert first.process(assignment, batch(*orders(range(3)))).processed == 3, "who is not on record any more commits as before"


def test_of_many_creators_of_a_table_one_wins(folder: Path) -> None:
    """Processes that start at once meet one ledger: its first commit stays the only one, and none gives it another table id."""
    engine = DeltaRs(None)
    with ThreadPoolExecutor(4) as creators:
        for n in range(25):
            uri, together = str(folder / f"raced{n}"), threading.Barrier(4)

            def create(uri: str = uri, together: threading.Barrier = together) -> str:
                together.wait()
                engine.create(uri, SCHEMA, "raced", {})
                return str(DeltaTable(uri).metadata().id)

            assert len({ids.result() for ids in [creators.submit(create) for _ in range(4)]}) == 1
            assert DeltaTable(uri).version() == 0


def test_a_store_travels_and_knows_the_same(folder: Path) -> None:
    """Pickled while in use: settings travel, what was read is read again."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    copy = pickle.loads(pickle.dumps(store))
    assert copy.head(kit.NAME) == store.head(kit.NAME)
    assert kit.process(copy, number, kit.events([1, 2], 1), 1).written == [2]


def test_a_look_that_fails_in_the_middle_forgets_nothing(folder: Path) -> None:
    """Whichever file of the ledger cannot be read once: the next look of the same process knows every key and position, also held keys."""
    writer, watchers = open_store(folder), [open_store(folder) for _ in range(40)]
    number = kit.epoch(writer)
    kit.process(writer, number, kit.events([1, 2]), 0)
    assert {watcher.reserved(kit.NAME) for watcher in watchers} == {2}
    kit.process(writer, number, kit.events([3, 4], 2), 1, reject=lambda key: key == 4)
    told = 0
    for path in (folder / "state" / "ledger").rglob("*.parquet"):
        for store in (watchers.pop(), open_store(folder)):
            away = path.rename(path.with_suffix(".away"))
            with contextlib.suppress(StoreUnavailable):
                told -= 1
                store.reserved(kit.NAME)
                told += 1
            away.rename(path)
            assert store.reserved(kit.NAME) == 4
            with store.begin(kit.NAME, number) as transaction:
                known = transaction.reserve(pa.table([[kit.key_bytes(n) for n in (1, 2, 3, 4)], [0] * 4], schema=KEYS))
                assert known.num_rows == 4 and transaction.seen({kit.partition(0): (0, 3)}) == {kit.partition(0): Ranges.of([(0, 3)])}
    assert told < -5, "most files are read by one look or the other"


def test_an_empty_batch_is_decided_without_touching_a_sink(folder: Path) -> None:
    """The batch id is recorded; no file, no sink commit."""
    store = open_store(folder)
    number = kit.epoch(store)
    version = DeltaTable(str(folder / "orders")).version()
    kit.process(store, number, [], 7)
    assert store.head(kit.NAME).batch_id == 7 and DeltaTable(str(folder / "orders")).version() == version


def test_a_transaction_that_does_not_commit_leaves_nothing(folder: Path) -> None:
    """Reservations, rows and letters of a handler that raised are not there; its files are invisible."""
    store = open_store(folder)
    number = kit.epoch(store)

    def boom(_key: int) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kit.process(store, number, kit.events([1]), reject=boom)
    assert show(folder) == [] and store.reserved(kit.NAME) == 0 and store.head(kit.NAME).seq == 1


def test_letters_hold_their_keys_and_count_duplicates(folder: Path) -> None:
    """An event with a held key is a duplicate that its letter counts; those of written keys are not; nothing is counted twice."""
    store = open_store(folder)
    number = kit.epoch(store)
    assert kit.process(store, number, kit.events([1, 2, 1])).duplicates == [1]
    kit.process(store, number, kit.events([5, 6, 5], 3), 1, reject=lambda key: key == 5)
    kit.process(store, number, kit.events([5, 6, 5, 1], 6), 2)
    (letter,) = open_store(folder).letters(Selection(consumer=kit.NAME)).to_pylist()
    assert (letter["sequence_number"], letter["duplicates"], letter["status"]) == (3, 3, "OPEN")
    assert show(folder) == [1, 2, 6]
    assert store.problems(kit.NAME) == []


def test_a_letter_that_is_parked_again_is_one_letter(folder: Path) -> None:
    """The same id twice, even if a caller parks it twice, is shown once, as it was first."""
    from deadletter.store import Park

    store = open_store(folder)
    number = kit.epoch(store)
    for _ in range(2):
        with store.begin(kit.NAME, number) as tx:
            tx.execute(Park(kit.letters(tx.head, kit.events([1]))))
            tx.execute(Commit())
    assert open_store(folder).letters(Selection()).num_rows == 1
    assert open_store(folder).reserved(kit.NAME) == 1


def test_letters_are_selected_by_everything_that_is_asked(folder: Path) -> None:
    """All conditions must match; id may be a prefix; limit bounds the answer."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events(range(6)), reject=lambda key: True)
    all_of_them = store.letters(Selection())
    assert all_of_them["sequence_number"].to_pylist() == list(range(6))
    assert store.letters(Selection(first=2, last=4, kind="REJECTED"))["sequence_number"].to_pylist() == [2, 3, 4]
    assert store.letters(Selection(id=all_of_them["id"][3].as_py()[:20]))["sequence_number"].to_pylist() == [3]
    assert store.letters(Selection(limit=2)).num_rows == 2
    assert store.letters(Selection(kind="NO_KEY")).num_rows == store.letters(Selection(consumer="nobody")).num_rows == 0


def test_batches_come_back_as_they_were_recorded(folder: Path) -> None:
    """Batch records with generation, epoch and seq, in order."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, [*kit.events([1, 2]), *kit.events([3], number=1)], 4)
    found = open_store(folder).batches(kit.NAME).to_pylist()
    assert [(b["partition"], b["seen"], b["batch_id"], b["epoch"], b["seq"]) for b in found] == [
        (0, [{"first": 0, "last": 1}], 4, 1, 2),
        (1, [{"first": 0, "last": 0}], 4, 1, 2),
    ]


@pytest.mark.full
def test_a_summary_stands_for_the_batches_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process that begins to read at the newest summary knows every seen position all the same."""
    monkeypatch.setattr(state, "SUMMARY_EVERY", 3)
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(11):
        kit.process(store, number, kit.events([i], 2 * i), i)
    fresh = open_store(folder)
    with fresh.begin(kit.NAME, number) as tx:
        seen = tx.seen({kit.partition(0): (0, 100)})
    assert [r.first for r in seen[kit.partition(0)].items] == [2 * i for i in range(11)]
    assert len(fresh._states.of(kit.NAME).decided) < 6, "it read the whole log"


@pytest.mark.full
def test_a_consumer_of_any_name_has_a_folder_of_its_own(folder: Path) -> None:
    """Names that no file system likes come back as they were given."""
    store = open_store(folder)
    names = ["a/b", "..", "_x", "ä ö", "A", "a~b", "a%2Fb"]
    process = kit.this_process()
    for name in names:
        store.take_epoch(name, Holder(*process, "r"), takeover_after=0.1)
    assert open_store(folder).consumers() == sorted(names)


def test_a_name_too_long_for_a_folder_is_refused(folder: Path) -> None:
    """Other letters than a-z take six bytes and more of a folder's name: a name that cannot be one is refused before anything is made."""
    with pytest.raises(ConfigError, match=r"1200 bytes.*at most 200.*Shorten the name"):
        open_store(folder).take_epoch("é" * 200, Holder(*kit.this_process(), "r"), takeover_after=0.1)
    assert open_store(folder).consumers() == []


def test_a_live_holder_is_not_taken_over_while_it_beats(folder: Path) -> None:
    """An unknowable holder with a heartbeat is waited for, then StillHeld names it; force takes over."""
    one, two = open_store(folder), open_store(folder)
    stranger = Holder("elsewhere", 7, "boot/ns/1", "r")
    one.take_epoch(kit.NAME, stranger, takeover_after=0.1)
    waits: list[str] = []
    with one.heartbeat(kit.NAME, 1, every=0.02), pytest.raises(StillHeld, match="process 7 on elsewhere"):
        kit.epoch(two, takeover_after=0.3, on_wait=lambda seconds, who: waits.append(who))
    assert waits and two.head(kit.NAME).epoch == 1
    with one.heartbeat(kit.NAME, 1, every=0.02):
        assert kit.epoch(two, takeover_after=60, force=True) == 2


def test_a_silent_holder_is_taken_over_after_the_time(folder: Path) -> None:
    """No heartbeat and no commit for `takeover_after`: the epoch changes hands."""
    one, two = open_store(folder), open_store(folder)
    one.take_epoch(kit.NAME, Holder("elsewhere", 7, "", "r"), takeover_after=0.1)
    waits: list[float] = []
    assert kit.epoch(two, takeover_after=0.2, on_wait=lambda seconds, who: waits.append(seconds)) == 2
    assert waits


def test_a_holder_that_is_provably_gone_is_taken_over_at_once(folder: Path) -> None:
    """Same host, same boot, and no process of that start time: nobody waits."""
    process = kit.this_process()
    gone = Holder(process.host, process.pid, process.started.rpartition("/")[0] + "/1", "r")
    one, two = open_store(folder), open_store(folder)
    one.take_epoch(kit.NAME, gone, takeover_after=0.1)

    def never(_seconds: float, _who: str) -> None:
        raise AssertionError("waited for a dead process")

    assert kit.epoch(two, takeover_after=3600, on_wait=never) == 2


def test_purged_reservations_are_forgotten_and_held_keys_are_not(folder: Path) -> None:
    """A whole day goes by metadata; letters keep their keys; positions stay redeliveries; the problems stay empty."""
    import datetime as dt

    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1, 2, 3]), reject=lambda key: key == 3)
    store.purge(kit.NAME, dt.date.today() + dt.timedelta(days=2), by="me", reason="retention", although_behind=True)
    fresh = open_store(folder)
    assert fresh.reserved(kit.NAME) == 1 and fresh.problems(kit.NAME) == []
    assert fresh.head(kit.NAME).floors == {kit.partition(0): 2}
    assert kit.process(fresh, number, kit.events([1, 2, 3]), 1).written == []
    assert kit.process(fresh, number, kit.events([1, 3], 3), 2) == kit.Outcome([1], [], [3])


@pytest.mark.full
def test_maintenance_changes_no_answer(folder: Path) -> None:
    """Compaction of ledger and letters leaves every row; the next process reads few files."""
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(5):
        kit.process(store, number, kit.events([2 * i, 2 * i + 1], 2 * i), i, reject=lambda key: key % 2 == 0)
    before = (store.letters(Selection()), store.batches(kit.NAME), store.reserved(kit.NAME))
    store.maintain(kit.NAME)
    fresh = open_store(folder)
    assert (fresh.letters(Selection()), fresh.batches(kit.NAME), fresh.reserved(kit.NAME)) == before
    assert len(ledger(folder).file_uris()) == 3 and fresh.problems(kit.NAME) == []


def test_a_running_consumer_keeps_its_files_few(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so many decisions ledger and letters are compacted and cleaned, with nothing lost."""
    from dedup.delta import upkeep

    monkeypatch.setattr(upkeep, "COMPACT_EVERY", 4)
    monkeypatch.setattr(upkeep, "VACUUM_EVERY", 8)
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(16):
        kit.process(store, number, kit.events([2 * i, 2 * i + 1], 2 * i), i, reject=lambda key: key % 2 == 1)
    assert len(ledger(folder).file_uris()) < 8 and open_store(folder).letters(Selection()).num_rows == 16
    assert open_store(folder).problems(kit.NAME) == [] and open_store(folder).reserved(kit.NAME) == 32


@pytest.mark.full
def test_a_running_consumer_deletes_files_that_a_checkpoint_has_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the time of a replaced file is over, a new checkpoint does not name it any more: only a look at the folder finds it."""
    from dedup.delta import upkeep

    monkeypatch.setattr(upkeep, "COMPACT_EVERY", 4)
    monkeypatch.setattr(upkeep, "VACUUM_EVERY", 8)
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(1, 17):
        if i == 14:
            replaced = set((folder / "state/ledger/shop").rglob("*.parquet")) - {Path(uri) for uri in ledger(folder).file_uris()}
            ledger(folder).alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 hours"})
            ledger(folder).create_checkpoint()
        kit.process(store, number, kit.events([i], i), i)
    assert len(replaced) > 8 and not any(path.exists() for path in replaced if path.parent.name != "_delta_log")
    assert open_store(folder).problems(kit.NAME) == [] and open_store(folder).reserved(kit.NAME) == 16


def test_the_last_large_file_is_not_written_anew_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most compactions leave it alone, so that what a table grows by is not written a hundred times over; one of sixteen takes it."""
    from dedup.delta import upkeep

    targets: list[int] = []
    monkeypatch.setattr(upkeep, "compact", lambda uri, engine, target: targets.append(target))
    monkeypatch.setattr(upkeep, "vacuum", lambda uri, engine: None)
    for seq in range(1, 2 * upkeep.LARGE_EVERY + 1):
        upkeep.after_decision(seq, ["one"], None)  # type: ignore[arg-type]
    assert [targets.count(upkeep.TARGET_BYTES), targets.count(upkeep.YOUNG_BYTES)] == [2, 30]


def test_a_decision_ends_where_the_ledger_could_not_be_read_in_between(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names tables by the ledger's id: without a snapshot that is an outage, and no message goes into a table of another name."""
    store = open_store(folder)
    kit.process(store, kit.epoch(store), kit.events([1]))
    known = store._states.of(kit.NAME)
    monkeypatch.setattr(known.ledger, "open", raising(StoreUnavailable("away")))
    with pytest.raises(StoreUnavailable, match="away"):
        known.catch_up()
    for named in (lambda: known.app(0, "orders"), lambda: MessageWrites(known, None).add(made(1, 1))):
        with pytest.raises(StoreUnavailable, match="could not be read the last time"):
            named()


@pytest.mark.parametrize("error", of_which(1, [DeltaError("503 Slow Down"), OSError("connection reset")]))
@pytest.mark.parametrize("read", ["get_add_actions", "to_pyarrow_dataset"])
def test_a_log_that_cannot_be_read_now_is_an_outage(folder: Path, monkeypatch: pytest.MonkeyPatch, read: str, error: Exception) -> None:
    """A stream waits for storage that is away for a moment: what delta-rs raises there, of ledger or letters, is StoreUnavailable."""
    store = open_store(folder)
    kit.process(store, kit.epoch(store), kit.events([1]), reject=lambda key: True)
    with monkeypatch.context() as away:
        away.setattr(Snapshot, read, raising(error), raising=False)
        with pytest.raises(StoreUnavailable, match=str(error)):
            open_store(folder).letters(Selection())
    assert open_store(folder).letters(Selection()).num_rows == 1


def raising(error: Exception) -> Callable[..., Any]:
    """A function that does nothing else."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_header_survives_its_own_text(folder: Path) -> None:
    """Every field of the last header comes back from JSON; a foreign transaction in the ledger's log changes nothing."""
    from dedup.delta.ledger import Header

    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    DeltaTable(str(folder / "state/ledger/shop")).create_write_transaction(
        [],
        "append",
        ledger(folder).schema(),
        ["section", "day"],
        commit_properties=CommitProperties(app_transactions=[Transaction("foreign", 1)]),
    )
    header = store._states.of(kit.NAME).header
    assert Header.from_json(header.to_json()) == header
    assert json.loads(header.to_json())["head"]["checkpoints"] == [["broker", "orders", 0, 0, None, None, "q", False]]


@pytest.mark.full
def test_people_may_ask_from_another_thread_while_a_batch_runs(folder: Path) -> None:
    """One store object, a stream in one thread and a person in another: every answer is of a decided state, nothing breaks."""
    from concurrent.futures import ThreadPoolExecutor

    store = open_store(folder)
    number = kit.epoch(store)

    def ask(_: int) -> tuple[int, int | None]:
        return store.head(kit.NAME).seq, store.reserved(kit.NAME)

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, i) for i in range(40)]
        for i in range(12):
            kit.process(store, number, kit.events([2 * i, 2 * i + 1], 2 * i), i)
        assert all(reserved is not None and 0 <= reserved <= 24 and seq >= 1 for seq, reserved in (a.result() for a in answers))
    assert store.problems(kit.NAME) == [] and show(folder) == list(range(24))
