"""The runner and what a hub, a broker and a store do to it: faults on command, in one process."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError
from azure.eventhub.aio import EventHubConsumerClient
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from checkpoint.errors import ConfigError, DedupError, Fenced, IncarnationChanged, SourceUnavailable
from dedup import Consumer
from dedup.eventhub import Connection, Namespace, client, rows, run_async, runner
from dedup.eventhub.leases import FolderOwnership, Leases, owners_beside
from fixtures.variants import of_which
from kit import runner_child
from kit.hub_orders import Orders, checkpoints, until
from kit.orders import assert_proven, ids, letters
from kit.pg_proxy import Proxy
from kit.places import DeltaPlace, Place, PostgresPlace
from kit.running import MARKS, QUICK, Running, running

pytestmark = [*MARKS]


@pytest.fixture
def place(postgres: str) -> Place:
    """A database with the sink `orders`."""
    made = PostgresPlace(postgres)
    made.create_sink()
    return made


@pytest.fixture
def delta(tmp_path: Path) -> Place:
    """A folder with the sink `orders`."""
    made = DeltaPlace(tmp_path)
    made.create_sink()
    return made


def test_a_link_that_breaks_repeats_and_is_throttled_costs_nothing(place: Place, sent: Orders) -> None:
    """Connections reset in mid-transfer, links detached, events delivered again, a stolen link: every event has one outcome."""
    sent.send(600)
    with running(runner_child.consumer(place.store()), sent) as one:
        for fault in ("reset", "detach", "again", "steal"):
            sent.send(200)
            if fault == "steal":
                sent.double.order("steal", hub=sent.hub, partition=0, level=0)
                sent.double.order("release", hub=sent.hub, partition=0)
            else:
                extra = {"after": 3000} if fault == "reset" else {"partition": 0, "count": 50} if fault == "again" else {}
                sent.double.order(fault, hub=sent.hub, **extra)
            sent.send(200)
            time.sleep(0.3)
        sent.wait(place, one.alive)
    sent.check(place)


@pytest.mark.full
def test_events_that_cannot_be_made_rows_end_the_run(place: Place, sent: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client would deliver them again for ever, and nobody would learn of it."""

    def refuse(*_: Any) -> None:
        raise ValueError("no row")

    monkeypatch.setattr(rows, "batch", refuse)
    sent.send(10)
    assert str(Running(runner_child.consumer(place.store()), sent).ends_with()) == "no row"


@pytest.mark.full
def test_the_broker_may_be_away_for_a_while(place: Place, sent: Orders) -> None:
    """While connections are refused the process lives on; afterwards it goes on where it was."""
    sent.send(200)
    proxy = Proxy(sent.double.port)
    through = sent.double.connection_string.replace(str(sent.double.port), str(proxy.port))
    consumer = runner_child.consumer(place.store(), source="hub")
    with running(consumer, _Through(sent, through)) as one:  # type: ignore[arg-type]
        sent.wait(place, one.alive)
        proxy.refuse = True
        sent.double.order("reset", hub=sent.hub)
        sent.send(200)
        time.sleep(3)
        one.alive()
        proxy.refuse = False
        sent.wait(place, one.alive)
    proxy.close()
    sent.check(place)


class _Through:
    """The same hub by another way."""

    def __init__(self, sent: Any, connection: Connection | str) -> None:
        self.hub = getattr(sent, "hub", None) or sent.name
        self.double = type("Double", (), {"connection_string": connection})


class Entra:
    """A token credential as azure-identity has them: one that blocks."""

    def __init__(self, token: str) -> None:
        self._token = token

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        """The one token that the double knows; or Entra ID has withdrawn it."""
        if not self._token:
            raise ClientAuthenticationError("AADSTS7000222: The provided client secret keys are expired.")
        return AccessToken(self._token, int(time.time()) + 600)


@pytest.mark.full
def test_entra_id_instead_of_a_key(place: Place, sent: Orders) -> None:
    """One token credential serves the questions about the hub and the client in its loop."""
    sent.send(50)
    connection = Connection.entra(sent.double.host, sent.hub, credential=Entra(sent.double.token), tls=False)
    with running(runner_child.consumer(place.store()), _Through(sent, connection)) as one:  # type: ignore[arg-type]
        sent.wait(place, one.alive)
    sent.check(place)


@pytest.mark.full
def test_a_login_that_expires_while_the_process_runs_ends_it(place: Place, sent: Orders) -> None:
    """A link that is opened again needs a token, and Entra ID gives none any more."""
    sent.send(20)
    credential = Entra(sent.double.token)
    connection = Connection.entra(sent.double.host, sent.hub, credential=credential, tls=False)
    one = Running(runner_child.consumer(place.store()), _Through(sent, connection))  # type: ignore[arg-type]
    sent.wait(place, one.alive)
    credential._token = ""
    sent.double.order("reset", hub=sent.hub)
    error = one.ends_with()
    assert isinstance(error, ConfigError) and "AADSTS7000222" in str(error), repr(error)


@pytest.mark.full
def test_the_store_may_be_away_for_a_while(place: Place, sent: Orders) -> None:
    """No connection to PostgreSQL: batches are tried again for max_outage seconds, nothing is parked, nothing is lost."""
    parts = conninfo_to_dict(place.url)
    proxy = Proxy(int(str(parts["port"])))
    away = PostgresPlace(make_conninfo(place.url, host="127.0.0.1", hostaddr="127.0.0.1", port=proxy.port))
    sent.send(300)
    with running(runner_child.consumer(away.store(), max_outage=60.0), sent) as one:
        sent.wait(place, one.alive)
        proxy.refuse = True
        _end_sessions(place)
        sent.send(300)
        time.sleep(3)
        one.alive()
        proxy.refuse = False
        sent.wait(place, one.alive)
    proxy.close()
    sent.check(place)


def _end_sessions(place: Any) -> None:
    place.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()")


@pytest.mark.full
def test_positions_that_never_were_are_left_out(place: Place, sent: Orders) -> None:
    """Holes in the log that a second reading shows again are compaction: the process goes on behind each of them."""
    sent.send(60)
    for first in (5, 12):
        sent.double.order("hole", hub=sent.hub, partition=0, first=first, last=first + 2)
    with running(runner_child.consumer(place.store()), sent) as one:
        sent.wait(place, one.alive)
    seen = [r for b in place.store().batches("shop").to_pylist() if b["partition"] == 0 for r in b["seen"]]
    numbers = {n for r in seen for n in range(r["first"], r["last"] + 1)}
    assert {4, 8, 11, 15} <= numbers and not {5, 6, 7, 12, 13, 14} & numbers


def test_a_hub_that_was_created_again_is_refused(place: Place, sent: Orders) -> None:
    """Its sequence numbers begin anew: without this its first events would pass for redeliveries."""
    sent.send(50)
    consumer = runner_child.consumer(place.store())
    with running(consumer, sent) as one:
        sent.wait(place, one.alive)
    time.sleep(0.01)
    sent.double.create(sent.hub, 2)
    sent.double.fill(sent.hub, 0, 200)
    sent.double.fill(sent.hub, 1, 200)
    assert isinstance(Running(consumer, sent).ends_with(), IncarnationChanged)


@pytest.mark.full
def test_a_hub_that_is_created_again_while_the_process_runs_is_refused(place: Place, sent: Orders) -> None:
    """The client opens its link again by itself: events of the new hub do not pass for those that come next in the old one."""
    sent.send(50)
    one = Running(runner_child.consumer(place.store()), sent, retry_total=20)
    sent.wait(place, one.alive)
    before = checkpoints(place)
    sent.double.order("replace", hub=sent.hub, more=50)
    assert isinstance(one.ends_with(), IncarnationChanged)
    assert checkpoints(place) == before


@pytest.mark.full
def test_what_the_client_hides_is_asked_for_with_every_batch(place: Place, sent: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the client's links cannot be counted, the hub is asked which one it is again and again, not once."""
    asked: list[int] = []
    created = Namespace.created
    monkeypatch.setattr(client.Client, "_create_consumer", EventHubConsumerClient._create_consumer)
    monkeypatch.setattr(Namespace, "created", lambda self: asked.append(1) or created(self))
    with running(runner_child.consumer(place.store()), sent) as one:
        for _ in range(4):
            sent.send(20)
            sent.wait(place, one.alive)
    assert len(asked) >= sent.partitions + 4


def test_a_consumer_group_that_is_not_there_ends_the_process(place: Place, sent: Orders) -> None:
    """The service refuses every link, of which the client itself tells nobody."""
    error = Running(runner_child.consumer(place.store()), sent, group="nobody").ends_with()
    assert isinstance(error, ConfigError) and "consumer group" in str(error) and "nobody" in str(error)


@pytest.mark.parametrize("denied", of_which(1, ["link", "token"]))
def test_access_that_is_withdrawn_while_the_process_runs_ends_it(place: Place, sent: Orders, denied: str) -> None:
    """A role that was revoked, and a key that was rotated: what the next link is refused for, no waiting mends."""
    sent.send(20)
    one = Running(runner_child.consumer(place.store()), sent)
    sent.wait(place, one.alive)
    sent.double.order("deny", what=denied)
    sent.double.order("reset", hub=sent.hub)
    error = one.ends_with()
    assert isinstance(error, ConfigError) and "refuses to read" in str(error), repr(error)


@pytest.mark.full
def test_a_hub_that_is_created_again_empty_while_the_process_runs_is_refused(place: Place, sent: Orders) -> None:
    """The new one does not have the position at which the client opens its link again: the refusal leads to a claim, which sees why."""
    sent.send(50)
    one = Running(runner_child.consumer(place.store()), sent)
    sent.wait(place, one.alive)
    sent.double.create(sent.hub, 2)
    assert isinstance(one.ends_with(), IncarnationChanged)


def test_partitions_that_are_added_are_read(place: Place, sent: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks for partitions once; the runner asks again, and reads the new ones from their first event."""
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.3)
    sent.send(50)
    with running(runner_child.consumer(place.store()), sent) as one:
        sent.wait(place, one.alive)
        sent.double.order("grow", hub=sent.hub, partitions=4)
        sent.bodies += [[], []]
        sent.partitions = 4
        sent.send(100)
        sent.wait(place, one.alive)
    sent.check(place)


def test_an_error_that_is_everybodys_ends_the_process_and_is_not_redelivered_for_ever(place: Place, sent: Orders) -> None:
    """A sink that is missing: tried for max_outage seconds, then the process ends with that error and nothing is parked."""
    sent.send(30)
    consumer = runner_child.consumer(place.store(), max_outage=0.0)
    place.drop_sink()
    error = Running(consumer, sent).ends_with()
    assert isinstance(error, DedupError) and "orders" in str(error), repr(error)
    assert letters(place.store()) == [] and checkpoints(place) == {}


@pytest.mark.full
def test_handlers_of_single_events_run_as_they_do_on_spark(place: Place, sent: Orders) -> None:
    """`foreach`: a row is written, None skips, an exception parks that event."""
    bodies = [json.dumps({"id": f"o{n}", "amount": n}).encode() for n in range(6)]
    sent.double.put(sent.hub, 0, bodies)
    sent.bodies[0] += bodies
    consumer = Consumer("shop", place.store(), idempotence_key="data.id", decode=runner_child.decode.json(runner_child.ORDER))

    @consumer.foreach(into="orders")
    def one(event: Any, tx: Any) -> dict[str, Any] | None:
        if event.data["amount"] == 3:
            raise ValueError(event.data["id"])
        return None if event.data["amount"] == 4 else {"id": event.data["id"], "amount": event.data["amount"]}

    with running(consumer, sent) as process:
        sent.wait(place, process.alive)
    assert ids(place.read()) == ["o0", "o1", "o2", "o5"]
    assert [x["kind"] for x in letters(place.store())] == ["HANDLER_ERROR"]


def test_latest_begins_behind_what_is_there(place: Place, sent: Orders) -> None:
    """start="latest" leaves out what was there before; quiet partitions cost nothing."""
    sent.double.put(sent.hub, 0, [b'{"id": "old", "amount": 1}'])
    with running(runner_child.consumer(place.store()), sent, start="latest") as one:
        time.sleep(4)
        sent.double.put(sent.hub, 0, [b'{"id": "new", "amount": 1}'])
        until(lambda: checkpoints(place) == {0: 1}, one.alive)
    assert ids(place.read()) == ["new"]


@pytest.mark.full
def test_a_time_to_begin_at_is_included(place: Place, sent: Orders) -> None:
    """An event of exactly that millisecond is read, as with Spark's startingTime; one of the millisecond before is not."""
    begin = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for late in (-1, 0, 1):
        sent.double.fill(sent.hub, 0, 1, enqueued=int(begin.timestamp() * 1000) + late)
    with running(runner_child.consumer(place.store()), sent, start=begin) as one:
        until(lambda: checkpoints(place) == {0: 2}, one.alive)
    with running(runner_child.consumer(place.store()), sent, start=begin) as one:
        sent.double.fill(sent.hub, 0, 1)
        until(lambda: checkpoints(place) == {0: 3}, one.alive)
    batches = place.store().batches("shop").to_pylist()
    assert next(r["first"] for b in batches for r in b["seen"]) == 1 and sum(b["delivered"] for b in batches) == 3


@pytest.mark.full
def test_latest_is_looked_up_once(place: Place, sent: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while a quiet partition's link is down is read, and so is what a partition held before it was seen to be there."""
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.3)
    sent.double.put(sent.hub, 0, [b'{"id": "old", "amount": 1}'])
    with running(runner_child.consumer(place.store()), sent, start="latest") as one:
        until(lambda: sent.double.order("detach", hub=sent.hub, partition=0), one.alive)
        sent.double.put(sent.hub, 0, [b'{"id": "new", "amount": 1}'])
        until(lambda: checkpoints(place) == {0: 1}, one.alive)
        sent.double.order("grow", hub=sent.hub, partitions=3)
        sent.double.put(sent.hub, 2, [b'{"id": "added", "amount": 1}'])
        until(lambda: checkpoints(place) == {0: 1, 2: 0}, one.alive)
    assert ids(place.read()) == ["added", "new"]


@pytest.mark.parametrize("events", of_which(1, [3_000, 5_000]))
def test_the_client_waits_while_a_batch_is_in_the_store(place: Place, sent: Orders, events: int) -> None:
    """Back-pressure: while the handler is at work no more than twice the prefetch is received, however much there is."""
    sent.double.fill(sent.hub, 0, events)
    sent.double.fill(sent.hub, 1, 1)
    consumer, go, inside = runner_child.consumer(place.store()), threading.Event(), threading.Event()

    def wait(rows: pa.Table, tx: Any) -> None:
        inside.set()
        go.wait(30)

    consumer._handler = wait
    consumer.decode, consumer.keys = None, Consumer("x", place.store()).keys
    with running(consumer, sent, prefetch=100, max_events=50):
        inside.wait(30)
        before = sent.double.stats()
        time.sleep(2)
        assert _delivered(sent) - _delivered_of(before) <= 500
        go.set()
        until(lambda: checkpoints(place).get(0) == events - 1)


def _delivered(sent: Orders) -> int:
    return _delivered_of(sent.double.stats())


def _delivered_of(stats: dict[str, Any]) -> int:
    return int(stats["delivered"])


def test_questions_about_the_hub_go_the_way_that_events_come(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy the first of them would end the run; how often the client tries again to receive does not concern them."""
    asked = list[dict[str, Any]]()

    def away(_: Connection, **options: Any) -> None:
        asked.append(options)
        raise SourceUnavailable("away")

    monkeypatch.setattr(Connection, "client", away)
    way = {"http_proxy": {"proxy_hostname": "proxy", "proxy_port": 3128}, "connection_verify": "ca.pem"}
    with pytest.raises(SourceUnavailable):
        asyncio.run(run_async(runner_child.consumer(place.store()), Connection("ns", "hub"), **way, retry_total=9))  # type: ignore[arg-type]
    assert asked == [{**way, "retry_backoff_factor": 0.2}]


def test_a_consumer_without_positions_is_refused(place: Place) -> None:
    """There would be nothing to go on at."""
    consumer = runner_child.consumer(place.store(), positions=None)
    with pytest.raises(ConfigError, match="positions=None"):
        asyncio.run(run_async(consumer, "Endpoint=sb://h/;SharedAccessKeyName=k;SharedAccessKey=a;EntityPath=x"))


@pytest.mark.parametrize(("options", "least"), [({"balance_every": 30}, 90), ({"expire_after": dt.timedelta(seconds=29)}, 30)])
def test_ownership_that_would_lapse_between_two_renewals_is_refused(place: Place, options: dict[str, Any], least: int) -> None:
    """Processes would take the partitions from each other again and again."""
    connection = "Endpoint=sb://h/;SharedAccessKeyName=k;SharedAccessKey=a;EntityPath=x"
    with pytest.raises(ConfigError, match=f"expire_after to at least {least} seconds"):
        asyncio.run(run_async(runner_child.consumer(place.store()), connection, **options))


@pytest.mark.full
@pytest.mark.delta
def test_on_delta_processes_agree_through_files_beside_the_ledger(delta: Place, sent: Orders) -> None:
    """Without any other service two runners in one folder share the partitions, and every event has one outcome."""
    sent.send(300)
    with running(runner_child.consumer(delta.store()), sent) as one, running(runner_child.consumer(delta.store()), sent) as two:
        sent.send(300)
        sent.wait(delta, one.alive)
        two.alive()
    sent.check(delta)


@pytest.mark.delta
def test_files_tell_who_owns_a_partition(tmp_path: Path) -> None:
    """A claim with an old etag, or without one where somebody else has claimed, is lost; a released partition has no owner."""
    store, other = (FolderOwnership(str(tmp_path), None, "shop") for _ in range(2))
    names = {"fully_qualified_namespace": "ns", "eventhub_name": "hub", "consumer_group": "$Default", "partition_id": "0"}
    (mine,) = asyncio.run(store.claim_ownership([{**names, "owner_id": "a"}]))
    assert asyncio.run(other.claim_ownership([{**names, "owner_id": "b"}])) == []
    (seen,) = asyncio.run(other.list_ownership("ns", "HUB", "$default"))
    assert seen["owner_id"] == "a" and seen["etag"] == mine["etag"] and abs(seen["last_modified_time"] - time.time()) < 60
    (stolen,) = asyncio.run(other.claim_ownership([{**seen, "owner_id": "b"}]))
    assert asyncio.run(store.claim_ownership([mine])) == []
    asyncio.run(other.claim_ownership([{**stolen, "owner_id": ""}]))
    assert [o["owner_id"] for o in asyncio.run(store.list_ownership("ns", "hub", "$Default"))] == [""]
    assert asyncio.run(store.list_ownership("ns", "hub", "another")) == asyncio.run(store.list_checkpoints("ns", "hub", "g")) == []


@pytest.mark.parametrize("kind", ["postgres", pytest.param("delta", marks=pytest.mark.delta)])
def test_consumers_share_out_a_hub_each_for_itself(kind: str, request: pytest.FixtureRequest) -> None:
    """Two consumers on one hub and consumer group each own all of its partitions; the client is told the names that it asked for."""
    place: Place = request.getfixturevalue("place" if kind == "postgres" else "delta")
    asked = {"fully_qualified_namespace": "ns", "eventhub_name": "hub", "consumer_group": "$Default"}

    async def body() -> None:
        shop, bank = (owners_beside(place.store(), name) for name in ("shop", "Shop"))
        for owners, owner in ((shop, "a"), (bank, "b")):
            (won,) = await owners.claim_ownership([{**asked, "partition_id": "0", "owner_id": owner}])
            (seen,) = await owners.list_ownership(*asked.values())
            assert {**won, **asked} == won and {**seen, **asked} == seen and seen["owner_id"] == owner
            assert seen["etag"] == won["etag"] and [o["etag"] for o in await owners.claim_ownership([seen])] != [won["etag"]]
        for owners in (shop, bank):
            if hasattr(owners, "close"):
                await owners.close()

    asyncio.run(body())


def test_resume_positions_are_sequence_numbers_and_zero_counts(place: Place, sent: Orders) -> None:
    """The client takes a false offset for none: position 0 must still be one, and no offset of the broker is ever used."""
    sent.double.put(sent.hub, 0, [b'{"id": "a", "amount": 1}'])
    with running(runner_child.consumer(place.store()), sent) as one:
        until(lambda: checkpoints(place) == {0: 0}, one.alive)
    connection = Connection.of(sent.double.connection_string, sent.hub)
    leases = Leases(owners_beside(place.store(), "shop"), place.store(), "shop", connection.source, connection)
    (found,) = asyncio.run(leases.list_checkpoints("ns", sent.hub, "$Default"))  # type: ignore[arg-type]
    assert found["partition_id"] == "0" and found["offset"] == 0 and bool(found["offset"])
    with pytest.raises(ConfigError):
        asyncio.run(leases.update_checkpoint(found))


@pytest.mark.full
def test_a_newer_epoch_ends_an_idle_process(place: Place, sent: Orders) -> None:
    """A process without events learns at its next batch that a query has taken over."""
    sent.send(20)
    one = Running(runner_child.consumer(place.store()), sent)
    sent.wait(place, one.alive)
    runner_child.consumer(place.store(), takeover=True)(pa.Table.from_pylist([], schema=_schema()), 0)
    sent.send(5)
    assert isinstance(one.ends_with(), Fenced)


def _schema() -> pa.Schema:
    from dedup.core.envelope import ENVELOPE

    return ENVELOPE


@pytest.mark.full
@pytest.mark.azurite
def test_any_checkpoint_store_may_share_out_the_partitions(place: Place, sent: Orders, azurite: str, blobs: Any) -> None:
    """Azure's own Blob store says who reads; checkpoints and fence stay in the consumer's store."""
    from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore

    async def body() -> None:
        stop = asyncio.Event()
        ownership = BlobCheckpointStore.from_connection_string(azurite, blobs.container_name)
        process = run_async(
            runner_child.consumer(place.store()), sent.double.connection_string, sent.hub, stop=stop, ownership=ownership, **QUICK
        )
        async with ownership:
            running = asyncio.create_task(process)
            await asyncio.to_thread(sent.wait, place)
            stop.set()
            await running

    sent.send(100)
    asyncio.run(body())
    sent.check(place)
    names = {blob.name for blob in blobs.list_blobs()}
    assert any("/ownership/" in name for name in names) and not any("/checkpoint/" in name for name in names)


@pytest.mark.full
def test_on_any_hub_two_processes_share_the_events(any_hub: Any, place: Place) -> None:
    """The double, or the real service where one is named: everything that was sent since the start is there once."""
    mine, begun = uuid.uuid4().hex, dt.datetime.now(dt.UTC) - dt.timedelta(minutes=1)
    for partition in any_hub.begin:
        any_hub.send(partition, [json.dumps({"id": f"{mine}-{partition}-{n}", "amount": n}).encode() for n in range(20)])
    hub: Any = _Through(any_hub, any_hub.connection)

    def wanted() -> list[str]:
        return sorted(row for row in ids(place.read()) if row.startswith(mine))

    with (
        running(runner_child.consumer(place.store()), hub, start=begun) as one,
        running(runner_child.consumer(place.store()), hub, start=begun),
    ):
        until(lambda: len(wanted()) >= 20 * len(any_hub.begin), one.alive)
    assert wanted() == sorted(f"{mine}-{partition}-{n}" for partition in any_hub.begin for n in range(20))
    assert_proven(place.store())
