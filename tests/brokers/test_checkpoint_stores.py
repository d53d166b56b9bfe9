"""What every CheckpointStore of azure-eventhub promises, asked of ours and of Azure's on Blob storage, for threads and for asyncio."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from fixtures.fix_eventhubs import AnyHub, MakeHub
from kit import checkpoint_kit
from kit.checkpoint_kit import KINDS, Store, opened, ownership, position
from kit.eventhubs.control import Double
from kit.pg_run import run

GROUP = ("name.servicebus.windows.net", "orders", "$Default")
PARTITIONS = [str(number) for number in range(8)]
SECONDS = 180


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        fast_on = metafunc.definition.get_closest_marker("fast_on")
        metafunc.parametrize("kind", [pytest.param(kind, marks=_marks(kind, KINDS if fast_on is None else fast_on.args)) for kind in KINDS])


def _marks(kind: str, fast: Sequence[str]) -> list[pytest.MarkDecorator]:
    """Azure's own stores are there to compare with."""
    on_blobs = kind.startswith("blob")
    return [pytest.mark.azurite if on_blobs else pytest.mark.postgres, *[pytest.mark.full] * (on_blobs or kind not in fast)]


@pytest.fixture
def place(kind: str, request: pytest.FixtureRequest) -> str:
    """Where stores of this kind keep what they keep: a database or a container of the test's own."""
    if kind.startswith("postgres"):
        return str(request.getfixturevalue("postgres"))
    return f"{request.getfixturevalue('blobs').container_name}|{request.getfixturevalue('azurite')}"


@pytest.fixture
def another(kind: str, place: str) -> Iterator[Callable[[], Store]]:
    """Opens one more store at the same place, as another processor would."""
    made: list[Store] = []

    def make() -> Store:
        made.append(opened(kind, place))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(another: Callable[[], Store]) -> Store:
    return another()


def needs_if_none_match(kind: str) -> None:
    """Azurite 3.35 lets `If-None-Match: *` pass in Set Blob Metadata, which Azure refuses with 412: there a first claim always wins."""
    if kind.startswith("blob") and not os.environ.get("DEDUP_TEST_BLOB"):
        pytest.skip("Azurite does not refuse a first claim of a partition that has an owner; Azure does (DEDUP_TEST_BLOB)")


def test_a_group_that_nobody_has_worked_on_is_empty(store: Store) -> None:
    """No ownerships and no checkpoints, and no error."""
    assert store.owners(*GROUP) == store.checkpoints(*GROUP) == []


def test_a_first_claim_has_no_etag_and_gets_one(store: Store, another: Callable[[], Store]) -> None:
    """The answer is the claim with an etag and the time as seconds since 1970; any processor reads the same."""
    (won,) = store.claim(ownership("0", "ann", GROUP))
    assert won["owner_id"] == "ann" and won["partition_id"] == "0" and won["etag"] and isinstance(won["last_modified_time"], float)
    assert abs(won["last_modified_time"] - time.time()) < 3600, "seconds, not milliseconds, and not local time"
    (seen,) = another().owners(*GROUP)
    assert {**seen, "etag": ""} == {**won, "etag": ""} and seen["etag"].strip('"') == won["etag"].strip('"')


def test_a_partition_that_has_an_owner_cannot_be_claimed_without_its_etag(store: Store, another: Callable[[], Store]) -> None:
    """The loser of a first claim gets an answer without that partition, not an error, and changes nothing."""
    needs_if_none_match(store.kind)
    (won,) = store.claim(ownership("0", "ann", GROUP))
    assert another().claim(ownership("0", "bob", GROUP)) == []
    assert store.owners(*GROUP)[0]["owner_id"] == won["owner_id"]


def test_a_claim_with_the_etag_that_was_read_wins_once(store: Store, another: Callable[[], Store]) -> None:
    """Renewals and takeovers name the etag; it changes with each, and an old one loses."""
    store.claim(ownership("0", "ann", GROUP))
    (read,) = store.owners(*GROUP)
    (renewed,) = store.claim(ownership("0", "ann", GROUP, read["etag"]))
    assert renewed["etag"].strip('"') != read["etag"].strip('"')
    assert another().claim(ownership("0", "bob", GROUP, read["etag"])) == []
    (taken,) = another().claim(ownership("0", "bob", GROUP, renewed["etag"]))
    assert store.claim(ownership("0", "ann", GROUP, renewed["etag"])) == []
    assert store.owners(*GROUP)[0]["owner_id"] == taken["owner_id"] == "bob"


def test_an_etag_of_a_partition_that_is_not_there_loses(store: Store) -> None:
    """Whoever has read an etag has read a row; without the row the claim is void, and makes none."""
    assert store.claim(ownership("0", "ann", GROUP, "0x123")) == [] == store.owners(*GROUP)


def test_in_one_call_some_are_won_and_some_are_lost(store: Store, another: Callable[[], Store]) -> None:
    """Each partition is a race of its own; the answer holds those that were won."""
    store.claim(ownership("1", "ann", GROUP), ownership("2", "ann", GROUP))
    etags = {o["partition_id"]: o["etag"] for o in store.owners(*GROUP)}
    old, etags["1"] = etags["1"], store.claim(ownership("1", "ann", GROUP, etags["1"]))[0]["etag"]
    claims = [ownership("0", "bob", GROUP), ownership("1", "bob", GROUP, old), ownership("2", "bob", GROUP, etags["2"])]
    assert sorted(o["partition_id"] for o in another().claim(*claims)) == ["0", "2"]
    assert {o["partition_id"]: o["owner_id"] for o in store.owners(*GROUP)} == {"0": "bob", "1": "ann", "2": "bob"}


def test_answers_keep_the_order_of_the_request(store: Store, another: Callable[[], Store]) -> None:
    """First claims, and renewals in another order; a partition that is lost leaves no trace of itself."""
    asked = ["10", "2", "0", "1"]
    won = store.claim(*[ownership(partition, "ann", GROUP) for partition in asked])
    assert [o["partition_id"] for o in won] == asked
    (taken,) = another().claim({**won[2], "owner_id": "bob"})
    assert [o["partition_id"] for o in store.claim(won[1], won[3], won[2], won[0])] == ["2", "1", "10"] and taken["owner_id"] == "bob"


def test_a_partition_named_by_a_number_is_the_same_partition(store: Store) -> None:
    """The answer names it as it was asked for, lists name it as text."""
    (won,) = store.claim({**ownership("3", "ann", GROUP), "partition_id": 3})
    assert won["partition_id"] == 3 and [o["partition_id"] for o in store.owners(*GROUP)] == ["3"]
    assert [o["partition_id"] for o in store.claim(won)] == [3]
    store.update({**position("3", 7, GROUP), "partition_id": 3})
    assert store.checkpoints(*GROUP) == [position("3", 7, GROUP)]


def test_answers_are_the_callers_own(store: Store) -> None:
    """azure's load balancer writes into what it was given: neither the store nor a later answer may change by that."""
    asked = ownership("0", "ann", GROUP)
    (won,) = store.claim(asked)
    assert won is not asked and "etag" not in asked
    won["owner_id"] = "somebody"
    (listed,) = store.owners(*GROUP)
    listed["owner_id"] = listed["etag"] = "else"
    store.update(position("0", 1, GROUP))
    store.checkpoints(*GROUP)[0]["offset"] = "wrong"
    assert store.owners(*GROUP)[0]["owner_id"] == "ann" and store.checkpoints(*GROUP)[0]["offset"] == "100"


def test_a_partition_that_was_given_back_has_no_owner(store: Store, another: Callable[[], Store]) -> None:
    """A processor that stops claims for nobody; the next one takes the partition with the etag of that."""
    (won,) = store.claim(ownership("0", "ann", GROUP))
    store.claim({**won, "owner_id": ""})
    (free,) = another().owners(*GROUP)
    assert not free["owner_id"]
    assert [o["owner_id"] for o in another().claim({**free, "owner_id": "bob"})] == ["bob"]


def test_groups_hubs_and_namespaces_are_apart(store: Store) -> None:
    """One place serves many consumers; names that begin alike are still others."""
    groups = [GROUP, (GROUP[0], "orders2", GROUP[2]), (GROUP[0], "orders", "second"), ("name2.servicebus.windows.net", *GROUP[1:])]
    for number, group in enumerate(groups):
        store.claim(ownership("1", f"owner {number}", group))
        store.update(position("1", number, group))
    for number, group in enumerate(groups):
        assert [o["owner_id"] for o in store.owners(*group)] == [f"owner {number}"]
        assert [c["sequence_number"] for c in store.checkpoints(*group)] == [number]


def test_names_are_the_same_in_any_case(store: Store) -> None:
    """Event Hubs takes names in any case for the same; answers repeat the caller's own spelling."""
    loud = tuple(name.upper() for name in GROUP)
    store.claim(ownership("0", "ann", GROUP))
    store.update(position("0", 5, GROUP))
    (owner,), (point,) = store.owners(*loud), store.checkpoints(*loud)
    assert owner["eventhub_name"] == point["eventhub_name"] == "ORDERS" and owner["owner_id"] == "ann" and point["sequence_number"] == 5


def test_a_checkpoint_is_handed_back_as_it_came(store: Store, another: Callable[[], Store]) -> None:
    """The offset is a text of the broker's that nobody reads a number from, the sequence number a number."""
    point = position("0", 7, GROUP, offset="0x:Ä 12")
    if store.kind.startswith("blob"):
        point["offset"] = "12:34"  # Blob metadata are HTTP headers: ASCII only
    store.update(point)
    store.update(position("1", 2**40, GROUP))
    assert another().checkpoints(*GROUP) == [point, position("1", 2**40, GROUP)]


def test_a_checkpoint_moves_forward(store: Store) -> None:
    """Each partition has one, and the last one counts."""
    for number in (1, 2, 30):
        store.update(position("0", number, GROUP))
    assert store.checkpoints(*GROUP) == [position("0", 30, GROUP)]


def test_a_checkpoint_that_comes_late(store: Store) -> None:
    """A promise of ours only: the late update of a processor that has lost its partition moves nothing back. On Blob it does."""
    store.update(position("0", 30, GROUP))
    store.update(position("0", 12, GROUP))
    ours = store.kind.startswith("postgres")
    assert store.checkpoints(*GROUP) == [position("0", 30 if ours else 12, GROUP)]


@pytest.mark.fast_on("postgres")
def test_of_processes_that_claim_at_once_one_wins(kind: str, place: str, store: Store) -> None:
    """Three processes have read the same etag and claim at the same moment: each time exactly one of them gets the partition."""
    rounds, context = 20, multiprocessing.get_context("spawn")
    barrier, won = context.Barrier(3), context.Queue()
    store.claim(ownership("0", "nobody", GROUP))
    arguments = [(kind, place, name, GROUP, rounds, barrier, won) for name in ("ann", "bob", "cat")]
    processes = [context.Process(target=checkpoint_kit.race, args=given, daemon=True) for given in arguments]
    for process in processes:
        process.start()
    told = [won.get(timeout=SECONDS) for _ in range(3 * rounds)]
    for process in processes:
        process.join(SECONDS)
    assert Counter(number for number, _, mine in told for _ in range(mine)) == Counter(range(rounds))
    last = next(me for number, me, mine in told if number == rounds - 1 and mine)
    assert store.owners(*GROUP)[0]["owner_id"] == f"{last}-{rounds - 1}"


class Processor:
    """An event processor in a process of its own."""

    def __init__(self, kind: str, place: str, connection: str, hub: str) -> None:
        command = [sys.executable, "-m", "kit.checkpoint_kit", kind, place, connection, hub]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Processor:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> list[str]:
        """In order; what it has seen."""
        return self.process.communicate(timeout=SECONDS)[0].split("\n")


def until(condition: Callable[[], bool]) -> None:
    """Wait until it is true."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.fast_on("postgres")
def test_two_processors_share_eight_partitions_and_one_takes_over_when_the_other_dies(
    kind: str, place: str, store: Store, eventhubs: Double, new_hub: MakeHub
) -> None:
    """azure's own clients: four partitions each; one is killed with SIGKILL, the other one has all eight and reads to every end."""
    hub = new_hub(partitions=8)
    group = (eventhubs.host, hub, "$Default")
    for partition in range(8):
        eventhubs.fill(hub, partition, 5)

    def shares() -> list[int]:
        return sorted(Counter(o["owner_id"] for o in store.owners(*group) if o["owner_id"]).values())

    where = (kind, place, eventhubs.connection_string, hub)
    with Processor(*where) as first, Processor(*where) as second:
        until(lambda: shares() == [4, 4])
        first.process.kill()
        until(lambda: shares() == [8])
        for partition in range(8):
            eventhubs.fill(hub, partition, 5)
        until(lambda: {c["partition_id"]: c["sequence_number"] for c in store.checkpoints(*group)} == dict.fromkeys(PARTITIONS, 9))
        seen = second.stop()
    assert {f"{partition} {number}" for partition in PARTITIONS for number in range(5, 10)} <= set(seen)


@pytest.mark.full
def test_on_any_hub_the_survivor_reads_to_every_end(any_hub: AnyHub, postgres: str) -> None:
    """The same with ours on the double and, where one is named, on the real service: halves, one dies, all partitions to what was sent."""
    many = len(any_hub.begin)
    where = ("postgres_aio", postgres, any_hub.connection, any_hub.name)
    opened("postgres", postgres).owners(*GROUP)  # makes the tables

    def shares() -> list[int]:
        owned = run(postgres, "select count(*)::int from dedup.partition_owner where owner_id <> '' group by owner_id order by 1")
        return [number for (number,) in owned]

    with Processor(*where) as first, Processor(*where):
        until(lambda: shares() == [many // 2, many - many // 2])
        first.process.kill()
        until(lambda: shares() == [many])
        for partition in any_hub.begin:
            any_hub.send(partition, [b"a", b"b"])
        ends = {str(partition): begin + 1 for partition, begin in any_hub.begin.items()}
        until(lambda: dict(run(postgres, "select partition_id, sequence_number from dedup.processor_checkpoint")) == ends)
