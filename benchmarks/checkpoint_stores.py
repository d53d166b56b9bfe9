"""What event processors ask of a checkpoint store, a second: PostgresCheckpointStore beside Azure's own on Blob storage.

A turn is what one processor of eight partitions asks between two balancings: who owns what, a renewal of all, a checkpoint a partition,
and where to resume. Blob is Azurite, which keeps blobs in memory on this machine; PostgreSQL syncs each commit to disk. Called by run.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from azure.eventhub.extensions.checkpointstoreblob import BlobCheckpointStore
from azure.storage.blob import ContainerClient

from benchmarks.report import Measure
from benchmarks.stream import Seconds, Sizes, middle
from checkpoint import Group, PostgresCheckpointStore

GROUP = Group("bench.servicebus.windows.net", "orders")
PARTITIONS = [str(number) for number in range(8)]
CALLS = 3 + len(PARTITIONS)
"""Calls of azure's interface in one turn; a renewal of all partitions is one."""

TURNS = 10
"""Of which one second is told."""


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Both stores in turns. Raises AssertionError where one of them does not say what was written."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from kit.azurite_server import running_azurite

    with running_azurite() as blob, PostgresCheckpointStore(dsn) as ours:
        with ContainerClient.from_connection_string(blob, "checkpoints") as container:
            container.create_container()
        with BlobCheckpointStore.from_connection_string(blob, "checkpoints") as theirs:
            ways = {"checkpoint calls, PostgreSQL": _processor(ours), "checkpoint calls, Blob on Azurite": _processor(theirs)}
            seconds = _take_turns(ways, sizes)
    mine, other = (TURNS * CALLS / middle(taken) for taken in seconds.values())
    return [Measure("eventhubs/checkpoint_calls", round(mine), round(other), "calls/s", round(mine / other, 2), "higher")], seconds


def _take_turns(ways: dict[str, Callable[[int], None]], sizes: Sizes) -> Seconds:
    seconds: Seconds = {name: [] for name in ways}
    for number in range(sizes.batches):
        for name in sorted(ways, reverse=bool(number % 2)):
            begun = time.perf_counter()
            for turn in range(TURNS):
                ways[name](number * TURNS + turn)
            seconds[name].append(time.perf_counter() - begun)
    return {name: taken[sizes.warm :] for name, taken in seconds.items()}


def _processor(store: Any) -> Callable[[int], None]:
    """One turn of a processor that owns all partitions; each turn checks what the one before has written."""
    claim = {**GROUP.keys, "owner_id": "bench"}
    store.claim_ownership([{**claim, "partition_id": partition} for partition in PARTITIONS])

    def turn(number: int) -> None:
        """Renew every partition, checkpoint it, and check what the store tells."""
        owned = store.list_ownership(*GROUP)
        assert len(store.claim_ownership(owned)) == len(PARTITIONS), "a renewal was lost"
        for partition in PARTITIONS:
            store.update_checkpoint({**GROUP.keys, "partition_id": partition, "sequence_number": number, "offset": str(100 * number)})
        told = {point["partition_id"]: (point["sequence_number"], point["offset"]) for point in store.list_checkpoints(*GROUP)}
        assert told == dict.fromkeys(PARTITIONS, (number, str(100 * number))), "a checkpoint was lost"

    return turn
