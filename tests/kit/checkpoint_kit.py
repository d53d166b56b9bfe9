"""Four checkpoint stores behind one face, so that one suite asks all of them: ours and Azure's on Blob, for threads and for asyncio.

Run as a program it is an event processor: `python -m kit.checkpoint_kit KIND PLACE CONNECTION HUB`, one line of output an event.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KINDS = ("postgres", "postgres_aio", "blob", "blob_aio")

END_SESSIONS = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where application_name = 'dedup' and datname = current_database() and pid <> pg_backend_pid()
"""
"""Ends every session of a store in this database."""


@dataclass(frozen=True)
class Store:
    """A store and how its methods are called. Methods and arguments are those of azure's CheckpointStore."""

    kind: str
    own: Any
    run: Callable[[Any], Any]  # gives the answer of what a method returned

    def owners(self, *group: str) -> list[dict[str, Any]]:
        """list_ownership"""
        return list(self.run(self.own.list_ownership(*group)))

    def claim(self, *wanted: dict[str, Any]) -> list[dict[str, Any]]:
        """claim_ownership"""
        return list(self.run(self.own.claim_ownership(list(wanted))))

    def update(self, position: dict[str, Any]) -> None:
        """update_checkpoint"""
        self.run(self.own.update_checkpoint(position))

    def checkpoints(self, *group: str) -> list[dict[str, Any]]:
        """list_checkpoints"""
        return list(self.run(self.own.list_checkpoints(*group)))

    def close(self) -> None:
        """close, and the loop of an asyncio store."""
        self.run(self.own.close())
        loop = getattr(self.run, "__self__", None)
        if loop is not None:
            loop.close()


def make(kind: str, place: str, **options: Any) -> Any:
    """azure's way to a store: the one line in which a program that changes from one to the other differs. Options are those of ours."""
    if kind == "postgres":
        from checkpoint import PostgresCheckpointStore

        return PostgresCheckpointStore(place, **options)
    if kind == "postgres_aio":
        from checkpoint.aio import PostgresCheckpointStore as Aio

        return Aio(place, **options)
    container, connection = place.split("|")
    if kind == "blob":
        from azure.eventhub.extensions.checkpointstoreblob import BlobCheckpointStore

        return BlobCheckpointStore.from_connection_string(connection, container)
    from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore as BlobAio

    return BlobAio.from_connection_string(connection, container)


def opened(kind: str, place: str, **options: Any) -> Store:
    """A store of this kind at this place, as a process of its own would open it."""
    if kind.endswith("_aio"):
        return Store(kind, make(kind, place, **options), asyncio.new_event_loop().run_until_complete)
    return Store(kind, make(kind, place, **options), lambda answer: answer)


def ownership(partition: str, owner: str, group: tuple[str, str, str], etag: str | None = None) -> dict[str, Any]:
    """A claim as azure makes it: without an etag where nobody has ever owned the partition."""
    named = dict(zip(("fully_qualified_namespace", "eventhub_name", "consumer_group"), group, strict=True))
    return {**named, "partition_id": partition, "owner_id": owner, **({"etag": etag} if etag else {})}


def position(partition: str, number: int, group: tuple[str, str, str], offset: str | None = None) -> dict[str, Any]:
    """A checkpoint as azure makes it."""
    named = dict(zip(("fully_qualified_namespace", "eventhub_name", "consumer_group"), group, strict=True))
    return {**named, "partition_id": partition, "sequence_number": number, "offset": offset or str(number * 100)}


def race(kind: str, place: str, me: str, group: tuple[str, str, str], rounds: int, barrier: Any, won: Any) -> None:
    """In a process of its own: claim one partition again and again at the same moment as others, with the etag that all have read."""
    store = opened(kind, place)
    for number in range(rounds):
        seen = {o["partition_id"]: o for o in store.owners(*group)}.get("0", {})
        barrier.wait()
        mine = store.claim(ownership("0", f"{me}-{number}", group, seen.get("etag")))
        won.put((number, me, len(mine)))
        barrier.wait()
    store.close()


OPTIONS: dict[str, Any] = {"load_balancing_interval": 0.3, "partition_ownership_expiration_interval": 5}
"""Of the event processors: quick, but not so quick that a busy machine makes them lose what they own."""


def _said(context: Any, events: list[Any]) -> None:
    for event in events:
        print(context.partition_id, event.sequence_number, flush=True)


def process(store: Any, connection: str, hub: str, stop: threading.Event) -> None:
    """azure's own client for threads, with a checkpoint after each batch, until the event is set."""
    from azure.eventhub import EventHubConsumerClient

    client = EventHubConsumerClient.from_connection_string(connection, "$Default", eventhub_name=hub, checkpoint_store=store, **OPTIONS)

    def on_batch(context: Any, events: list[Any]) -> None:
        if events:
            _said(context, events)
            context.update_checkpoint()

    with client:
        thread = threading.Thread(target=client.receive_batch, args=(on_batch,), kwargs={"starting_position": "-1"}, daemon=True)
        thread.start()
        stop.wait()
    thread.join(30)


async def process_aio(store: Any, connection: str, hub: str, stop: threading.Event) -> None:
    """azure's own client for asyncio."""
    from azure.eventhub.aio import EventHubConsumerClient

    client = EventHubConsumerClient.from_connection_string(connection, "$Default", eventhub_name=hub, checkpoint_store=store, **OPTIONS)

    async def on_batch(context: Any, events: list[Any]) -> None:
        if events:
            _said(context, events)
            await context.update_checkpoint()

    async with client:
        task = asyncio.create_task(client.receive_batch(on_batch, starting_position="-1"))
        await asyncio.to_thread(stop.wait)
    task.cancel()


def main() -> None:
    """An event processor until its standard input ends."""
    kind, place, connection, hub = sys.argv[1:]
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    if kind.endswith("_aio"):
        asyncio.run(process_aio(make(kind, place), connection, hub, stop))
    else:
        process(make(kind, place), connection, hub, stop)


if __name__ == "__main__":
    main()
