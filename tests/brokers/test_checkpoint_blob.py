"""Checkpoints between our tables and Azure's Blob layout: taken over, and mirrored so that KEDA and Azure's tools go on seeing the lag."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError
from azure.eventhub.extensions.checkpointstoreblob import BlobCheckpointStore
from azure.storage.blob import BlobClient, ContainerClient

from checkpoint import BlobMirror, PostgresCheckpointStore, blob
from checkpoint.blob import container_at
from checkpoint.errors import ConfigError, StoreUnavailable
from checkpoint.mirror import Mirrored
from checkpoint.processors import After, Group
from kit.checkpoint_kit import position
from kit.pg_proxy import until

GROUP = Group("Name.servicebus.windows.net", "Orders")
FOLDER = "name.servicebus.windows.net/orders/$default/checkpoint"


@pytest.fixture
def theirs(blobs: ContainerClient, azurite: str) -> Iterator[BlobCheckpointStore]:
    """Azure's own store on the container."""
    store = BlobCheckpointStore.from_connection_string(azurite, blobs.container_name)
    yield store
    store.close()


@pytest.fixture
def ours(postgres: str) -> Iterator[PostgresCheckpointStore]:
    with PostgresCheckpointStore(postgres) as store:
        yield store


def metadata(blobs: ContainerClient) -> dict[str, dict[str, str]]:
    """Every blob with its metadata."""
    return {found.name: dict(found.metadata or {}) for found in blobs.list_blobs(include=["metadata"])}


def test_what_azure_wrote_is_taken_over_and_mirrored_back_unchanged(
    blobs: ContainerClient, theirs: BlobCheckpointStore, ours: PostgresCheckpointStore
) -> None:
    """The round trip: eight checkpoints of azure's own store into our table, on from there, and back into what azure's store reads."""
    points = [position(str(n), 10 * n, GROUP) for n in range(12)]
    for point in points:
        theirs.update_checkpoint(point)
    assert ours.import_checkpoints(GROUP, blob.positions(blob.kept(blobs, GROUP), GROUP)) == [p["partition_id"] for p in points]
    assert list(ours.list_checkpoints(*GROUP)) == points
    assert blob.mirror(blobs, GROUP, ours.list_checkpoints(*GROUP)) == Mirrored(), "nothing to do"
    ours.update_checkpoint(position("3", 31, GROUP))
    ours.update_checkpoint(position("12", 5, GROUP))
    assert blob.mirror(blobs, GROUP, ours.list_checkpoints(*GROUP)) == Mirrored(written=("3", "12"))
    assert sorted(theirs.list_checkpoints(*GROUP), key=lambda p: int(p["partition_id"])) == list(ours.list_checkpoints(*GROUP))


def test_the_layout_is_that_of_azure(blobs: ContainerClient, ours: PostgresCheckpointStore, theirs: BlobCheckpointStore) -> None:
    """Names in lower case, two entries of metadata, an empty blob; what azure's store writes is the same to the byte."""
    ours.update_checkpoint(position("0", 7, GROUP))
    blob.mirror(blobs, GROUP, ours.list_checkpoints(*GROUP))
    mirrored = metadata(blobs)
    assert mirrored == {f"{FOLDER}/0": {"offset": "700", "sequencenumber": "7"}}
    assert blobs.download_blob(f"{FOLDER}/0").readall() == b""
    blobs.delete_blob(f"{FOLDER}/0")
    theirs.update_checkpoint(position("0", 7, GROUP))
    assert metadata(blobs) == mirrored


def test_an_import_moves_nothing_back(blobs: ContainerClient, theirs: BlobCheckpointStore, ours: PostgresCheckpointStore) -> None:
    """Old blobs that are imported again after we have gone on change nothing."""
    theirs.update_checkpoint(position("0", 5, GROUP))
    ours.update_checkpoint(position("0", 9, GROUP))
    assert ours.import_checkpoints(GROUP, blob.positions(blob.kept(blobs, GROUP), GROUP)) == []
    assert list(ours.list_checkpoints(*GROUP)) == [position("0", 9, GROUP)]


def test_blobs_that_are_no_checkpoints_are_told_apart(blobs: ContainerClient, ours: PostgresCheckpointStore) -> None:
    """A blob without a usable number is not taken for 0; one whose offset is missing keeps its number."""
    texts = {"0": {"offset": "5", "sequencenumber": ""}, "1": {"Offset": "5", "SequenceNumber": "1"}, "2": {"sequencenumber": "2"}}
    for partition, given in {**texts, "3": {"offset": "None", "sequencenumber": "3"}, "4": {}}.items():
        blobs.upload_blob(f"{FOLDER}/{partition}", b"", metadata=given)
    blobs.upload_blob("name.servicebus.windows.net/orders/$default/ownership/0", b"", metadata={"ownerid": "ann"})
    blobs.upload_blob("name.servicebus.windows.net/orders2/$default/checkpoint/0", b"", metadata={"offset": "1", "sequencenumber": "1"})
    found = {k.partition: (k.sequence_number, k.offset) for k in blob.kept(blobs, GROUP)}
    assert found == {"0": (None, "5"), "1": (1, "5"), "2": (2, None), "3": (3, None), "4": (None, None)}
    ours.import_checkpoints(GROUP, blob.positions(blob.kept(blobs, GROUP), GROUP))
    assert [(c["sequence_number"], c["offset"]) for c in ours.list_checkpoints(*GROUP)] == [(1, "5"), (2, 2), (3, 3)]


def test_a_mirror_never_moves_a_blob_back_unasked(blobs: ContainerClient, theirs: BlobCheckpointStore) -> None:
    """A blob that is further on, because a processor still works with Blob or somebody set us back, stays and is named."""
    theirs.update_checkpoint(position("0", 50, GROUP))
    assert blob.mirror(blobs, GROUP, [position("0", 7, GROUP)]) == Mirrored(ahead=("0",))
    assert metadata(blobs)[f"{FOLDER}/0"]["sequencenumber"] == "50"
    assert blob.mirror(blobs, GROUP, [position("0", 7, GROUP)], backwards=True) == Mirrored(written=("0",))
    assert metadata(blobs)[f"{FOLDER}/0"]["sequencenumber"] == "7"


def test_a_checkpoint_without_an_offset_is_not_mirrored(blobs: ContainerClient) -> None:
    """azure's processors resume by the offset: a blob without one would send them to the beginning."""
    given = [{**position("0", 7, GROUP), "offset": None}, {**position("1", 7, GROUP), "offset": After(7)}]
    assert blob.mirror(blobs, GROUP, given) == Mirrored(unknown=("0", "1")) and metadata(blobs) == {}


@pytest.mark.parametrize("there", [True, False])
def test_of_two_mirrors_the_one_that_read_an_older_state_writes_nothing(
    there: bool, blobs: ContainerClient, theirs: BlobCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and its write somebody else wrote a later checkpoint: that one stays."""
    if there:
        theirs.update_checkpoint(position("0", 5, GROUP))
    name = "set_blob_metadata" if there else "upload_blob"
    write = getattr(BlobClient, name)

    def late(client: BlobClient, *given: Any, **options: Any) -> Any:
        monkeypatch.undo()
        theirs.update_checkpoint(position("0", 9, GROUP))
        return write(client, *given, **options)

    monkeypatch.setattr(BlobClient, name, late)
    assert blob.mirror(blobs, GROUP, [position("0", 7, GROUP)]) == Mirrored(raced=("0",))
    assert metadata(blobs)[f"{FOLDER}/0"]["sequencenumber"] == "9"


def test_the_mirror_follows_in_the_background(blobs: ContainerClient, ours: PostgresCheckpointStore) -> None:
    """What is checkpointed shows in the container without anybody waiting for it, the last of it when the mirror ends."""
    with BlobMirror(blobs, GROUP, lambda: ours.list_checkpoints(*GROUP), every=0.05) as mirror:
        for number in (1, 2):
            ours.update_checkpoint(position("0", number, GROUP))
            until(lambda n=number: metadata(blobs).get(f"{FOLDER}/0", {}).get("sequencenumber") == str(n))
        ours.update_checkpoint(position("0", 3, GROUP))
    assert metadata(blobs)[f"{FOLDER}/0"]["sequencenumber"] == "3"
    assert mirror.health.written >= 3 and mirror.health.failures == 0 and mirror.health.last is not None


def test_a_mirror_that_fails_stops_nobody_and_says_so(
    blobs: ContainerClient, ours: PostgresCheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Storage that is away, or a database: the thread goes on, the log and `health` say what and how often, and it recovers by itself."""
    down = threading.Event()
    down.set()

    def read() -> Any:
        if down.is_set():
            raise StoreUnavailable("the database is away")
        return ours.list_checkpoints(*GROUP)

    ours.update_checkpoint(position("0", 1, GROUP))
    with caplog.at_level(logging.WARNING), BlobMirror(blobs, GROUP, read, every=0.02) as mirror:
        until(lambda: mirror.health.failures >= 2)
        assert mirror.health.error == "the database is away" and mirror.health.last is None
        down.clear()
        until(lambda: mirror.health.written == 1)
        assert mirror.health.failures == 0 and mirror.health.error is None
    assert "mirroring checkpoints to Blob storage failed (2 in a row): the database is away" in caplog.text


@pytest.mark.parametrize("broken", ["gone", "refused"])
def test_errors_of_the_storage_show_no_signature(broken: str, blobs: ContainerClient, azurite: str) -> None:
    """The URL of a container may hold one: errors name what went wrong without it."""
    url = f"{blobs.url.replace(blobs.container_name, 'none')}?sig=s3cret&sv=2024-11-04" if broken == "gone" else f"{blobs.url}?sig=s3cret"
    with container_at(url) as away:
        with pytest.raises(StoreUnavailable) as failed:
            blob.kept(away, GROUP)
        assert "s3cret" not in str(failed.value) and "Reading the checkpoints" in str(failed.value)
        assert failed.value.__cause__ is None and failed.value.__suppress_context__
        mirror = BlobMirror(away, GROUP, lambda: [position("0", 1, GROUP)])
        mirror.look()
        assert mirror.health.failures == 1 and "s3cret" not in str(mirror.health)


def test_a_container_is_named_by_connection_string_or_url(blobs: ContainerClient, azurite: str) -> None:
    """Anything else is an error that does not repeat it."""
    with container_at(azurite, blobs.container_name) as named:
        assert named.url == blobs.url
    for wrong in (("AccountKey=s3cret", "c"), (azurite, None), ("", "c")):
        with pytest.raises(ConfigError) as failed:
            container_at(*wrong)
        assert "s3cret" not in str(failed.value)
    assert blob.told(HttpResponseError("s3cret")) == "HttpResponseError"
