"""The ledger decides: who wins a number, what a lost answer means, and what a ledger that was tampered with is told."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import delta_kit as kit
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError

from checkpoint.errors import (
    CommitConflict,
    CommitUnknown,
    ConfigError,
    Fenced,
    SchemaOutdated,
    StateTooNew,
    StillHeld,
    StoreRestored,
    StoreUnavailable,
)
from dedup import amendments
from dedup.delta import DeltaStore, decide, state, tables
from dedup.steps import Commit
from dedup.store import Holder, Selection

pytestmark = pytest.mark.delta


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with one sink."""
    kit.create(str(tmp_path / "orders"))
    return tmp_path


def open_store(place: Path, **options: Any) -> DeltaStore:
    """What a new process would open."""
    return DeltaStore(str(place / "state"), tables={"orders": str(place / "orders")}, **options)


def ledger(place: Path) -> DeltaTable:
    """The ledger's table."""
    return DeltaTable(str(place / "state" / "ledger" / kit.NAME))


def show(place: Path) -> list[int]:
    """The sink."""
    return kit.ids(str(place / "orders"))


def test_a_commit_against_an_old_snapshot_fails_even_for_another_app_id(tmp_path: Path) -> None:
    """What all of it rests on: with exact=True any commit in between makes delta-rs refuse; nothing is rebased silently."""
    kit.create(str(tmp_path / "t"))
    one, two = DeltaTable(str(tmp_path / "t")), DeltaTable(str(tmp_path / "t"))
    tables.commit(one, [], {"a": 1}, exact=True)
    with pytest.raises(CommitFailedError):
        tables.commit(two, [], {"a": 1}, exact=True)
    with pytest.raises(CommitFailedError):
        tables.commit(two, [], {"b": 1}, exact=True)
    with pytest.raises(CommitFailedError):
        tables.commit(two, [], {"a": 1}, exact=False)  # the same app id conflicts even where foreign commits do not
    tables.commit(two, [], {"b": 1}, exact=False)
    assert DeltaTable(str(tmp_path / "t")).version() == 2


def test_a_fresh_handle_would_write_a_version_again(tmp_path: Path) -> None:
    """Why a commit belongs to the snapshot it was planned on: delta-rs does not skip a transaction id that it can already see."""
    kit.create(str(tmp_path / "t"))
    for _ in range(2):
        tables.commit(DeltaTable(str(tmp_path / "t")), [], {"a": 1}, exact=True)
    assert DeltaTable(str(tmp_path / "t")).version() == 2


def test_two_copies_never_decide_one_number(place: Path) -> None:
    """The second of two open transactions is told to plan again, and none of its rows appear."""
    one, two = open_store(place), open_store(place)
    number = kit.epoch(one)
    with pytest.raises(CommitConflict, match="Decision 2"), two.begin(kit.NAME, number) as late:
        kit.process(one, number, kit.events([1, 2]))
        late.execute(Commit())
    assert show(place) == [1, 2]
    assert kit.process(two, number, kit.events([1, 2])).written == []
    assert one.problems(kit.NAME) == []


def test_a_copy_with_an_older_epoch_is_fenced_before_and_at_the_commit(place: Path) -> None:
    """Fenced names who took over; nothing of the older copy is decided."""
    old, new = open_store(place), open_store(place)
    number = kit.epoch(old)
    with pytest.raises(Fenced, match=r"process \d+ on .*epoch 2"), old.begin(kit.NAME, number) as tx:
        kit.epoch(new)
        tx.execute(Commit())
    with pytest.raises(Fenced), old.begin(kit.NAME, number):
        pass
    assert kit.process(new, number + 1, kit.events([1])).written == [1]


Commit_ = Callable[..., None]


def failing(error: Exception, *, landed: bool, app_suffix: str, real: Commit_ = tables.commit) -> Commit_:
    """A commit function whose first call for that app id raises, after or instead of committing."""
    left = [1]

    def commit(table: DeltaTable, adds: Any, transactions: dict[str, int], **options: Any) -> None:
        if any(app.endswith(app_suffix) for app in transactions) and left:
            left.pop()
            if landed:
                real(table, adds, transactions, **options)
            raise error
        real(table, adds, transactions, **options)

    return commit


@pytest.mark.parametrize("error", [CommitFailedError("conflict with itself"), OSError("connection reset")], ids=["refused", "i/o"])
@pytest.mark.parametrize("where", ["/0", "/orders"], ids=["ledger", "sink"])
def test_an_answer_that_was_lost_after_the_commit_landed_changes_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    """The header read back carries our attempt id: the batch is committed, once."""
    store = open_store(place)
    number = kit.epoch(store)
    monkeypatch.setattr(tables, "commit", failing(error, landed=True, app_suffix=where))
    assert kit.process(store, number, kit.events([1, 2])).written == [1, 2]
    assert show(place) == [1, 2]
    assert store.problems(kit.NAME) == [] and open_store(place).reserved(kit.NAME) == 2


def test_a_commit_that_failed_before_it_landed_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger does not show it: the batch is undone, and runs again."""
    store = open_store(place)
    number = kit.epoch(store)
    monkeypatch.setattr(tables, "commit", failing(OSError("disk full"), landed=False, app_suffix="/0"))
    with pytest.raises(StoreUnavailable, match="disk full"):
        kit.process(store, number, kit.events([1, 2]))
    assert show(place) == [] and store.reserved(kit.NAME) == 0
    assert kit.process(store, number, kit.events([1, 2])).written == [1, 2]
    assert show(place) == [1, 2]


def test_a_commit_that_cannot_be_read_back_is_unknown_and_safe_to_repeat(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CommitUnknown; the next look at the ledger shows the truth, and the batch is found decided."""
    store = open_store(place)
    number = kit.epoch(store)
    real = state.ConsumerState.catch_up
    broken: list[int] = []

    def catch_up(self: state.ConsumerState) -> None:
        if broken:
            raise StoreUnavailable("no network")
        real(self)

    def commit(table: DeltaTable, adds: Any, transactions: dict[str, int], **options: Any) -> None:
        real_commit(table, adds, transactions, **options)
        broken.append(1)
        raise OSError("no network")

    real_commit = tables.commit
    with monkeypatch.context() as patch:
        patch.setattr(tables, "commit", commit)
        patch.setattr(state.ConsumerState, "catch_up", catch_up)
        with pytest.raises(CommitUnknown):
            kit.process(store, number, kit.events([1, 2]))
    assert kit.process(store, number, kit.events([1, 2])).written == []
    assert show(place) == [1, 2] and store.problems(kit.NAME) == []


def test_a_compaction_in_between_does_not_disturb_a_decision(place: Path) -> None:
    """Commits that decide nothing are stepped over; rewritten files are not read as new."""
    store = open_store(place)
    number = kit.epoch(store)
    for i in range(4):
        kit.process(store, number, kit.events([10 * i, 10 * i + 1], 2 * i), i)
    with store.begin(kit.NAME, number) as tx:
        ledger(place).optimize.compact()
        tx.execute(Commit())
    assert store.head(kit.NAME).seq == 6
    assert store.reserved(kit.NAME) == open_store(place).reserved(kit.NAME) == 8
    assert open_store(place).problems(kit.NAME) == []


def test_foreign_decisions_are_read_in_before_planning(place: Path) -> None:
    """Keys that another process reserved under the same epoch are known; a person's amendment shows in the head."""
    one, two = open_store(place), open_store(place)
    number = kit.epoch(one)
    kit.process(one, number, kit.events([1]))
    kit.process(two, number, kit.events([2], 1), 1)
    two.amend(kit.NAME, amendments.accept_gap, by="me", reason="test")
    assert kit.process(one, number, kit.events([1, 2, 3], 2), 2).written == [3]
    assert one.head(kit.NAME).gap_accepted is False and one.head(kit.NAME).seq == 5


def test_a_restored_ledger_is_refused_until_a_person_accepts(place: Path) -> None:
    """RESTORE keeps transaction ids and takes rows back: that they disagree is noticed, by old copies and by new ones."""
    running = open_store(place)
    number = kit.epoch(running)
    for i in range(3):
        kit.process(running, number, kit.events([i], i), i)
    ledger(place).restore(3)  # of the versions 0: create, 1: epoch, 2-4: batches
    for store in (running, open_store(place)):
        with pytest.raises(StoreRestored, match="accept-restore shop"), store.begin(kit.NAME, number):
            pass
        with pytest.raises(StoreRestored):
            kit.epoch(store)
    assert "restored" in open_store(place).problems(kit.NAME)[0]
    with pytest.raises(StoreRestored):
        open_store(place).amend(kit.NAME, amendments.accept_gap, by="me", reason="this does not accept it")
    head = open_store(place).amend(kit.NAME, amendments.accept_restore, by="me", reason="backup")
    assert (head.generation, head.seq) == (1, 4)
    fresh = open_store(place)
    number = kit.epoch(fresh)
    assert kit.process(fresh, number, kit.events([2], 2), 2).written == [
        2
    ]  # its reservation was lost with the restore, and its row doubles: a person said so
    assert open_store(place).problems(kit.NAME) == []


def test_a_restore_to_an_older_generation_is_noticed(place: Path) -> None:
    """The old generation's transaction id moves on with the change of generation: its last state is not taken for the present one."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    before = ledger(place).version()
    store.amend(kit.NAME, amendments.reset, by="me", reason="again")
    ledger(place).restore(before)
    with pytest.raises(StoreRestored):
        kit.epoch(open_store(place))


def test_a_ledger_that_is_deleted_or_replaced_stops_a_running_copy(place: Path) -> None:
    """Nothing is decided in an empty ledger by a copy that knew a full one."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    shutil.rmtree(place / "state" / "ledger")
    with pytest.raises(StoreRestored, match="deleted or re-created"), store.begin(kit.NAME, number):
        pass
    other = open_store(place)
    for i in range(6):  # longer than the old one
        kit.epoch(other, run_id=str(i))
    with pytest.raises(StoreRestored, match="deleted or re-created"), store.begin(kit.NAME, number):
        pass


def test_a_lost_header_is_named(place: Path) -> None:
    """Somebody deleted rows of the ledger: problems says which decisions, and a new process refuses."""
    store = open_store(place)
    number = kit.epoch(store)
    for i in range(3):
        kit.process(store, number, kit.events([i], i), i)
    ledger(place).delete("seq = 3 and section = 'log'")
    told = open_store(place).problems(kit.NAME)
    assert any("[3] have no header" in line for line in told)
    with pytest.raises(StoreRestored), open_store(place).begin(kit.NAME, number):
        pass


def test_doubled_reservations_are_a_problem(place: Path) -> None:
    """A key that stands in the ledger twice, and a decision with more rows than it says, are both told."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1, 2]))
    rows = ledger(place).to_pyarrow_table(filters=[("section", "=", "keys")])
    from deltalake import write_deltalake

    write_deltalake(ledger(place), rows.slice(0, 1), mode="append")
    told = open_store(place).problems(kit.NAME)
    assert any("1 keys are reserved more than once" in line for line in told)
    assert any("decision 2 reserved 2 keys and the ledger has 3 rows" in line for line in told)


def test_a_property_that_forgets_transactions_is_refused(place: Path) -> None:
    """delta.setTransactionRetentionDuration on the ledger is refused at start, with the command that takes it off."""
    kit.epoch(open_store(place))
    ledger(place).alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 1 days"})
    with pytest.raises(ConfigError, match="UNSET TBLPROPERTIES"):
        kit.epoch(open_store(place))


def test_the_ledger_says_its_properties(place: Path) -> None:
    """Catalogs have other defaults: what the protocol needs is set explicitly, and the forbidden property is not."""
    kit.epoch(open_store(place))
    settings = ledger(place).metadata().configuration
    assert settings["delta.enableDeletionVectors"] == "false" and settings["delta.checkpointInterval"] == "50"
    assert not any("setTransactionRetention" in name for name in settings)


def test_a_newer_state_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older library does not touch what a newer one wrote."""
    from dedup.delta import header

    with monkeypatch.context() as patch:
        patch.setattr(header, "STATE_VERSION", header.STATE_VERSION + 1)
        kit.epoch(open_store(place))
    for act in (DeltaStore.migrate, kit.epoch):
        with pytest.raises(StateTooNew, match="Upgrade"):
            act(open_store(place))


def test_an_older_state_is_refused_before_anything_is_compared_or_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State that cannot be converted is no restored store: every way in says so, advises no repair, and changes nothing."""
    from dedup.delta import header

    with monkeypatch.context() as patch:
        patch.setattr(header, "STATE_VERSION", 3)
        store = open_store(place)
        kit.process(store, kit.epoch(store), kit.events([1]))
    before, sinks = ledger(place).version(), DeltaTable(str(place / "orders")).version()
    ways: tuple[Callable[[DeltaStore], object], ...] = (
        kit.epoch,
        lambda store: store.head(kit.NAME),
        lambda store: store.publish(kit.NAME),
        lambda store: store.problems(kit.NAME),
        lambda store: store.letters(Selection(consumer=kit.NAME)),
        lambda store: store.amend(kit.NAME, amendments.accept_restore, by="me", reason=""),
        lambda store: store.accept_sink(kit.NAME, "orders", by="me", reason=""),
        lambda store: store.outbox(kit.NAME).lag(),
        DeltaStore.migrate,
    )
    for act in ways:
        with pytest.raises(SchemaOutdated, match=r"no conversion.*new store folder and a new consumer"):
            act(open_store(place))
    assert (ledger(place).version(), DeltaTable(str(place / "orders")).version()) == (before, sinks)


def test_a_store_travels_and_knows_the_same(place: Path) -> None:
    """Pickled while in use: settings travel, what was read is read again."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    copy = pickle.loads(pickle.dumps(store))
    assert copy.head(kit.NAME) == store.head(kit.NAME)
    assert kit.process(copy, number, kit.events([1, 2], 1), 1).written == [2]


def test_an_empty_batch_is_decided_without_touching_a_sink(place: Path) -> None:
    """The batch id is recorded; no file, no sink commit."""
    store = open_store(place)
    number = kit.epoch(store)
    version = DeltaTable(str(place / "orders")).version()
    kit.process(store, number, [], 7)
    assert store.head(kit.NAME).batch_id == 7 and DeltaTable(str(place / "orders")).version() == version


def test_a_transaction_that_does_not_commit_leaves_nothing(place: Path) -> None:
    """Reservations, rows and letters of a handler that raised are not there; its files are invisible."""
    store = open_store(place)
    number = kit.epoch(store)

    def boom(_key: int) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kit.process(store, number, kit.events([1]), reject=boom)
    assert show(place) == [] and store.reserved(kit.NAME) == 0 and store.head(kit.NAME).seq == 1


def test_letters_hold_their_keys_and_count_copies(place: Path) -> None:
    """A copy of a held key is a duplicate that its letter counts; copies of written keys are not; nothing is counted twice."""
    store = open_store(place)
    number = kit.epoch(store)
    assert kit.process(store, number, kit.events([1, 2, 1])).duplicates == [1]
    kit.process(store, number, kit.events([5, 6, 5], 3), 1, reject=lambda key: key == 5)
    kit.process(store, number, kit.events([5, 6, 5, 1], 6), 2)
    (letter,) = open_store(place).letters(Selection(consumer=kit.NAME)).to_pylist()
    assert (letter["sequence_number"], letter["duplicates"], letter["status"]) == (3, 3, "OPEN")
    assert show(place) == [1, 2, 6]
    assert store.problems(kit.NAME) == []


def test_a_letter_that_is_parked_again_is_one_letter(place: Path) -> None:
    """The same id twice, even if a caller parks it twice, is shown once, as it was first."""
    from dedup.steps import Park

    store = open_store(place)
    number = kit.epoch(store)
    for _ in range(2):
        with store.begin(kit.NAME, number) as tx:
            tx.execute(Park(kit.letters(tx.head, kit.events([1]))))
            tx.execute(Commit())
    assert open_store(place).letters(Selection()).num_rows == 1
    assert open_store(place).reserved(kit.NAME) == 1


def test_letters_are_selected_by_everything_that_is_asked(place: Path) -> None:
    """All conditions must match; id may be a prefix; limit bounds the answer."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events(range(6)), reject=lambda key: True)
    all_of_them = store.letters(Selection())
    assert all_of_them["sequence_number"].to_pylist() == list(range(6))
    assert store.letters(Selection(first=2, last=4, kind="REJECTED"))["sequence_number"].to_pylist() == [2, 3, 4]
    assert store.letters(Selection(id=all_of_them["id"][3].as_py()[:20]))["sequence_number"].to_pylist() == [3]
    assert store.letters(Selection(limit=2)).num_rows == 2
    assert store.letters(Selection(kind="NO_KEY")).num_rows == store.letters(Selection(consumer="nobody")).num_rows == 0


def test_batches_come_back_as_they_were_recorded(place: Path) -> None:
    """Batch records with generation, epoch and seq, in order."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, [*kit.events([1, 2]), *kit.events([3], number=1)], 4)
    found = open_store(place).batches(kit.NAME).to_pylist()
    assert [(b["partition"], b["seen"], b["batch_id"], b["epoch"], b["seq"]) for b in found] == [
        (0, [{"first": 0, "last": 1}], 4, 1, 2),
        (1, [{"first": 0, "last": 0}], 4, 1, 2),
    ]


def test_a_summary_stands_for_the_batches_before_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process that begins to read at the newest summary knows every seen position all the same."""
    monkeypatch.setattr(state, "SUMMARY_EVERY", 3)
    store = open_store(place)
    number = kit.epoch(store)
    for i in range(11):
        kit.process(store, number, kit.events([i], 2 * i), i)
    fresh = open_store(place)
    with fresh.begin(kit.NAME, number) as tx:
        seen = tx.seen({kit.partition(0): (0, 100)})
    assert [r.first for r in seen[kit.partition(0)].items] == [2 * i for i in range(11)]
    assert len(fresh._states.of(kit.NAME).decided) < 6, "it read the whole log"


def test_a_consumer_of_any_name_has_a_folder_of_its_own(place: Path) -> None:
    """Names that no file system likes come back as they were given."""
    store = open_store(place)
    names = ["a/b", "..", "_x", "ä ö", "A", "a~b", "a%2Fb"]
    process = kit.this_process()
    for name in names:
        store.take_epoch(name, Holder(*process, "r"), takeover_after=0.1)
    assert open_store(place).consumers() == sorted(names)


def test_a_name_too_long_for_a_folder_is_refused(place: Path) -> None:
    """Other letters than a-z take six bytes and more of a folder's name: a name that cannot be one is refused before anything is made."""
    with pytest.raises(ConfigError, match=r"1200 bytes.*at most 200.*Shorten the name"):
        open_store(place).take_epoch("é" * 200, Holder(*kit.this_process(), "r"), takeover_after=0.1)
    assert open_store(place).consumers() == []


def test_a_live_holder_is_not_taken_over_while_it_beats(place: Path) -> None:
    """An unknowable holder with a heartbeat is waited for, then StillHeld names it; force takes over."""
    one, two = open_store(place), open_store(place)
    stranger = Holder("elsewhere", 7, "boot/ns/1", "r")
    one.take_epoch(kit.NAME, stranger, takeover_after=0.1)
    waits: list[str] = []
    with one.heartbeat(kit.NAME, 1, every=0.02), pytest.raises(StillHeld, match="process 7 on elsewhere"):
        kit.epoch(two, takeover_after=0.3, on_wait=lambda seconds, who: waits.append(who))
    assert waits and two.head(kit.NAME).epoch == 1
    with one.heartbeat(kit.NAME, 1, every=0.02):
        assert kit.epoch(two, takeover_after=60, force=True) == 2


def test_a_silent_holder_is_taken_over_after_the_time(place: Path) -> None:
    """No heartbeat and no commit for `takeover_after`: the epoch changes hands."""
    one, two = open_store(place), open_store(place)
    one.take_epoch(kit.NAME, Holder("elsewhere", 7, "", "r"), takeover_after=0.1)
    waits: list[float] = []
    assert kit.epoch(two, takeover_after=0.2, on_wait=lambda seconds, who: waits.append(seconds)) == 2
    assert waits


def test_a_holder_that_is_provably_gone_is_taken_over_at_once(place: Path) -> None:
    """Same host, same boot, and no process of that start time: nobody waits."""
    process = kit.this_process()
    gone = Holder(process.host, process.pid, process.started.rpartition("/")[0] + "/1", "r")
    one, two = open_store(place), open_store(place)
    one.take_epoch(kit.NAME, gone, takeover_after=0.1)

    def never(_seconds: float, _who: str) -> None:
        raise AssertionError("waited for a dead process")

    assert kit.epoch(two, takeover_after=3600, on_wait=never) == 2


def test_purged_reservations_are_forgotten_and_held_keys_are_not(place: Path) -> None:
    """A whole day goes by metadata; letters keep their keys; positions stay redeliveries; the problems stay empty."""
    import datetime as dt

    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1, 2, 3]), reject=lambda key: key == 3)
    store.purge(kit.NAME, dt.date.today() + dt.timedelta(days=2), by="me", reason="retention")
    fresh = open_store(place)
    assert fresh.reserved(kit.NAME) == 1 and fresh.problems(kit.NAME) == []
    assert fresh.head(kit.NAME).floors == {kit.partition(0): 2}
    assert kit.process(fresh, number, kit.events([1, 2, 3]), 1).written == []
    assert kit.process(fresh, number, kit.events([1, 3], 3), 2) == kit.Outcome([1], [], [3])


def test_maintenance_changes_no_answer(place: Path) -> None:
    """Compaction of ledger and letters leaves every row; the next process reads few files."""
    store = open_store(place)
    number = kit.epoch(store)
    for i in range(5):
        kit.process(store, number, kit.events([2 * i, 2 * i + 1], 2 * i), i, reject=lambda key: key % 2 == 0)
    before = (store.letters(Selection()), store.batches(kit.NAME), store.reserved(kit.NAME))
    store.maintain(kit.NAME)
    fresh = open_store(place)
    assert (fresh.letters(Selection()), fresh.batches(kit.NAME), fresh.reserved(kit.NAME)) == before
    assert len(ledger(place).file_uris()) == 3 and fresh.problems(kit.NAME) == []


def test_a_running_consumer_keeps_its_files_few(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so many decisions ledger and letters are compacted and cleaned, with nothing lost."""
    from dedup.delta import maintain

    monkeypatch.setattr(maintain, "COMPACT_EVERY", 4)
    monkeypatch.setattr(maintain, "VACUUM_EVERY", 8)
    store = open_store(place)
    number = kit.epoch(store)
    for i in range(16):
        kit.process(store, number, kit.events([2 * i, 2 * i + 1], 2 * i), i, reject=lambda key: key % 2 == 1)
    assert len(ledger(place).file_uris()) < 8 and open_store(place).letters(Selection()).num_rows == 16
    assert open_store(place).problems(kit.NAME) == [] and open_store(place).reserved(kit.NAME) == 32


def test_a_header_survives_its_own_text(place: Path) -> None:
    """Every field of the last header comes back from JSON; a foreign transaction in the ledger's log changes nothing."""
    from dedup.delta.header import Header

    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    DeltaTable(str(place / "state/ledger/shop")).create_write_transaction(
        [],
        "append",
        ledger(place).schema(),
        ["section", "day"],
        commit_properties=CommitProperties(app_transactions=[Transaction("foreign", 1)]),
    )
    header = store._states.of(kit.NAME).header
    assert Header.from_json(header.to_json()) == header
    assert json.loads(header.to_json())["head"]["checkpoints"] == [["broker", "orders", 0, 0, None, None, "q", False]]


def test_a_first_decision_does_not_follow_decisions_it_has_not_seen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that found no ledger, and comes back when there is one, plans again - although the newest snapshot would take its commit."""
    late, quick = open_store(place), open_store(place)
    real = decide.write_files

    def overtaken(known: state.ConsumerState, decision: Any) -> Any:
        if known is late._states.of(kit.NAME) and quick.head(kit.NAME).seq == 0:
            kit.process(quick, kit.epoch(quick), kit.events([1]))
        return real(known, decision)

    monkeypatch.setattr(decide, "write_files", overtaken)
    assert kit.epoch(late) == 2
    assert late.problems(kit.NAME) == [] and late.head(kit.NAME).seq == 3


def test_looking_at_the_state_inside_a_transaction_does_not_move_its_snapshot(place: Path) -> None:
    """A handler that asks its store for the head after a foreign decision is told to plan again, not to commit behind it."""
    one, two = open_store(place), open_store(place)
    number = kit.epoch(one)
    with pytest.raises(CommitConflict), one.begin(kit.NAME, number) as tx:
        kit.process(two, number, kit.events([1]))
        assert one.head(kit.NAME).seq == 2
        tx.execute(Commit())
    assert one.problems(kit.NAME) == []


def test_old_rows_in_a_rewritten_file_are_not_taken_for_new(place: Path) -> None:
    """A compaction merged known decisions with new ones: only the new ones are read in."""
    one, two = open_store(place), open_store(place)
    number = kit.epoch(one)
    kit.process(one, number, kit.events([1, 2]))
    kit.process(two, number, kit.events([3], 2), 1)
    ledger(place).optimize.compact()
    with one.begin(kit.NAME, number) as tx:
        assert tx.head.seq == 3
    assert one.problems(kit.NAME) == [] and one.reserved(kit.NAME) == 3


def test_a_restore_between_plan_and_commit_stops_the_commit(place: Path) -> None:
    """No transaction id conflicts with a RESTORE: that the commit goes against the planned snapshot, and no other, does."""
    store = open_store(place)
    number = kit.epoch(store)
    for i in range(2):
        kit.process(store, number, kit.events([i], i), i)
    with pytest.raises((CommitConflict, StoreRestored)), store.begin(kit.NAME, number) as tx:
        ledger(place).restore(2)
        tx.execute(Commit())
    assert "restored" in open_store(place).problems(kit.NAME)[0]
    with pytest.raises(StoreRestored), store.begin(kit.NAME, number):
        pass


def test_people_may_ask_from_another_thread_while_a_batch_runs(place: Path) -> None:
    """One store object, a stream in one thread and a person in another: every answer is of a decided state, nothing breaks."""
    from concurrent.futures import ThreadPoolExecutor

    store = open_store(place)
    number = kit.epoch(store)

    def ask(_: int) -> tuple[int, int | None]:
        return store.head(kit.NAME).seq, store.reserved(kit.NAME)

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, i) for i in range(40)]
        for i in range(12):
            kit.process(store, number, kit.events([2 * i, 2 * i + 1], 2 * i), i)
        assert all(reserved is not None and 0 <= reserved <= 24 and seq >= 1 for seq, reserved in (a.result() for a in answers))
    assert store.problems(kit.NAME) == [] and show(place) == list(range(24))
