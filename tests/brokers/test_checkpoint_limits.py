"""Our CheckpointStore when others are in the way: locked rows, servers that hang or go, other defaults of a session, other event loops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from azure.eventhub import LoadBalancingStrategy
from azure.eventhub._eventprocessor import ownership_manager
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import checkpoint.aio
from checkpoint import PostgresCheckpointStore
from checkpoint.errors import ConfigError, StoreUnavailable
from fixtures.variants import of_which
from kit.checkpoint_kit import END_SESSIONS, make, opened, ownership, position
from kit.pg_help import WAITING
from kit.pg_proxy import Proxy, proxied, until
from kit.pg_run import run

GROUP = ("name.servicebus.windows.net", "orders", "$Default")
OURS = ["postgres", "postgres_aio"]
INSERT = """
    insert into dedup.partition_owner (namespace, hub, consumer_group, partition_id, owner_id, etag)
    values ('name.servicebus.windows.net', 'orders', '$default', %s, 'eve', 'e')
"""

Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(params=OURS)
def kind(request: pytest.FixtureRequest) -> str:
    """Both of ours."""
    return str(request.param)


@pytest.fixture
def wire(postgres: str) -> Iterator[Proxy]:
    """A proxy before the server."""
    with proxied(int(str(conninfo_to_dict(postgres)["port"]))) as proxy:
        yield proxy


def behind(postgres: str, wire: Proxy) -> str:
    """The DSN through the proxy."""
    return make_conninfo(postgres, host="127.0.0.1", port=wire.port)


def asking(own: Any) -> Ask:
    """A way to call a store from asyncio, for threads or not, so that several calls are under way."""
    if isinstance(own, PostgresCheckpointStore):
        return lambda name, *given: asyncio.to_thread(getattr(own, name), *given)
    return lambda name, *given: getattr(own, name)(*given)


async def happens(condition: Callable[[], bool]) -> None:
    """Wait for it while the loop goes on."""
    await asyncio.to_thread(until, condition)


@contextmanager
def at_most(seconds: float, own: Any) -> Iterator[None]:
    """A short limit for calls that are to fail; what was before and comes after has time."""
    place = own._owners.place
    usual, place.timeout = place.timeout, seconds
    yield
    place.timeout = usual


def scene(kind: str, dsn: str, play: Callable[[Ask, Any], Awaitable[None]]) -> None:
    """Play it with a store of its own."""

    async def whole() -> None:
        own = make(kind, dsn)
        try:
            await play(asking(own), own)
        finally:
            await asking(own)("close")

    asyncio.run(whole())


def test_a_locked_checkpoint_stops_neither_renewals_nor_other_checkpoints(kind: str, postgres: str) -> None:
    """While one row is locked its own update waits; partitions are renewed, and the other checkpoints move."""

    async def play(ask: Ask, own: Any) -> None:
        won = await ask("claim_ownership", [ownership(p, "ann", GROUP) for p in "01"])
        await ask("update_checkpoint", position("0", 1, GROUP))
        with psycopg.connect(postgres) as busy, at_most(600, own):
            busy.execute("select from dedup.processor_checkpoint for update")
            stuck = asyncio.create_task(ask("update_checkpoint", position("0", 2, GROUP)))
            await happens(lambda: run(postgres, WAITING) != [(0,)])
            assert len(await asyncio.wait_for(ask("claim_ownership", won), 60)) == 2
            await asyncio.wait_for(ask("update_checkpoint", position("1", 5, GROUP)), 60)
            assert not stuck.done()
        await stuck
        assert [c["sequence_number"] for c in await ask("list_checkpoints", *GROUP)] == [2, 5]

    scene(kind, postgres, play)


@pytest.mark.parametrize("kind", of_which(1, OURS))
def test_a_row_that_stays_locked_is_an_error_of_its_partition(kind: str, postgres: str) -> None:
    """Within the limit, as StoreUnavailable; nothing was written."""
    store = opened(kind, postgres)
    store.update(position("0", 1, GROUP))
    with psycopg.connect(postgres) as busy, at_most(2, store.own):
        busy.execute("select from dedup.processor_checkpoint for update")
        with pytest.raises(StoreUnavailable, match=r"Moving checkpoints of .*(lock timeout, for 2 s|timeout|no answer)"):
            store.update(position("0", 2, GROUP))
        assert store.checkpoints(*GROUP) == [position("0", 1, GROUP)]
    store.close()


def test_a_first_claim_that_hangs_stops_no_other(kind: str, postgres: str) -> None:
    """Somebody's claim of a new partition is neither committed nor undone: that partition is lost, renewals and other claims are won."""
    store = opened(kind, postgres)
    (mine,) = store.claim(ownership("3", "ann", GROUP))
    with psycopg.connect(postgres) as stuck:
        stuck.execute(INSERT, ["1"])
        won = store.claim(ownership("0", "ann", GROUP), ownership("1", "ann", GROUP), mine, ownership("2", "ann", GROUP))
        assert [o["partition_id"] for o in won] == ["0", "3", "2"]
    store.close()


def test_a_call_to_a_server_that_hangs_ends(kind: str, postgres: str, wire: Proxy) -> None:
    """The statement of a kept connection, and connecting: StoreUnavailable within the limit, and the store works once the server does."""
    store = opened(kind, behind(postgres, wire))
    (won,) = store.claim(ownership("0", "ann", GROUP))
    with wire.silent(), at_most(0.3, store.own):
        with pytest.raises(StoreUnavailable, match=r"Claiming partitions of .*: no answer within 0.3 s. Whether it was done is not known"):
            store.claim(won)
        with pytest.raises(StoreUnavailable, match=r"Listing owners of .*timeout"):
            store.owners(*GROUP)
    assert [o["owner_id"] for o in store.owners(*GROUP)] == ["ann"]
    store.close()


@pytest.mark.full
def test_a_first_call_to_a_server_that_hangs_ends(kind: str, postgres: str, wire: Proxy) -> None:
    """The look at the tables' version has the same limit."""
    store = opened(kind, behind(postgres, wire))
    with wire.silent(), at_most(0.3, store.own), pytest.raises(StoreUnavailable, match="cannot be reached"):
        store.owners(*GROUP)
    assert store.owners(*GROUP) == []
    store.close()


@pytest.mark.full
def test_calls_that_wait_for_another_one_have_the_same_limit(kind: str, postgres: str, wire: Proxy) -> None:
    """Four calls at once to a server that hangs all end; none of them waits for the limits of those before it."""

    async def play(ask: Ask, own: Any) -> None:
        await ask("list_checkpoints", *GROUP)
        with wire.silent(), at_most(0.3, own):
            calls = [asyncio.create_task(ask("list_checkpoints", *GROUP)) for _ in range(4)]
            told = [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)]
        assert [text for text in told if "no answer within 0.3 s" in text] and "[]" not in told
        assert [text for text in told if "other calls of this store took the whole 0.3 s" in text]

    scene(kind, behind(postgres, wire), play)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_the_isolation_level_of_the_session_does_not_matter(kind: str, level: str, postgres: str) -> None:
    """A contested claim is lost, and a contested checkpoint goes to the higher number, whatever the database's default is."""

    async def play(ask: Ask, own: Any) -> None:
        await ask("update_checkpoint", position("0", 1, GROUP))
        with psycopg.connect(postgres) as other:
            other.execute(INSERT, ["0"])
            other.execute("update dedup.processor_checkpoint set sequence_number = 5")
            late = [asyncio.create_task(ask("claim_ownership", [ownership("0", "ann", GROUP)]))]
            late += [asyncio.create_task(ask("update_checkpoint", position("0", 7, GROUP)))]
            await happens(lambda: run(postgres, WAITING) != [(0,)])
        assert await late[0] == []
        await late[1]
        assert [c["sequence_number"] for c in await ask("list_checkpoints", *GROUP)] == [7]

    run(postgres, f"alter database {conninfo_to_dict(postgres)['dbname']} set default_transaction_isolation = '{level}'")
    scene(kind, postgres, play)


def test_a_connection_that_is_read_only_is_not_kept(kind: str, postgres: str) -> None:
    """As after a failover: the call says so, and the next one connects again."""
    store, database = opened(kind, postgres), conninfo_to_dict(postgres)["dbname"]
    (won,) = store.claim(ownership("0", "ann", GROUP))
    store.update(position("0", 1, GROUP))
    store.run(store.own.close())
    run(postgres, f"alter database {database} set default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable, match="read-only transaction"):
        store.claim(won)
    with pytest.raises(StoreUnavailable, match="read-only transaction"):
        store.update(position("0", 2, GROUP))
    run(make_conninfo(postgres, options="-c default_transaction_read_only=off"), f"alter database {database} reset all")
    assert [o["owner_id"] for o in store.claim(won)] == ["ann"]
    store.update(position("0", 2, GROUP))
    assert store.checkpoints(*GROUP) == [position("0", 2, GROUP)]
    store.close()


def test_a_store_for_asyncio_can_be_used_by_several_loops(postgres: str) -> None:
    """One after another, also after calls that had to wait for each other, and whether it was closed or not; and two at once."""
    store = checkpoint.aio.PostgresCheckpointStore(postgres)

    async def together(first: int) -> None:
        await asyncio.gather(*[store.update_checkpoint(position(str(n), first, GROUP)) for n in range(5)])

    asyncio.run(together(1))
    asyncio.run(together(2))
    asyncio.run(store.close())
    asyncio.run(together(3))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: asyncio.run(together(number)), [4, 5]))
    asyncio.run(store.close())
    assert run(postgres, "select distinct sequence_number from dedup.processor_checkpoint") == [(5,)]


def test_partitions_are_given_back_without_an_error(kind: str, postgres: str, wire: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """azure's client for threads has no guard there. With the server away nothing comes back, a warning says why; claims still raise."""
    store = opened(kind, behind(postgres, wire))
    won = store.claim(ownership("0", "ann", GROUP), ownership("1", "ann", GROUP))
    run(postgres, END_SESSIONS)
    wire.refuse = True
    assert store.claim(*[{**o, "owner_id": ""} for o in won]) == []
    assert "could not give partitions 0, 1 back; their ownership expires by itself: Claiming partitions of" in caplog.text
    with pytest.raises(StoreUnavailable):
        store.claim({**won[0], "owner_id": ""}, won[1])
    wire.refuse = False
    assert [o["owner_id"] for o in store.claim(*[{**o, "owner_id": ""} for o in won])] == ["", ""]
    store.close()


@pytest.mark.parametrize("timeout", [0, -1, True, "10", math.nan, math.inf, None, 3601])
def test_a_limit_that_is_none_is_refused(kind: str, timeout: Any) -> None:
    """At once, and not at the first call."""
    with pytest.raises(ConfigError, match=r"timeout is .* it takes a timedelta, or seconds, a number above 0, at most 3,600"):
        make(kind, "postgresql://x", timeout=timeout)


@pytest.mark.parametrize(("ahead", "steals"), [(19.0, False), (21.0, True)])
def test_clocks_may_be_off_by_the_expiration_minus_the_time_between_claims(
    ahead: float, steals: bool, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What event-processors.md tells: of 60 s, with the owner's last claim 40 s ago, 20 s are left for a clock that is ahead."""

    class Client:
        _address = type("Address", (), {"hostname": GROUP[0]})
        eventhub_name = GROUP[1]

        def get_partition_ids(self) -> list[str]:
            return ["0"]

    with PostgresCheckpointStore(postgres) as store:
        store.claim_ownership([ownership("0", "ann", GROUP)])
        run(postgres, "update dedup.partition_owner set modified_at = modified_at - interval '40 s'")
        (kept,) = store.list_ownership(*GROUP)
        monkeypatch.setattr(ownership_manager.time, "time", lambda: kept["last_modified_time"] + 40 + ahead)
        client: Any = Client()
        bob = ownership_manager.OwnershipManager(client, GROUP[2], "bob", store, 60, LoadBalancingStrategy.GREEDY, None)
        assert bool(bob.claim_ownership()) == steals
