"""A ledger that was restored, replaced, damaged or written by another version is told, and nothing is decided on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from checkpoint import changes
from checkpoint.errors import (
    ConfigError,
    SchemaOutdated,
    StateTooNew,
    StoreError,
    StoreRestored,
    StoreUnavailable,
)
from deadletter.selection import Selection
from dedup import DeadLetters
from dedup.delta import DeltaStore, tables
from dedup.delta.ledger_files import reading_file
from dedup.signals.metrics import UP, Numbers
from dedup.signals.standing import look
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.aged import MONTH, age, deliver
from kit.delta_kit import ledger, open_store
from kit.orders import assert_proven, batch, consumer, event, orders
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta


def test_a_restored_ledger_is_refused_until_a_person_accepts(folder: Path) -> None:
    """RESTORE keeps transaction ids and takes rows back: that they disagree is noticed, by old instances and by new ones."""
    running = open_store(folder)
    number = kit.epoch(running)
    for i in range(3):
        kit.process(running, number, kit.events([i], i), i)
    ledger(folder).restore(3)  # of the versions 0: create, 1: epoch, 2-4: batches
    for store in (running, open_store(folder)):
        with pytest.raises(StoreRestored, match="accept-restore shop"), store.begin(kit.NAME, number):
            pass
        with pytest.raises(StoreRestored):
            kit.epoch(store)
    assert "restored" in open_store(folder).problems(kit.NAME)[0]
    with pytest.raises(StoreRestored):
        open_store(folder).amend(kit.NAME, changes.accept_gap, by="me", reason="this does not accept it")
    head = open_store(folder).amend(kit.NAME, changes.accept_restore, by="me", reason="backup")
    assert (head.generation, head.seq) == (1, 4)
    fresh = open_store(folder)
    number = kit.epoch(fresh)
    assert kit.process(fresh, number, kit.events([2], 2), 2).written == [
        2
    ]  # its reservation was lost with the restore, and its row doubles: a person said so
    assert open_store(folder).problems(kit.NAME) == []


def test_an_older_ledger_after_a_look_that_failed_is_noticed(folder: Path) -> None:
    """A process whose look ended in the middle still knows which decision it has seen, and does not go on from an older one."""
    running = open_store(folder)
    number = kit.epoch(running)
    for i in range(3):
        kit.process(running, number, kit.events([i], i), i)
        if not i:
            shutil.copytree(folder / "state" / "ledger", folder / "copied")
    watching = open_store(folder)
    assert watching.reserved(kit.NAME) == 3 and watching.head(kit.NAME).seq == 4
    kit.process(running, number, kit.events([3], 3), 3)
    files = [p for p in (folder / "state" / "ledger").rglob("*.parquet") if pq.read_table(p)["kind"].to_pylist() == ["reservation"]]
    newest = max(files, key=lambda p: p.stat().st_mtime_ns)
    newest.rename(newest.with_suffix(".away"))
    with pytest.raises(StoreUnavailable):
        watching.head(kit.NAME)
    shutil.rmtree(folder / "state" / "ledger")
    (folder / "copied").rename(folder / "state" / "ledger")
    with pytest.raises(StoreRestored, match="this process has seen another one, 4"), watching.begin(kit.NAME, number):
        pass


def test_a_restore_to_an_older_generation_is_noticed(folder: Path) -> None:
    """The old generation's transaction id moves on with the change of generation: its last state is not taken for the present one."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    before = ledger(folder).version()
    store.amend(kit.NAME, changes.reset, by="me", reason="again")
    ledger(folder).restore(before)
    with pytest.raises(StoreRestored):
        kit.epoch(open_store(folder))


def test_a_ledger_that_is_deleted_or_replaced_stops_a_running_instance(folder: Path) -> None:
    """Nothing is decided in an empty ledger by an instance that knew a full one."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    shutil.rmtree(folder / "state" / "ledger")
    with pytest.raises(StoreRestored, match="deleted or re-created"), store.begin(kit.NAME, number):
        pass
    other = open_store(folder)
    for i in range(6):  # longer than the old one
        kit.epoch(other, run_id=str(i))
    with pytest.raises(StoreRestored, match="deleted or re-created"), store.begin(kit.NAME, number):
        pass


def test_a_lost_header_is_named(folder: Path) -> None:
    """Somebody deleted rows of the ledger: problems says which decisions, and a new process refuses."""
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(3):
        kit.process(store, number, kit.events([i], i), i)
    ledger(folder).delete("seq = 3 and section = 'log'")
    told = open_store(folder).problems(kit.NAME)
    assert any("[3] have no header" in line for line in told)
    with pytest.raises(StoreRestored), open_store(folder).begin(kit.NAME, number):
        pass


def test_doubled_reservations_are_a_problem(folder: Path) -> None:
    """A key that stands in the ledger twice, and a decision with more rows than it says, are both told."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1, 2]))
    rows = ledger(folder).to_pyarrow_table(filters=[("section", "=", "keys")])
    from deltalake import write_deltalake

    write_deltalake(ledger(folder), rows.slice(0, 1), mode="append")
    told = open_store(folder).problems(kit.NAME)
    assert any("1 keys are reserved more than once" in line for line in told)
    assert any("decision 2 reserved 2 keys and the ledger has 3 rows" in line for line in told)


def test_a_property_that_forgets_transactions_is_refused(folder: Path) -> None:
    """delta.setTransactionRetentionDuration on the ledger is refused at start, with the command that takes it off."""
    kit.epoch(open_store(folder))
    ledger(folder).alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 1 days"})
    with pytest.raises(ConfigError, match="UNSET TBLPROPERTIES"):
        kit.epoch(open_store(folder))


def test_a_newer_state_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older library does not touch what a newer one wrote."""
    from dedup.delta import ledger as header

    with monkeypatch.context() as patch:
        newer = header.STATE_VERSION + 1
        for name in ("STATE_VERSION", "COMPATIBLE_WITH"):
            patch.setattr(header, name, newer)
        kit.epoch(open_store(folder))
    for act in (DeltaStore.migrate, kit.epoch):
        with pytest.raises(StateTooNew, match="Upgrade"):
            act(open_store(folder))


def test_a_newer_state_that_only_adds_to_the_header_is_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions take turns on one ledger: the older one carries on what it does not know, the newer one finds it again."""
    from dedup.delta import ledger as header

    newer = header.STATE_VERSION + 1

    def latest() -> header.Header:
        rows = DeltaTable(ledger(folder).table_uri).to_pyarrow_table().to_pylist()
        return max((header.Header.from_json(row["doc"]) for row in rows if row["kind"] == header.HEADER), key=lambda h: h.seq)

    def encode(h: header.Header) -> dict[str, Any]:
        return {**plain(h), "v": newer, "added": {"since": 7}}

    plain = header._encode
    with monkeypatch.context() as patch:
        patch.setattr(header, "_encode", encode)
        store = open_store(folder)
        kit.process(store, kit.epoch(store), kit.events([1], 1), 1)
    store = open_store(folder)
    assert store.migrate() == [] and latest().later == {"added": {"since": 7}}
    kit.process(store, kit.epoch(store), kit.events([2], 2), 2)
    assert latest().later == {"added": {"since": 7}} and json.loads(latest().to_json())["v"] == header.STATE_VERSION
    with monkeypatch.context() as patch:
        patch.setattr(header, "STATE_VERSION", newer)
        store = open_store(folder)
        kit.process(store, kit.epoch(store), kit.events([3], 3), 3)
    assert open_store(folder).problems(kit.NAME) == [] and open_store(folder).reserved(kit.NAME) == 3


def test_an_older_state_is_refused_before_anything_is_compared_or_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State that cannot be converted is no restored store: every way in says so, advises no repair, and changes nothing."""
    from dedup.delta import ledger as header

    with monkeypatch.context() as patch:
        for name in ("STATE_VERSION", "OLDEST_STATE", "COMPATIBLE_WITH"):
            patch.setattr(header, name, 3)
        store = open_store(folder)
        kit.process(store, kit.epoch(store), kit.events([1]))
    before, sinks = ledger(folder).version(), DeltaTable(str(folder / "orders")).version()
    ways: tuple[Callable[[DeltaStore], object], ...] = (
        kit.epoch,
        lambda store: store.head(kit.NAME),
        lambda store: store.publish(kit.NAME),
        lambda store: store.problems(kit.NAME),
        lambda store: store.letters(Selection(consumer=kit.NAME)),
        lambda store: store.amend(kit.NAME, changes.accept_restore, by="me", reason=""),
        lambda store: store.accept_sink(kit.NAME, "orders", by="me", reason=""),
        lambda store: store.outbox(kit.NAME).lag(),
        DeltaStore.migrate,
    )
    for act in ways:
        with pytest.raises(SchemaOutdated, match=r"no conversion.*new store folder and a new consumer"):
            act(open_store(folder))
    assert (ledger(folder).version(), DeltaTable(str(folder / "orders")).version()) == (before, sinks)


def test_one_damaged_consumer_hides_no_other(tmp_path: Path) -> None:
    """Its status says what is wrong with it, and the metrics of the store have the others' numbers."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    for name in ("shop", "other"):
        run = consumer(place.store(), name=name)
        run(batch(*orders(range(2)), event(5, f"{name}-bad", -1)), 0)
    shutil.rmtree(tmp_path / "state/dead_letters/shop")
    found = look(place.store(), "shop")
    assert found.damage is not None and "dead_letters" in found.damage and found.letters == {}
    values = Numbers(place.store()).values()
    assert values[UP] == [({}, 1.0)]
    assert sorted(labels["consumer"] for labels, _ in values["dedup_damage"]) == ["other", "shop"]


@pytest.mark.parametrize(
    "junk", of_which(2, [b"\0" * 120, b"null", b"", b"[]", b"5", b"\xff\xfe"]), ids=["zeros", "null", "none", "list", "5", "bytes"]
)
@pytest.mark.parametrize("small", ["crash_marker", "heartbeat", "letters_turn", "batch_turn", "deleted"])
def test_a_damaged_small_file_stops_nobody(tmp_path: Path, small: str, junk: bytes) -> None:
    """What a power cut leaves of a file beside the ledger: the next batch and a decision about letters are made as without it."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    consumer(place.store())(batch(*orders(range(2)), event(5, "bad", -1)), 0)
    file = tmp_path / "state" / small / "shop"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(junk)
    store = place.store()
    assert consumer(store)(batch(event(6, "new")), 1).processed == 1
    assert DeadLetters(store).discard(Selection("shop"), by="ann", reason="known").changed == 1
    assert_proven(store)


def in_a_page(path: Path) -> None:
    """A block of zeros in the middle of the file, with a sound end."""
    content = bytearray(path.read_bytes())
    content[30:200] = bytes(170)
    path.write_bytes(content)


def newest_of_log(place: DeltaPlace, name: str) -> Path:
    """The file of the consumer's newest decision."""
    folder = Path(place.where, "state", "ledger", name)
    return max(
        (p for p in folder.rglob("*.parquet") if "header" in pq.read_table(p)["kind"].to_pylist()), key=lambda p: p.stat().st_mtime_ns
    )


@pytest.mark.parametrize(
    "damage", of_which(1, [Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"0" * 500), in_a_page])
)
def test_an_upkeep_names_a_consumer_with_a_damaged_file_and_goes_on(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """A file is gone, empty after a power cut, or not what was written; a batch names the file, too."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    age(place, name="aaa")
    age(place, name="bbb")
    deliver(place, 1, "b", name="bbb")
    damage(lost := newest_of_log(place, "aaa"))
    store: Any = place.store()
    names, counts, named = zip(
        *[(line.consumer, line.count, lost.name in (line.failed or "")) for line in store.upkeep(MONTH)], strict=True
    )
    assert (names, counts, named) == (("aaa", "bbb") * 2, (0, 1, 0, 0), (True, False) * 2)
    with pytest.raises(StoreError, match=lost.name) as told:
        consumer(place.store(), name="aaa")(batch(event(1, "b")), 1)
    assert isinstance(told.value, StoreUnavailable) is (damage is Path.unlink)


def test_no_memory_is_no_damage() -> None:
    """Nobody is told to bring back a sound ledger because the process has no memory left."""
    with pytest.raises(pa.ArrowMemoryError), reading_file("log.parquet", "/ledger", "shop"):
        raise pa.ArrowMemoryError("malloc of size 64 failed")
    with pytest.raises(MemoryError), tables.computing():
        raise MemoryError
