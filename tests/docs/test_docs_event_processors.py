"""What docs/how-to/event-processors.md shows is what runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from azure.eventhub.extensions.checkpointstoreblob import BlobCheckpointStore
from azure.storage.blob import ContainerClient

from checkpoint import BlobMirror, Group, Partition, PostgresCheckpointStore
from dedup.cli.exits import ExitCode
from kit.paths import ROOT
from kit.pg_proxy import until
from kit.pg_run import run

Run = Callable[..., tuple[int, str, str]]

PAGE = (ROOT / "docs/how-to/event-processors.md").read_text()
PROGRAM, MIRROR, CONSUMER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]

pytestmark = [pytest.mark.eventhubs, pytest.mark.postgres]


def with_blob(program: str) -> str:
    """The program as it was before: the two lines that the comments tell."""
    imported, made = re.findall(r"# was: (.*)", program)
    program = re.sub(r"^from checkpoint import Postgres.*$", imported, program, flags=re.MULTILINE)
    return re.sub(r"^store = .*$", f"store = {made}", program, flags=re.MULTILINE)


@contextmanager
def running(program: str, environment: dict[str, str], output: Path) -> Iterator[None]:
    """The program in a process of its own."""
    with output.open("a") as said:
        process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **environment}, stdout=said)
        try:
            yield
        finally:
            process.kill()
            process.wait(30)


@pytest.fixture
def setting(
    dedup: Run, eventhubs: Any, new_hub: Any, postgres: str, azurite: str, blobs: ContainerClient, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """(hub, what makes the page's texts real, the programs' environment), and the same in the environment of `dedup`."""
    hub = new_hub(partitions=2)
    monkeypatch.setenv("DEDUP_STORE", postgres)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite)
    names = {
        '"orders"': f'"{hub}"',
        "--hub orders": f"--hub {hub}",
        '"checkpoints"': f'"{blobs.container_name}"',
        "--container checkpoints": f"--container {blobs.container_name}",
        "name.servicebus.windows.net": eventhubs.host,
        "every=30": "every=0.1",
        " --every 30s": "",  # it would go on for ever
    }

    def real(text: str) -> str:
        for shown, meant in names.items():
            text = text.replace(shown, meant)
        return text

    return hub, real, {"DSN": postgres, "STORAGE": azurite, "EVENTHUB": eventhubs.connection_string}


@pytest.mark.full
def test_moving_from_blob_and_back_loses_no_event_and_repeats_none(
    setting: Any, eventhubs: Any, azurite: str, blobs: ContainerClient, dedup: Run, tmp_path: Path
) -> None:
    """The program with Blob, the guide's commands, then PostgreSQL and the mirror, then Blob again: each goes on after the last."""
    (hub, real, places), output = setting, tmp_path / "output"
    group = (eventhubs.host, hub, "$Default")
    theirs, ours = BlobCheckpointStore.from_connection_string(azurite, blobs.container_name), PostgresCheckpointStore(places["DSN"])

    def run_to(program: str, number: int, *stores: Any) -> None:
        """Five more events in each partition, and the program until these stores have their checkpoints."""
        for partition in range(2):
            eventhubs.fill(hub, partition, 5)
        with running(real(program), places, output):
            for store in stores:
                until(lambda s=store: [c["sequence_number"] for c in s.list_checkpoints(*group)] == [number, number], 180)

    run_to(with_blob(PROGRAM), 4, theirs)
    for line in COMMANDS[:3]:
        code, _, err = dedup(real(line.split("  #")[0]).removeprefix("dedup "))
        assert (code, err) == (0, ""), line
    head, loop = PROGRAM.split("\nwith client:")
    run_to(head + MIRROR + "\nwith client:" + loop, 9, ours, theirs)
    assert run(places["DSN"], "select count(*) from dedup.partition_owner") == [(2,)]
    for owned in blobs.list_blobs(name_starts_with=f"{eventhubs.host}/{hub}/$default/ownership"):
        blobs.delete_blob(owned.name)  # as if they had expired since the first program was killed
    run_to(with_blob(PROGRAM), 14, theirs)
    assert sorted(output.read_text().splitlines()) == sorted(f"{partition} {number}" for partition in range(2) for number in range(15))
    theirs.close()
    ours.close()


def test_the_guide_is_short_and_its_program_differs_in_two_lines() -> None:
    """Under twenty lines from Blob to PostgreSQL; the program before is azure's own example."""
    guide = PAGE.split("## Moving from BlobCheckpointStore")[1].split("While the mirror runs")[0]
    assert len([line for line in guide.splitlines() if line.strip()]) < 20
    before, after = with_blob(PROGRAM).splitlines(), PROGRAM.splitlines()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 2 and "BlobCheckpointStore.from_connection_string" in with_blob(
        PROGRAM
    )


def test_a_consumer_is_mirrored_beside_its_stream(setting: Any, postgres: str, azurite: str, blobs: ContainerClient) -> None:
    """The snippet for a Consumer: what it has decided shows in the container, and nothing waits for it."""
    from checkpoint import changes
    from checkpoint.head import Checkpoint, Head
    from dedup import Consumer, PostgresStore

    _, real, _ = setting
    group, store = Group("Name", "Orders"), PostgresStore(postgres)
    there = {Partition("name", "orders", 0): Checkpoint(7, "700"), Partition("name", "other", 0): Checkpoint(8, "800")}
    changes.move(store, "shop", changes.plan(store, Head("shop"), there), by="ann", reason="")
    names: dict[str, Any] = {"container": blobs, "group": group, "BlobMirror": BlobMirror, "consumer": Consumer("shop", store)}
    exec(real(CONSUMER), names)
    theirs = BlobCheckpointStore.from_connection_string(azurite, blobs.container_name)
    until(lambda: [c["sequence_number"] for c in theirs.list_checkpoints(*group)] == [7], 180)
    names["mirror"].stop()
    assert names["mirror"].health.failures == 0
    theirs.close()
    store.close()


def test_the_sql_of_the_fence_runs(postgres: str) -> None:
    """It finds the number of the partition's owner."""
    statement = PAGE.split("```sql\n")[1].split("```")[0]
    with PostgresCheckpointStore(postgres) as store:
        named = {"fully_qualified_namespace": "name.servicebus.windows.net", "eventhub_name": "orders", "consumer_group": "$Default"}
        (won,) = store.claim_ownership([{**named, "partition_id": "0", "owner_id": "ann"}])
    assert run(postgres, statement) == [(won["owner_number"],)]


def test_the_last_command_of_the_guide_is_understood(setting: Any, dedup: Run) -> None:
    """mirror-blob as it is written there, once in place of for ever: it finds no checkpoint yet, and says so."""
    dedup("migrate")
    (line,) = [line for line in COMMANDS if "mirror-blob" in line]
    code, _, err = dedup(setting[1](line).removeprefix("dedup "))
    assert code == ExitCode.USAGE and "nothing to mirror" in err
