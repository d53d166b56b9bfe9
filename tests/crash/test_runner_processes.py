"""Runner processes: real ones, that share a hub, are killed, stopped and continued, and take over from each other."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dedup.demo.input import difference
from dedup.verify import verify
from kit import retail
from kit.children import Child, Nursery
from kit.hub_orders import Orders, checkpoints, until
from kit.orders import batch, consumer
from kit.places import DeltaPlace, Place

pytestmark = [pytest.mark.crash, pytest.mark.eventhubs]

Start = Callable[..., Child]


@pytest.fixture
def sent(eventhubs: Any, new_hub: Any) -> Orders:
    """A hub with four partitions and no event yet."""
    return Orders(eventhubs, new_hub(partitions=4))


@pytest.fixture
def start(place: Place, nursery: Nursery, sent: Orders) -> Iterator[Start]:
    """Starts runner processes; those that are left are killed afterwards."""
    started: list[Child] = []

    def one(**task: Any) -> Child:
        named = {"module": "kit.runner_child", "kind": place.kind, "place": place.where}
        started.append(nursery.start({**named, "connection": sent.double.connection_string, "hub": sent.hub, **task}))
        return started[-1]

    yield one
    for child in started:
        if not child.ended:
            child.send(signal.SIGKILL)
            child.wait()


def owned(child: Child) -> set[str]:
    """The partitions that it has claimed so far."""
    return set(re.findall(r"partition (\d) claimed", child.said))


def stop(*children: Child) -> None:
    """As whoever runs containers does."""
    for child in children:
        child.send(signal.SIGTERM)
    for child in children:
        child.finish()


@pytest.mark.fast_on("postgres")
def test_two_processes_share_a_hub_and_one_takes_over_when_the_other_is_killed(place: Place, start: Start, sent: Orders) -> None:
    """The second one gets its half; after SIGKILL the first one has all: nothing is lost, nothing is doubled."""
    sent.send(600)
    one = start()
    until(lambda: len(owned(one)) == 4, one.require_running)
    two = start()
    until(lambda: len(owned(two)) >= 2, two.require_running)
    sent.send(600)
    two.send(signal.SIGKILL)
    two.wait()
    sent.send(600)
    sent.wait(place, one.require_running)
    stop(one)
    sent.check(place)


@pytest.mark.full
def test_three_processes_that_are_killed_while_they_balance(place: Place, start: Start, sent: Orders) -> None:
    """Each in its turn is killed, or stopped until another one has its partition: each event has its effect once."""
    running = [start() for _ in range(3)]
    for turn in range(6):
        sent.send(150)
        one = running.pop(0)
        one.send(signal.SIGSTOP if turn % 3 == 2 else signal.SIGKILL)
        running.append(start())
        until(lambda: owned(running[-1]), running[-1].require_running, 150)
        if turn % 3 == 2:
            one.send(signal.SIGCONT)  # its ownership lasted for three seconds, and another process has its partition
            stop(one)
        else:
            one.wait()
    sent.wait(place, running[0].require_running)
    stop(*running)
    sent.check(place)


@pytest.mark.full
def test_a_process_that_was_stopped_for_longer_than_its_ownership_commits_nothing(
    place: Place, start: Start, sent: Orders, tmp_path: Path
) -> None:
    """SIGSTOP in the middle of a batch; another process takes over; continued, it cannot commit, and goes on as one of two."""
    sent.send(600)
    zombie = start(pause=1.0, entered=str(tmp_path / "in"))
    until(lambda: (tmp_path / f"in.{zombie.pid}").exists(), zombie.require_running)
    zombie.send(signal.SIGSTOP)
    other = start()
    sent.wait(place, other.require_running)
    zombie.send(signal.SIGCONT)
    until(lambda: "claimed partition" in zombie.said or "broke before the commit" in zombie.said, zombie.require_running)
    sent.send(300)
    sent.wait(place, other.require_running)
    stop(zombie, other)
    sent.check(place)


@pytest.mark.fast_on("delta")
def test_sigterm_finishes_the_batch_in_hand_and_gives_the_partitions_back(place: Place, start: Start, sent: Orders, tmp_path: Path) -> None:
    """The process ends well, the batch that it was in is committed, and the next process need not wait for anything to expire."""
    sent.send(400)
    one = start(pause=1.0, entered=str(tmp_path / "in"), options={"expire_after": 600.0})
    until(lambda: (tmp_path / f"in.{one.pid}").exists(), one.require_running)
    stop(one)
    assert place.store().batches("shop").num_rows >= 1
    two = start(options={"expire_after": 600.0}, settings={"takeover_after": 600.0})
    sent.wait(place, two.require_running)
    stop(two)
    sent.check(place)


@pytest.mark.full
def test_a_query_stops_the_processes_and_a_process_does_not_stop_a_query(place: Place, start: Start, sent: Orders) -> None:
    """A Spark query of the same consumer that takes the epoch ends the runner with Fenced; a runner beside a living query is StillHeld."""
    sent.send(40)
    one = start()
    sent.wait(place, one.require_running)
    query = consumer(place.store(), takeover=True)
    query(batch(), 0)
    sent.send(40)
    code, errors = one.wait()
    assert code != 0 and "Fenced" in errors
    store = place.store()
    with store.heartbeat("shop", store.head("shop").epoch, 0.1):
        code, errors = start(settings={"takeover_after": 1.0}).wait()
    assert code != 0 and "StillHeld" in errors, errors


@pytest.mark.full
@pytest.mark.parametrize("events", [12_000, pytest.param(200_000, marks=pytest.mark.full)])
def test_real_order_lines_through_processes_that_come_and_go(
    place: Place, start: Start, sent: Orders, online_retail: Path, events: int
) -> None:
    """Online Retail, a twentieth of it sent twice: processes killed, stopped, continued and ended in mid-stream; row by row as computed."""
    events = events if events < 100_000 or not isinstance(place, DeltaPlace) else 50_000
    create_lines(place)
    days = first_days(online_retail, events)
    waves = lines(days, sent.partitions)
    options = {"max_events": 2_000, "prefetch": 2_000, "expire_after": 2.0}
    one, two = (start(retail=True, options=options) for _ in range(2))
    for number, wave in enumerate(waves):
        for partition, bodies in enumerate(wave):
            sent.double.put(sent.hub, partition, bodies)
            sent.bodies[partition] += bodies
        if number == 2:
            one.send(signal.SIGKILL)
            one = start(retail=True, options=options)
        if number == 5:
            one.send(signal.SIGSTOP)
        if number == 7:
            time.sleep(4)
            one.send(signal.SIGCONT)
            stop(two)
            two = start(retail=True, options=options)
    until(lambda: checkpoints(place, retail.CONSUMER) == sent.ends, two.require_running, 300)
    stop(one, two)
    check_lines(place, days, sum(map(len, sent.bodies)))


def first_days(data: Path, events: int) -> list[pa.Table]:
    """So many order lines, and the rest of the day that the last one is of."""
    days: list[pa.Table] = []
    for day in retail.read(data):
        if sum(d.num_rows for d in days) >= events:
            break
        days.append(day)
    return days


def lines(days: list[pa.Table], partitions: int, waves: int = 10) -> list[list[list[bytes]]]:
    """Wave -> partition -> bodies. Every twentieth comes again in the next partition, as from a producer that tried again."""
    bodies = [json.dumps(row).encode() for day in days for row in day.to_pylist()]
    size = -(-len(bodies) // waves)
    parts = [bodies[at : at + size] for at in range(0, len(bodies), size)]
    return [
        [part[p::partitions] + part[p :: partitions * 20] + part[(p + 1) % partitions :: partitions * 20] for p in range(partitions)]
        for part in parts
    ]


def create_lines(place: Any) -> None:
    """The sink."""
    if isinstance(place, DeltaPlace):
        place.create_text_sink(retail.SINK, retail.COLUMNS)
    else:
        place.execute(f"CREATE TABLE {retail.SINK} (" + ", ".join(f'"{name}" text' for name in retail.COLUMNS) + ")")


def check_lines(place: Place, days: list[pa.Table], delivered: int) -> None:
    """The sink row by row; each position one outcome."""
    store = place.store()
    store.publish(retail.CONSUMER)
    lost, doubled = difference(retail.expected(days), place.read_text(retail.SINK, retail.COLUMNS).cast(retail.ROW))
    assert (lost.num_rows, doubled.num_rows) == (0, 0)
    report = verify(store, retail.CONSUMER)
    assert report.ok, report.contradictions
    assert report.counts["delivered"] - report.counts["redelivered"] == delivered
    print({"delivered": delivered, **report.counts})


@pytest.mark.full
def test_an_event_that_kills_its_process_is_parked(place: Place, start: Start, sent: Orders) -> None:
    """However differently its batches are cut after a restart: the batch that a process died in is tried again with the same rows."""
    sent.send(40)
    sent.double.put(sent.hub, 0, [b'{"id": "killer", "amount": 1}'])
    for _ in range(12):
        child = start(deadly="killer", options={"expire_after": 1.5})
        until(lambda c=child: c.ended or len(sent.bodies[0]) in _heights(place), seconds=300)
        if not child.ended:
            stop(child)
            break
    kinds = [x["kind"] for x in place.store().letters(_all()).to_pylist() if x["idempotence_key"] == "killer"]
    assert kinds == ["CRASHED"]


def _heights(place: Place) -> set[int]:
    return {c.sequence_number for p, c in place.store().head("shop").checkpoints.items() if p.partition == 0}


def _all() -> Any:
    from deadletter.selection import Selection

    return Selection(limit=None)
