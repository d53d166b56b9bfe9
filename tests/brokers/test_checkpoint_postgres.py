"""What our CheckpointStore promises beyond azure's: numbers of owners, broken connections, many at once, and errors that say what to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import checkpoint.aio
from checkpoint import PostgresCheckpointStore, processors
from checkpoint.errors import ConfigError, SchemaOutdated, StoreUnavailable
from checkpoint.processors import After, Group
from kit.checkpoint_kit import END_SESSIONS, Store, opened, ownership, position
from kit.pg_proxy import Proxy, proxied
from kit.pg_run import run

GROUP = ("name.servicebus.windows.net", "orders", "$Default")
KEEP = """
    select owner_id, owner_number from dedup.partition_owner
    where (namespace, hub, consumer_group, partition_id) = ('name.servicebus.windows.net', 'orders', '$default', '0') for key share
"""
"""How a transaction keeps a partition's owner as it is: what is fenced by it."""


@pytest.fixture(params=["postgres", "postgres_aio"])
def store(request: pytest.FixtureRequest, postgres: str) -> Iterator[Store]:
    """Both of ours."""
    made = opened(request.param, postgres)
    yield made
    made.close()


@pytest.fixture
def wire(postgres: str) -> Iterator[Proxy]:
    """A proxy before the server."""
    with proxied(int(str(conninfo_to_dict(postgres)["port"]))) as proxy:
        yield proxy


def behind(kind: str, postgres: str, wire: Proxy) -> Store:
    """A store whose connection goes through the proxy."""
    return opened(kind, make_conninfo(postgres, host="127.0.0.1", port=wire.port))


def number(store: Store, partition: str = "0") -> int:
    return next(int(o["owner_number"]) for o in store.owners(*GROUP) if o["partition_id"] == partition)


def claim(store: Store, owner: str) -> list[dict[str, Any]]:
    """Claim partition 0 with the etag that is there."""
    etags = [o["etag"] for o in store.owners(*GROUP)]
    return store.claim(ownership("0", owner, GROUP, etags[0] if etags else None))


def test_the_number_of_the_owner_rises_when_a_partition_changes_hands(store: Store, postgres: str) -> None:
    """A renewal keeps it; a takeover, giving back, taking again and a row that was deleted raise it: no two owners ever had the same."""
    numbers = []
    for owner, changes in [("ann", True), ("ann", False), ("bob", True), ("", True), ("ann", True), ("ann", False)]:
        (won,) = claim(store, owner)
        assert (won["owner_number"] > max(numbers, default=0)) == changes and won["owner_number"] == number(store)
        numbers.append(won["owner_number"])
    run(postgres, "delete from dedup.partition_owner")
    assert claim(store, "ann")[0]["owner_number"] > max(numbers)


def test_a_transaction_that_keeps_the_owner_lets_renewals_pass_and_claims_lose(store: Store, postgres: str) -> None:
    """What is fenced by a partition's number: while a transaction holds it nobody else becomes the owner, and nobody waits."""
    claim(store, "ann")
    with psycopg.connect(postgres) as fenced:
        kept = fenced.execute(KEEP).fetchone()
        assert [o["owner_id"] for o in claim(store, "ann")] == ["ann"]
        assert claim(store, "bob") == []
        assert claim(store, "") == [], "nor is it given back under the transaction"
        assert fenced.execute(KEEP).fetchone() == kept
    assert [o["owner_id"] for o in claim(store, "bob")] == ["bob"]


def test_one_locked_partition_does_not_stop_the_others(store: Store, postgres: str) -> None:
    """A transaction that hangs costs one partition, not the renewal of all of them."""
    first = store.claim(*[ownership(p, "ann", GROUP) for p in "012"])
    with psycopg.connect(postgres) as stuck:
        stuck.execute(KEEP.replace("for key share", "for update"))
        assert [o["partition_id"] for o in store.claim(*first)] == ["1", "2"]


def test_many_first_claims_at_once_have_one_winner_each_and_no_deadlock(postgres: str) -> None:
    """Four processors claim the same new partitions, half of them in the opposite order: each is won once, and nobody gets an error."""
    stores = [opened("postgres", postgres) for _ in range(4)]
    stores[0].owners(*GROUP)
    partitions = [str(n) for n in range(400)]
    for attempt in range(5):
        group = (GROUP[0], f"hub{attempt}", GROUP[2])
        wanted = [[ownership(p, f"owner {n}", group) for p in partitions[:: -1 if n % 2 else 1]] for n in range(4)]
        with ThreadPoolExecutor(4) as pool:
            won = [o for answer in pool.map(lambda n, w=wanted: stores[n].claim(*w[n]), range(4)) for o in answer]
        assert sorted(o["partition_id"] for o in won) == sorted(partitions)
    for store in stores:
        store.close()


def test_threads_share_a_store(postgres: str) -> None:
    """azure's client for threads updates checkpoints from one thread a partition."""
    with PostgresCheckpointStore(postgres) as store, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.update_checkpoint(position(str(n % 8), n, GROUP)), range(200)))
        assert [c["sequence_number"] for c in store.list_checkpoints(*GROUP)] == list(range(192, 200))


def test_of_late_and_timely_updates_the_highest_counts(postgres: str) -> None:
    """Two processors that write one checkpoint in any order, at once, leave the higher one."""
    with PostgresCheckpointStore(postgres) as one, PostgresCheckpointStore(postgres) as two, ThreadPoolExecutor(2) as pool:
        one.list_checkpoints(*GROUP)
        mixed = [(n * 37) % 100 for n in range(100)]
        list(pool.map(lambda s: [s[0].update_checkpoint(position("0", n, GROUP)) for n in s[1]], [(one, mixed), (two, mixed[::-1])]))
        assert list(one.list_checkpoints(*GROUP)) == [position("0", 99, GROUP)]


def test_a_late_update_is_told_and_a_repeated_one_is_not(postgres: str, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that stays where it is, is a warning with both positions and the way out; the same again is nothing."""
    with PostgresCheckpointStore(postgres) as store:
        for n in (30, 30):
            store.update_checkpoint(position("0", n, GROUP))
        assert caplog.messages == []
        store.update_checkpoint(position("0", 12, GROUP))
    assert "stays at 30, 12 is behind" in caplog.text and "dedup checkpoint set" in caplog.text


def test_it_connects_again(store: Store, postgres: str) -> None:
    """The server ended the session: the next call opens another and answers."""
    claim(store, "ann")
    run(postgres, END_SESSIONS)
    assert [o["owner_id"] for o in claim(store, "ann")] == ["ann"]


@pytest.mark.parametrize("kind", ["postgres", "postgres_aio"])
def test_a_claim_whose_answer_was_lost_is_found_when_it_is_repeated(kind: str, postgres: str, wire: Proxy) -> None:
    """The server has done it, the connection broke before the answer: the repetition tells the claim as won, with the etag that it has.

    Where the server is still at the first one, the repetition passes it by, and the next claim is won.
    """
    store = behind(kind, postgres, wire)
    claim(store, "ann")
    wire.trigger, wire.armed = b"claim as (", True
    until = time.monotonic() + 30
    while not (found := claim(store, "bob")) and time.monotonic() < until:
        time.sleep(0.05)
    (won,) = found
    assert wire.cut.wait(10) and won["etag"] == store.owners(*GROUP)[0]["etag"]
    assert [o["owner_id"] for o in store.claim(won)] == ["bob"]
    store.close()


@pytest.mark.parametrize("kind", ["postgres", "postgres_aio"])
def test_a_server_that_stays_away_is_an_error_that_says_so(kind: str, postgres: str, wire: Proxy) -> None:
    """StoreUnavailable, and not the driver's own; once the server is back the same store works."""
    store = behind(kind, postgres, wire)
    claim(store, "ann")
    run(postgres, END_SESSIONS)
    wire.refuse = True
    with pytest.raises(StoreUnavailable, match=r"Listing owners of .*/orders/.* do it again"):
        store.owners(*GROUP)
    wire.refuse = False
    assert [o["owner_id"] for o in claim(store, "ann")] == ["ann"]
    store.close()


def test_a_task_that_is_cancelled_leaves_a_store_that_works(postgres: str) -> None:
    """azure cancels the tasks of partitions that it has lost, also in the middle of a checkpoint: the next answer is the right one."""

    async def scene() -> list[dict[str, Any]]:
        async with checkpoint.aio.PostgresCheckpointStore(postgres) as store:
            await store.update_checkpoint(position("0", 1, GROUP))
            with psycopg.connect(postgres) as busy:
                busy.execute("select from dedup.processor_checkpoint for update")
                task = asyncio.create_task(store.update_checkpoint(position("0", 2, GROUP)))
                await asyncio.sleep(0.2)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await store.update_checkpoint(position("1", 5, GROUP))
            return list(await store.list_checkpoints(*GROUP))

    assert {c["partition_id"]: c["sequence_number"] for c in asyncio.run(scene())}["1"] == 5


def test_a_sequence_number_stands_for_an_offset_that_nobody_knows(postgres: str) -> None:
    """The SDK takes an int for a sequence number and anything false for no checkpoint at all: even 0 has to be true."""
    with PostgresCheckpointStore(postgres) as store:
        store.update_checkpoint({**position("0", 0, GROUP), "offset": None})
        (point,) = store.list_checkpoints(*GROUP)
        assert point["offset"] == 0 and isinstance(point["offset"], int) and point["offset"] and f"{point['offset']}" == "0"
        store.update_checkpoint({**point, "sequence_number": 3, "offset": After(3)})
        assert [c["offset"] for c in store.list_checkpoints(*GROUP)] == [3]


def test_a_checkpoint_without_a_number_is_refused(postgres: str) -> None:
    """Before anything is written."""
    with PostgresCheckpointStore(postgres) as store, pytest.raises(ConfigError, match="partitions 0 have none"):
        store.update_checkpoint({**position("0", 0, GROUP), "sequence_number": None})


def test_a_person_can_set_a_checkpoint_back_if_it_has_not_moved(postgres: str) -> None:
    """Compare and set, with who and why beside it; the next event of a processor takes that note away."""
    group = Group(*GROUP)
    noted = "select set_by, set_reason from dedup.processor_checkpoint"
    with PostgresCheckpointStore(postgres) as store:
        store.update_checkpoint(position("0", 30, GROUP))
        assert not store.set_checkpoint(group, "0", 5, seen=29, by="ann", reason="again")
        assert store.set_checkpoint(group, "0", 5, seen=30, by="ann", reason="again") and run(postgres, noted) == [("ann", "again")]
        assert store.set_checkpoint(group, "1", 7, seen=None, by="ann", reason="new", offset="700")
        assert [c["sequence_number"] for c in store.list_checkpoints(*GROUP)] == [5, 7]
        store.update_checkpoint(position("0", 6, GROUP))
    assert (None, None) in run(postgres, noted)


def test_the_tables_may_be_made_by_somebody_else(empty_postgres: str) -> None:
    """With auto_migrate off a store creates nothing and names the command."""
    with PostgresCheckpointStore(empty_postgres, auto_migrate=False) as store, pytest.raises(SchemaOutdated, match="dedup migrate"):
        store.list_ownership(*GROUP)
    assert run(empty_postgres, "select count(*) from pg_namespace where nspname = 'dedup'") == [(0,)]


def test_secrets_are_not_shown() -> None:
    """Neither in the repr nor in an error."""
    for make in (PostgresCheckpointStore, checkpoint.aio.PostgresCheckpointStore):
        store = make("postgresql://ann:s3cret@127.0.0.1:1/shop")
        assert "s3cret" not in repr(store) and "ann" in repr(store)
    with pytest.raises(StoreUnavailable) as failed:
        PostgresCheckpointStore("postgresql://ann:s3cret@127.0.0.1:1/shop").list_ownership(*GROUP)
    assert "s3cret" not in str(failed.value)
    with pytest.raises(ConfigError):
        PostgresCheckpointStore("postgresql://x", schema="pg_x")


def test_importing_checkpoint_imports_no_driver() -> None:
    """`import checkpoint` works without azure and psycopg; only the store needs them."""
    program = "import sys, checkpoint, checkpoint.processors; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert not {"azure", "psycopg"} & set(loaded)
    assert processors.Group("A", "B").parameters == {"namespace": "a", "hub": "b", "group": "$default"}


@pytest.mark.parametrize(
    ("name", "hidden", "extra"),
    [("PostgresCheckpointStore", "azure.eventhub", "eventhubs,postgres"), ("BlobMirror", "azure.storage", "blob")],
)
def test_a_missing_driver_is_one_sentence_with_the_extra(name: str, hidden: str, extra: str) -> None:
    """Who lacks azure's package reads what to install."""
    program = f"import sys; sys.modules[{hidden!r}] = None\ntry:\n    from checkpoint import {name}\nexcept ImportError as e: print(e)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"pip install 'dedup-spark[{extra}]'" in told and told.count("\n") == 1
