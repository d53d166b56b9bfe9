"""The contract through `format("eventhubs")`: streams from a hub into both stores, broken, killed and begun again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from checkpoint import changes
from checkpoint.errors import ConfigError, IncarnationChanged, PositionGap
from checkpoint.position import Ranges
from deadletter.selection import Selection
from dedup import replay, reprocess
from dedup.demo import supervise
from dedup.eventhub import Connection, Namespace, log_reader, starting_positions
from dedup.verify import verify
from fixtures.fix_eventhubs import MakeHub
from kit import hub_stream
from kit.eventhubs.control import Double
from kit.hub_orders import Orders, checkpoints
from kit.orders import assert_proven, ids
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def options(sent: Orders, **more: str) -> dict[str, str]:
    """Of the data source."""
    return {"connectionString": sent.double.connection_string, "eventHubName": sent.hub, **more}


@pytest.mark.fast_on("postgres")
def test_a_stream_has_each_effect_once_through_faults_and_a_lost_checkpoint(
    spark: SparkSession, place: Place, sent: Orders, tmp_path: Path
) -> None:
    """Connections reset inside a transfer, events delivered twice, a busy service; restarted; then begun again behind our checkpoints."""
    sent.send(600)
    sent.double.order("reset", hub=sent.hub, after=100)
    hub_stream.run(spark, options(sent, maxEventsPerTrigger="400"), hub_stream.consumer(place.store()), tmp_path / "one")
    sent.send(200)
    sent.double.order("again", hub=sent.hub, partition=0, count=30)
    sent.double.order("throttle", what="receive", count=2)
    hub_stream.run(spark, options(sent), hub_stream.consumer(place.store()), tmp_path / "one")
    sent.check(place)
    sent.send(100)
    again = hub_stream.consumer(place.store())
    start = starting_positions(again)
    assert json.loads(start) == {sent.hub: {str(part): end + 1 for part, end in checkpoints(place).items()}}
    hub_stream.run(spark, options(sent, startingPositions=start), again, tmp_path / "two")
    sent.check(place)
    assert sum(place.store().batches("shop")["redelivered"].to_pylist()) == 0


@pytest.mark.full
@pytest.mark.crash
def test_killed_twice_and_it_adds_up(place: Place, sent: Orders, spark: SparkSession, tmp_path: Path) -> None:
    """SIGKILL of the driver with all its processes, twice in mid-run; the double, in a process of its own, lives on."""
    sent.send(5_000)
    store = place.store()
    task = {
        "kind": place.kind,
        "place": place.where,
        "options": options(sent, maxEventsPerTrigger="1500"),
        "checkpoint": str(tmp_path / "spark"),
    }
    command = [sys.executable, "-m", "kit.hub_stream", json.dumps(task)]
    kills = [supervise.Kill(1_000, 0.3), supervise.Kill(2_500, 0.3)]
    done = supervise.run(command, tmp_path / "log", kills, lambda: sum(end + 1 for end in _ends(store)))
    assert done.kills == 2
    sent.check(place)


def _ends(store: Any) -> list[int]:
    return [point.sequence_number for point in store.head("shop").checkpoints.values()]


@pytest.mark.full
@pytest.mark.fast_on("delta")
def test_a_gap_that_is_accepted_counts_as_absent(spark: SparkSession, place: Place, sent: Orders, tmp_path: Path) -> None:
    """failOnDataLoss=false: verify names the positions as never delivered, and reading the log again does not find them either."""
    connection = Connection.of(sent.double.connection_string, sent.hub)
    sent.send(60)
    hub_stream.run(spark, options(sent), hub_stream.consumer(place.store()), tmp_path / "spark")
    end = len(sent.bodies[0])
    sent.send(120)
    sent.double.order("expire", hub=sent.hub, partition=0, before=end + 7)
    with pytest.raises(PositionGap, match=f"{sent.hub}/0 {end}-{end + 6}"):
        starting_positions(hub_stream.consumer(place.store()), connection)
    hub_stream.run(spark, options(sent, failOnDataLoss="false"), hub_stream.consumer(place.store()), tmp_path / "spark")
    report = verify(place.store(), "shop")
    assert report.ok, report.contradictions
    absent = {part.partition.partition: part.absent for part in report.partitions}
    assert absent == {0: Ranges.of([(end, end + 6)]), 1: Ranges.of([])}
    assert checkpoints(place) == sent.ends


@pytest.mark.full
def test_the_log_is_read_again_by_replay_and_reprocess(place: Place, eventhubs: Double, new_hub: MakeHub) -> None:
    """A registered log_reader(...) is all that replay, reprocess --from-log and large letters need; handlers of Arrow tables here."""
    hub = new_hub()
    log = log_reader(eventhubs.connection_string, hub, arrow=True)
    eventhubs.put(hub, 0, [json.dumps({"id": key, "amount": amount}).encode() for key, amount in (("a", 1), ("b", -2), ("c", 3), ("d", 4))])
    place.create_merge_sink("balances")
    run = _merging(place, Namespace(log.connection), max_body=5)
    run.register_log_reader(log)
    run(log.read(hub, 0, 0, 1), 0)
    place.store().amend("shop", changes.accept_gap, by="test", reason="positions 2")
    run(log.read(hub, 0, 3, 3), 1)
    assert ids(place.read("balances")) == ["a", "d"]
    done = reprocess(Selection("shop", topic=hub), run, from_log=True)
    assert done.filled.processed == 1
    assert ids(place.read("balances")) == ["a", "c", "d"]
    run._handler = lambda rows, tx: tx.merge(_flat(rows), "balances", keys="id")
    assert reprocess(Selection("shop"), run).reprocessed == 1
    assert replay(Selection("shop", topic=hub), run).replayed >= 2
    assert place.read("balances") == [{"id": key, "amount": amount} for key, amount in (("a", 1), ("b", -2), ("c", 3), ("d", 4))]
    assert_proven(place.store())
    eventhubs.create(hub)
    with pytest.raises(IncarnationChanged):
        replay(Selection("shop", topic=hub), run)


def _merging(place: Place, namespace: Namespace, **settings: Any) -> Any:
    """Merges orders by id; rejects negative ones."""
    import pyarrow.compute as pc

    from kit.orders import consumer

    made = consumer(place.store(), incarnation=namespace.topic_ids, **settings)
    made._handler = lambda rows, tx: tx.merge(
        _flat(tx.reject(rows, pc.less(pc.struct_field(rows["data"], "amount"), 0), "negative")), "balances", keys="id"
    )
    return made


def _flat(rows: Any) -> Any:
    from kit.orders import flatten

    return flatten(rows)


def test_starting_positions_need_a_checkpoint_of_one_namespace(place: Place, eventhubs: Double, new_hub: MakeHub) -> None:
    """Without any, and with those of several namespaces, the sentence says what to do."""
    hub = new_hub()
    eventhubs.fill(hub, 0, 3)
    table = log_reader(eventhubs.connection_string, hub).read(hub, 0, 0, 2)
    run = hub_stream.consumer(place.store(), idempotence_key=None, decode=None, query="q")
    run._handler = lambda rows, tx: None
    with pytest.raises(ConfigError, match="checkpoints of these namespaces: none"):
        starting_positions(run)
    run(table, 0)
    assert json.loads(starting_positions(run)) == {hub: {"0": 3}}
    other = table.set_column(0, "source", [["other"] * 3])
    place.store().amend("shop", changes.accept_gap, by="test", reason="another namespace")
    run(other, 1)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1, other. Name one with source="):
        starting_positions(run)
    assert json.loads(starting_positions(run, source="other")) == {hub: {"0": 3}}
