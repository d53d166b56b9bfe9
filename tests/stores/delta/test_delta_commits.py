"""Of two instances one decides each number, whatever answer was lost and whoever commits in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from checkpoint import changes
from checkpoint.errors import (
    CommitConflict,
    CommitUnknown,
    Fenced,
    StoreRestored,
    StoreUnavailable,
)
from deadletter.store import Commit
from dedup.delta import commit, state, tables
from kit import delta_kit as kit
from kit.delta_kit import ledger, open_store, show

pytestmark = pytest.mark.delta


Commit_ = Callable[..., None]


def failing(error: Exception, *, landed: bool, app_suffix: str, real: Commit_ = tables.commit) -> Commit_:
    """A commit function whose first call for that app id raises, after or instead of committing."""
    left = [1]

    def commit(table: DeltaTable, adds: Any, transactions: dict[str, int], **options: Any) -> int:
        if any(app.endswith(app_suffix) for app in transactions) and left:
            left.pop()
            if landed:
                real(table, adds, transactions, **options)
            raise error
        return real(table, adds, transactions, **options)

    return commit


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


def test_two_instances_never_decide_one_number(folder: Path) -> None:
    """The second of two open transactions is told to plan again, and none of its rows appear."""
    one, two = open_store(folder), open_store(folder)
    number = kit.epoch(one)
    with pytest.raises(CommitConflict, match="Decision 2"), two.begin(kit.NAME, number) as late:
        kit.process(one, number, kit.events([1, 2]))
        late.execute(Commit())
    assert show(folder) == [1, 2]
    assert kit.process(two, number, kit.events([1, 2])).written == []
    assert one.problems(kit.NAME) == []


def test_an_instance_with_an_older_epoch_is_fenced_before_and_at_the_commit(folder: Path) -> None:
    """Fenced names who took over; nothing of the older instance is decided."""
    old, new = open_store(folder), open_store(folder)
    number = kit.epoch(old)
    with pytest.raises(Fenced, match=r"process \d+ on .*epoch 2"), old.begin(kit.NAME, number) as tx:
        kit.epoch(new)
        tx.execute(Commit())
    with pytest.raises(Fenced), old.begin(kit.NAME, number):
        pass
    assert kit.process(new, number + 1, kit.events([1])).written == [1]


@pytest.mark.parametrize("error", [CommitFailedError("conflict with itself"), OSError("connection reset")], ids=["refused", "i/o"])
@pytest.mark.parametrize("where", ["/0", "/orders"], ids=["ledger", "sink"])
def test_an_answer_that_was_lost_after_the_commit_landed_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    """The header read back carries our attempt id: the batch is committed, once."""
    store = open_store(folder)
    number = kit.epoch(store)
    monkeypatch.setattr(tables, "commit", failing(error, landed=True, app_suffix=where))
    assert kit.process(store, number, kit.events([1, 2])).written == [1, 2]
    assert show(folder) == [1, 2]
    assert store.problems(kit.NAME) == [] and open_store(folder).reserved(kit.NAME) == 2


def test_a_commit_that_failed_before_it_landed_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger does not show it: the batch is undone, and runs again."""
    store = open_store(folder)
    number = kit.epoch(store)
    monkeypatch.setattr(tables, "commit", failing(OSError("disk full"), landed=False, app_suffix="/0"))
    with pytest.raises(StoreUnavailable, match="disk full"):
        kit.process(store, number, kit.events([1, 2]))
    assert show(folder) == [] and store.reserved(kit.NAME) == 0
    assert kit.process(store, number, kit.events([1, 2])).written == [1, 2]
    assert show(folder) == [1, 2]


def test_a_commit_that_cannot_be_read_back_is_unknown_and_safe_to_repeat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CommitUnknown; the next look at the ledger shows the truth, and the batch is found decided."""
    store = open_store(folder)
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
    assert show(folder) == [1, 2] and store.problems(kit.NAME) == []


@pytest.mark.full
def test_a_compaction_in_between_does_not_disturb_a_decision(folder: Path) -> None:
    """Commits that decide nothing are stepped over; rewritten files are not read as new."""
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(4):
        kit.process(store, number, kit.events([10 * i, 10 * i + 1], 2 * i), i)
    with store.begin(kit.NAME, number) as tx:
        ledger(folder).optimize.compact()
        tx.execute(Commit())
    assert store.head(kit.NAME).seq == 6
    assert store.reserved(kit.NAME) == open_store(folder).reserved(kit.NAME) == 8
    assert open_store(folder).problems(kit.NAME) == []


def test_foreign_decisions_are_read_in_before_planning(folder: Path) -> None:
    """Keys that another process reserved under the same epoch are known; a person's amendment shows in the head."""
    one, two = open_store(folder), open_store(folder)
    number = kit.epoch(one)
    kit.process(one, number, kit.events([1]))
    kit.process(two, number, kit.events([2], 1), 1)
    two.amend(kit.NAME, changes.accept_gap, by="me", reason="test")
    assert kit.process(one, number, kit.events([1, 2, 3], 2), 2).written == [3]
    assert one.head(kit.NAME).gap_accepted is False and one.head(kit.NAME).seq == 5


def test_a_first_decision_does_not_follow_decisions_it_has_not_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who found no ledger, and comes back when there is one, plans again - although the newest snapshot would take its commit."""
    late, quick = open_store(folder), open_store(folder)
    real = commit.write_files

    def overtaken(known: state.ConsumerState, decision: Any) -> Any:
        if known is late._states.of(kit.NAME) and quick.head(kit.NAME).seq == 0:
            kit.process(quick, kit.epoch(quick), kit.events([1]))
        return real(known, decision)

    monkeypatch.setattr(commit, "write_files", overtaken)
    assert kit.epoch(late) == 2
    assert late.problems(kit.NAME) == [] and late.head(kit.NAME).seq == 3


def test_looking_at_the_state_inside_a_transaction_does_not_move_its_snapshot(folder: Path) -> None:
    """A handler that asks its store for the head after a foreign decision is told to plan again, not to commit behind it."""
    one, two = open_store(folder), open_store(folder)
    number = kit.epoch(one)
    with pytest.raises(CommitConflict), one.begin(kit.NAME, number) as tx:
        kit.process(two, number, kit.events([1]))
        assert one.head(kit.NAME).seq == 2
        tx.execute(Commit())
    assert one.problems(kit.NAME) == []


def test_old_rows_in_a_rewritten_file_are_not_taken_for_new(folder: Path) -> None:
    """A compaction merged known decisions with new ones: only the new ones are read in."""
    one, two = open_store(folder), open_store(folder)
    number = kit.epoch(one)
    kit.process(one, number, kit.events([1, 2]))
    kit.process(two, number, kit.events([3], 2), 1)
    ledger(folder).optimize.compact()
    with one.begin(kit.NAME, number) as tx:
        assert tx.head.seq == 3
    assert one.problems(kit.NAME) == [] and one.reserved(kit.NAME) == 3


def test_a_restore_between_plan_and_commit_stops_the_commit(folder: Path) -> None:
    """No transaction id conflicts with a RESTORE: that the commit goes against the planned snapshot, and no other, does."""
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(2):
        kit.process(store, number, kit.events([i], i), i)
    with pytest.raises((CommitConflict, StoreRestored)), store.begin(kit.NAME, number) as tx:
        ledger(folder).restore(2)
        tx.execute(Commit())
    assert "restored" in open_store(folder).problems(kit.NAME)[0]
    with pytest.raises(StoreRestored), store.begin(kit.NAME, number):
        pass
