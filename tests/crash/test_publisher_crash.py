"""Publishers in processes of their own, that are killed, stopped and overtaken, against the double and a real PostgreSQL."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dedup.publishing import Published
from dedup.publishing.publisher import STEPS
from kit.children import Child, Nursery
from kit.hub_orders import until
from kit.pg_run import run
from kit.publish_child import KEYS, event
from kit.publish_kit import consumed, kept, publisher, waiting

pytestmark = [pytest.mark.crash, pytest.mark.postgres, pytest.mark.eventhubs]

Start = Callable[..., Child]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Makes processes that may be killed."""
    one = Nursery(tmp_path_factory.mktemp("publishers"))
    yield one
    one.close()


@pytest.fixture
def hub(new_hub: Any) -> str:
    """A hub with two partitions."""
    name: str = new_hub(partitions=2)
    return name


@pytest.fixture
def start(nursery: Nursery, postgres: str, eventhubs: Any, hub: str, tmp_path: Path) -> Iterator[Start]:
    """Starts processes; those that are left are killed afterwards."""
    started: list[Child] = []

    def one(**task: Any) -> Child:
        number = len(started)
        files = {"reached": str(tmp_path / f"reached{number}"), "result": str(tmp_path / f"result{number}")}
        place = {"module": "kit.publish_child", "connection": eventhubs.connection_string, "hub": hub, "place": postgres, "group": "shop"}
        started.append(nursery.start({**place, **files, **task}))
        started[-1].reached, started[-1].result = Path(files["reached"]), Path(files["result"])  # type: ignore[attr-defined]
        return started[-1]

    yield one
    for child in started:
        if not child.ended:
            child.send(signal.SIGKILL)
            child.wait()


def assert_once_in_order(bodies: list[str], count: int) -> None:
    """Each of the events once, those of a key in the order in which they were published."""
    found = [int(body) for body in bodies]
    assert sorted(found) == list(range(count))
    for key in range(KEYS):
        mine = [number for number in found if number % KEYS == key]
        assert mine == sorted(mine)


def test_kill_between_each_two_steps(start: Start, postgres: str, eventhubs: Any, hub: str) -> None:
    """SIGKILL right before each step, the crash before it has stored its state included: what was called again is once at the consumer."""
    deaths = [
        ("open", 1),
        ("look", 1),
        ("store", 2),
        ("send", 3),
        ("resend", 1),
        ("sent", 2),
        ("confirm", 1),
        ("resend", 1),
        ("confirmed", 2),
    ]
    assert {step for step, _ in deaths} == set(STEPS)
    for number, (step, nth) in enumerate(deaths):
        child = start(first=0, last=20 * (number + 1), at=step, nth=nth, signal="SIGKILL")
        assert child.wait()[0] == -signal.SIGKILL, (step, child.said)
    start(first=0, last=200).finish()
    assert waiting(postgres) == 0 and len(kept(eventhubs, hub)) > 200
    bodies, letters = consumed(postgres, eventhubs, hub)
    assert_once_in_order(bodies, 200)
    assert not letters


@pytest.mark.full
def test_two_processes_with_the_same_ids_at_once(start: Start, postgres: str, eventhubs: Any, hub: str) -> None:
    """Two groups publish the same ids: each of them is stored by one of the two, and sent once."""
    two = [start(first=0, last=300, group=group, page=7) for group in ("east", "west")]
    for child in two:
        child.finish()
    new, known = (sum(int(child.result.read_text().split()[n]) for child in two) for n in (0, 1))  # type: ignore[attr-defined]
    assert (new, known) == (300, 300)
    assert sorted(map(int, kept(eventhubs, hub))) == list(range(300)) and waiting(postgres) == 0
    assert_once_in_order(consumed(postgres, eventhubs, hub)[0], 300)


@pytest.mark.full
def test_two_processes_with_the_same_ids_and_other_bodies(start: Start, postgres: str, eventhubs: Any, hub: str) -> None:
    """One of them gets KeyConflict; of each id there is one body."""
    two = [start(first=0, last=100, group=group, prefix=prefix, page=100) for group, prefix in (("east", ""), ("west", "0"))]
    ended = [child.wait() for child in two]
    assert sorted(code for code, _ in ended) == [0, 1] and "KeyConflict" in "".join(said for _, said in ended)
    assert sorted(map(int, kept(eventhubs, hub))) == list(range(100))


@pytest.mark.full
def test_a_stopped_publisher_that_wakes_up_sends_nothing(start: Start, postgres: str, eventhubs: Any, hub: str) -> None:
    """SIGSTOP between storing and sending, another one takes over and sends what was stored, SIGCONT: Fenced, and the hub is as it was."""
    child = start(first=0, last=10, at="send", signal="SIGSTOP")
    until(child.reached.exists, child.require_running)  # type: ignore[attr-defined]
    with publisher(postgres, eventhubs, hub) as newer:
        assert len(kept(eventhubs, hub)) == 10
        assert newer.publish([event(number) for number in range(20)]) == Published(new=10, known=10)
        before = kept(eventhubs, hub)
        time.sleep(1.1)  # longer than a publisher trusts what it saw
        child.send(signal.SIGCONT)
        code, said = child.wait()
        assert code == 1 and "Fenced" in said
        assert kept(eventhubs, hub) == before
    assert_once_in_order(consumed(postgres, eventhubs, hub)[0], 20)


@pytest.mark.full
def test_an_id_of_a_killed_publisher_is_sent_by_who_asks_for_it(start: Start, postgres: str, eventhubs: Any, hub: str) -> None:
    """Killed with its events stored and not sent: another group that publishes one of the ids sends all of them, in their order."""
    child = start(first=0, last=10, group="east", at="send", signal="SIGKILL")
    child.wait()
    with publisher(postgres, eventhubs, hub, "west") as other:
        assert other.publish([event(3)]) == Published(known=1)
    assert_once_in_order(consumed(postgres, eventhubs, hub)[0], 10)


@pytest.mark.full
def test_publish_and_consume_with_kills_on_both_sides(start: Start, postgres: str, eventhubs: Any, hub: str) -> None:
    """12,000 events through publishers and runners that are killed at any moment: each once in the sink, those of a key in order."""
    run(postgres, "create table seen (partition int, number bigint, body text)")
    count, dice = 12_000, random.Random(hub)
    eventhubs.order("lose_answers", count=3)
    reader, sender = start(read=True), start(first=0, last=count, page=250)
    kills = {"sender": 5, "reader": 3}
    while not sender.ended or sum(kills.values()):
        time.sleep(dice.uniform(0.3, 2.0))
        if kills["sender"] and not (sender.ended and sender.wait()[0] == 0):
            kills["sender"] -= 1
            sender = _again(sender, lambda: start(first=0, last=count, page=250))
        elif sender.ended:
            kills["sender"] = 0
        if kills["reader"]:
            kills["reader"] -= 1
            reader = _again(reader, lambda: start(read=True))
    sender.finish()
    until(lambda: run(postgres, "select count(*) from seen")[0][0] >= count, reader.require_running, seconds=120)
    reader.send(signal.SIGTERM)
    reader.finish()
    assert_once_in_order([body for (body,) in run(postgres, "select body from seen order by partition, number")], count)
    assert run(postgres, "select count(*) from dedup.dead_letter") == [(0,)]
    sent = len(kept(eventhubs, hub))
    print({"events": count, "sent": sent})
    assert sent > count


def _again(child: Child, begin: Callable[[], Child]) -> Child:
    if not child.ended:
        child.send(signal.SIGKILL)
    child.wait()
    return begin()
