"""What DeltaStore(engine="spark") rests on: Spark's transaction ids as the compare-and-swap, and read-back of what became of a commit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from checkpoint.errors import ConfigError, Fenced, HandlerError, SinkMismatch, StoreRestored, StoreUnavailable
from deadletter.store import Commit
from dedup.core.rows import ArrowRows
from dedup.delta import DeltaStore
from dedup.delta.commit import SinkPublisher
from dedup.delta.ledger import LETTERS_SINK
from kit import delta_kit as kit
from kit import delta_race_child as other
from kit.delta_kit import show
from kit.orders import batch, consumer, event, letters
from kit.places import SparkPlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.delta, pytest.mark.spark, pytest.mark.usefixtures("spark")]

ROUNDS = 4


def open_store(folder: Path, **options: Any) -> DeltaStore:
    """What a new process would open."""
    return kit.open_store(folder, **{"engine": "spark", **options})


@pytest.mark.full
@pytest.mark.crash
def test_of_two_processes_that_decide_the_same_number_one_lands(folder: Path) -> None:
    """Two JVMs, both planned on the same head before either commits, round after round: each number is decided once."""
    store = open_store(folder)
    kit.epoch(store)
    child = subprocess.Popen([sys.executable, "-m", "kit.delta_race_child", str(folder), str(ROUNDS), "1"])
    try:
        mine = other.race(folder, ROUNDS, 0)
        assert child.wait(timeout=300) == 0
    finally:
        child.kill()
        child.wait()
    theirs = [c == "1" for c in (folder / "won-1").read_text()]
    assert [a + b for a, b in zip(mine, theirs, strict=True)] == [1] * ROUNDS
    assert store.head(kit.NAME).seq == 1 + ROUNDS and store.problems(kit.NAME) == []


@pytest.mark.full
def test_a_decision_that_comes_too_late_is_skipped_and_told(folder: Path) -> None:
    """Spark says nothing where a number is behind: the instance that planned on an older head reads who decided it, and is fenced."""
    old, new = open_store(folder), open_store(folder)
    number = kit.epoch(old)
    with pytest.raises(Fenced, match="taken over"), old.begin(kit.NAME, number) as tx:
        tx.write("orders", ArrowRows(pa.table({"id": [1], "text": ["old"]})))
        newer = kit.epoch(new, force=True)
        kit.process(new, newer, kit.events([2]))
        tx.execute(Commit())
    assert show(folder) == [2] and new.problems(kit.NAME) == []


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.full
def test_an_answer_that_was_lost_is_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch, landed: bool) -> None:
    """The ledger tells: a commit that landed is ours, one that did not is undone and runs again."""
    from dedup.spark.delta import SparkTables

    store, real = open_store(folder), SparkTables.append_rows
    number = kit.epoch(store)

    def lost(self: SparkTables, *args: Any) -> None:
        monkeypatch.setattr(SparkTables, "append_rows", real)
        if landed:
            real(self, *args)
        raise StoreUnavailable("connection reset")

    monkeypatch.setattr(SparkTables, "append_rows", lost)
    if landed:
        assert kit.process(store, number, kit.events([1])).written == [1]
    else:
        with pytest.raises(StoreUnavailable, match="nothing was committed"):
            kit.process(store, number, kit.events([1]))
        assert show(folder) == []
    kit.process(store, number, kit.events([1, 2]), 1)
    assert show(folder) == [1, 2] and open_store(folder).reserved(kit.NAME) == 2


@pytest.mark.full
def test_a_publication_that_died_is_gone_on_with_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided and not visible: another process publishes the first before the second, from the ledger, each once, also when told twice."""
    from dedup.spark.delta import SparkTables

    class Died(BaseException):
        pass

    def dies(*_: Any) -> None:
        raise Died

    store = open_store(folder)
    number = kit.epoch(store)
    with monkeypatch.context() as broken:
        broken.setattr(SparkTables, "append", dies)
        with pytest.raises(Died):
            kit.process(store, number, kit.events([1]), text="first")
    assert show(folder) == []
    again = open_store(folder)
    assert again.head(kit.NAME).seq == 2 and again.publish(kit.NAME) == 1 and show(folder) == [1]
    kit.process(again, kit.epoch(again), kit.events([2], 1), text="second")
    state = again._states.of(kit.NAME)
    first = DeltaTable(str(folder / "orders")).history()
    assert [e["operation"] for e in first] == ["WRITE", "WRITE", "CREATE TABLE"]
    app = f"{state.ledger.app(state.table, 0)}/orders"
    assert DeltaTable(str(folder / "orders")).transaction_version(app) == state.header.version
    assert show(folder) == [1, 2] and open_store(folder).publish(kit.NAME) == 0 and show(folder) == [1, 2]


@pytest.mark.full
@pytest.mark.parametrize("found", [False, True], ids=["gone before it is looked for", "gone before it is read"])
def test_letters_are_read_while_another_process_publishes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    """What is staged for Spark goes with its publication: who meets the gap looks again, and neither fails nor takes it for a loss."""
    from dedup.spark.delta import SparkTables

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    place = SparkPlace(tmp_path)
    place.create_sink()
    with monkeypatch.context() as broken:
        broken.setattr(SparkTables, "append", dies)
        with pytest.raises(KeyboardInterrupt):
            consumer(place.store())(batch(event(0, "bad", -1)), 0)
    require, met = SinkPublisher.require_files, list[str]()

    def meanwhile(self: SinkPublisher, header: Any, entry: Any, uri: str) -> None:
        met.append(entry.name)
        if len(met) > 1 or found:
            require(self, header, entry, uri)
        if len(met) == 1:
            assert place.store().publish("shop") == 1
            if not found:
                require(self, header, entry, uri)

    monkeypatch.setattr(SinkPublisher, "require_files", meanwhile)
    assert [letter["idempotence_key"] for letter in letters(place.store())] == ["bad"] and met[0] == LETTERS_SINK


@pytest.mark.full
def test_a_state_that_was_copied_back_is_told(folder: Path) -> None:
    """Sinks that Spark appends to show which decision they took: a number that is given anew is not taken for it."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    shutil.copytree(folder / "state", folder / "kept")
    kit.process(store, number, kit.events([2], 1), 1)
    shutil.rmtree(folder / "state")
    shutil.copytree(folder / "kept", folder / "state")
    fresh = open_store(folder)
    with pytest.raises(StoreRestored, match="shows decision 3"):
        kit.process(fresh, number, kit.events([3, 4], 1), 1)
    assert show(folder) == [1, 2] and fresh.head(kit.NAME).seq == 2


@pytest.mark.full
def test_a_restored_ledger_is_told_and_accepted(folder: Path, spark: SparkSession) -> None:
    """RESTORE keeps transaction ids: what the history says contradicts what the rows say, and after the acceptance numbers go on above."""
    from dataclasses import replace

    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    ledger = store._states.of(kit.NAME).ledger.uri
    version = DeltaTable(ledger).version()
    kit.process(store, number, kit.events([2], 1), 1)
    spark.sql(f"RESTORE TABLE delta.`{ledger}` TO VERSION AS OF {version}")
    with pytest.raises(StoreRestored):
        kit.process(store, number, kit.events([3], 2), 2)
    fresh = open_store(folder)
    assert fresh.problems(kit.NAME) != []
    new = fresh.head(kit.NAME).generation + 1
    head = fresh.amend(kit.NAME, lambda h: replace(h, generation=new), by="me", reason="restored")
    assert head.generation == new
    kit.process(fresh, kit.epoch(fresh, force=True), kit.events([3], 2), 3)
    assert show(folder) == [1, 2, 3] and fresh.problems(kit.NAME) == []


@pytest.mark.full
def test_one_ledger_has_one_engine(folder: Path) -> None:
    """Each engine's compare-and-swap is blind for the other's commits: a ledger of the other one is refused."""
    kit.epoch(open_store(folder))
    with pytest.raises(ConfigError, match="engine='spark'"):
        open_store(folder, engine="delta-rs").head(kit.NAME)
    away = DeltaStore(str(folder / "other"))
    kit.epoch(away)
    with pytest.raises(ConfigError, match="engine='delta-rs'"):
        DeltaStore(str(folder / "other"), engine="spark").head(kit.NAME)


@pytest.mark.full
def test_a_sink_is_named_as_the_catalog_names_it(folder: Path, spark: SparkSession) -> None:
    """No path of it is used: a catalog may let nobody in by the path. Appends and merges; by two names only one after the other."""
    from dedup.core.steps import Merge

    spark.sql("CREATE TABLE IF NOT EXISTS catalog_orders (id BIGINT NOT NULL, text STRING) USING delta")
    try:
        store = open_store(folder)
        number = kit.epoch(store)
        with store.begin(kit.NAME, number) as tx:
            tx.write("catalog_orders", ArrowRows(pa.table({"id": [1], "text": ["a"]})))
            tx.merge("default.catalog_orders", ArrowRows(pa.table({"id": [1, 2], "text": ["b", "c"]})), Merge(("id",)))
            with pytest.raises(HandlerError, match=r"in 2 ways, 'catalog_orders' and 'default.catalog_orders', and merges"):
                tx.execute(Commit())
        named = set()
        with store.begin(kit.NAME, number) as tx:
            tx.write("catalog_orders", ArrowRows(pa.table({"id": [1], "text": ["a"]})))
            tx.execute(Commit())
        named |= {e.uri for e in store._states.of(kit.NAME).header.sinks}
        with store.begin(kit.NAME, number) as tx:
            tx.merge("default.catalog_orders", ArrowRows(pa.table({"id": [1, 2], "text": ["b", "c"]})), Merge(("id",)))
            tx.execute(Commit())
        assert sorted(map(tuple, spark.table("catalog_orders").collect())) == [(1, "b"), (2, "c")]
        named |= {e.uri for e in store._states.of(kit.NAME).header.sinks}
        assert named == {"catalog_orders", "default.catalog_orders"}
    finally:
        spark.sql("DROP TABLE catalog_orders")


@pytest.mark.full
def test_columns_whose_rules_spark_does_not_show_are_refused(folder: Path, spark: SparkSession) -> None:
    """A generated column breaks rows after they are decided, for ever: such a sink is refused before."""
    spark.sql(f"CREATE TABLE delta.`{folder}/orders2` (id BIGINT, twice BIGINT GENERATED ALWAYS AS (id * 2)) USING delta")
    store = open_store(folder)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx, pytest.raises(SinkMismatch, match="generatedColumns"):
        tx.write(str(folder / "orders2"), ArrowRows(pa.table({"id": [1]})))


@pytest.mark.full
def test_the_ledger_lets_readers_skip_files(folder: Path) -> None:
    """What was decided lately is found by statistics: each file says which numbers are in it."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1, 2]))
    actions = pa.table(DeltaTable(store._states.of(kit.NAME).ledger.uri).get_add_actions(flatten=True))
    spans = zip(actions["min.seq"].to_pylist(), actions["max.seq"].to_pylist(), strict=True)
    assert sorted(set(spans)) == [(1, 1), (2, 2)]


@pytest.mark.full
def test_a_dispatcher_whose_turn_was_taken_notes_nothing(folder: Path) -> None:
    """Spark skips its commit in silence: that another one came first is read from the table of marks."""
    from dedup.core.messages import State
    from dedup.delta.outbox import _row
    from kit.outgoing import made

    store = open_store(folder)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        tx.enqueue(made(2, 2))
        tx.execute(Commit())
    mine, theirs = store.outbox(kit.NAME), open_store(folder).outbox(kit.NAME)
    found = mine._look()
    assert found is not None
    theirs.note(lambda _: [_row(1, State.SENT)], dispatching=False)
    assert not mine._commit(found, [_row(2, State.SENT)], "mine/1")
    again = mine._look(anew=True)
    assert again is not None and not again.landed("mine/1") and again.turn == 1


def test_a_local_disk_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever opens such a store where two processes are not safe reads it in the log; delta-rs is safe there and says nothing."""
    DeltaStore(str(tmp_path / "state"))
    assert caplog.messages == []
    DeltaStore(str(tmp_path / "state"), engine="spark")
    assert "one JVM only" in caplog.text
