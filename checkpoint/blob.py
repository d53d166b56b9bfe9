"""Checkpoints as azure-eventhub-checkpointstoreblob keeps them in a Blob container: taken over from there, and mirrored to there.

One empty blob a partition, `{namespace}/{hub}/{group}/checkpoint/{partition}` in lower case, with the metadata `offset` and
`sequencenumber`. KEDA and Azure's own tools read it to tell the lag. Ownerships are not mirrored: two stores must not share partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ResourceExistsError, ResourceModifiedError, ResourceNotFoundError
from azure.storage.blob import BlobProperties, ContainerClient

from checkpoint.errors import ConfigError, StoreUnavailable
from checkpoint.given import Duration
from checkpoint.mirror import EVERY, Mirror, Mirrored
from checkpoint.processors import After, Group, Position

_LOST_RACE = (ResourceExistsError, ResourceModifiedError, ResourceNotFoundError)


@dataclass(frozen=True)
class Kept:
    """The checkpoint of one partition in a container. Without a sequence number it is not one that can be read."""

    partition: str
    sequence_number: int | None
    offset: str | None
    etag: str


def container_at(address: str, name: str | None = None) -> ContainerClient:
    """A container: by the connection string of its account and its name, or by its own URL with a signature.

    Raises:
        ConfigError: neither of them; without showing what was given.
    """
    try:
        if address.startswith(("http://", "https://")):
            return ContainerClient.from_container_url(address)
        if name:
            return ContainerClient.from_connection_string(address, name)
    except ValueError:
        pass
    raise ConfigError(
        "Give the connection string of the storage account and the name of the container, or the container's URL with a signature."
    )


def kept(container: ContainerClient, group: Group) -> list[Kept]:
    """The checkpoints of a consumer group in a container, by partition. Raises StoreUnavailable."""
    names = group.parameters
    prefix = f"{names['namespace']}/{names['hub']}/{names['group']}/checkpoint/"
    try:
        found = [_kept(blob) for blob in container.list_blobs(name_starts_with=prefix, include=["metadata"])]
    except AzureError as error:
        raise StoreUnavailable(f"Reading the checkpoints of {group} from Blob storage: {told(error)}. Try again.") from None
    return sorted(found, key=lambda point: (len(point.partition), point.partition))


def _kept(blob: BlobProperties) -> Kept:
    metadata = {name.lower(): text for name, text in (blob.metadata or {}).items()}
    number, offset = metadata.get("sequencenumber") or "", metadata.get("offset") or ""
    readable = number.isascii() and number.lstrip("-").isdigit()
    return Kept(blob.name.rpartition("/")[2], int(number) if readable else None, None if offset in ("", "None") else offset, str(blob.etag))


def positions(points: Iterable[Kept], group: Group) -> list[Position]:
    """Those that can be read, as azure's dicts."""
    return [
        {**group.keys, "partition_id": p.partition, "sequence_number": p.sequence_number, "offset": p.offset}
        for p in points
        if p.sequence_number is not None
    ]


def mirror(
    container: ContainerClient, group: Group, ours: Iterable[Position], *, backwards: bool = False, dry_run: bool = False
) -> Mirrored:
    """Make the blobs of a consumer group say what we say, once. Raises StoreUnavailable.

    Args:
        backwards: also where the blob is further on than we are: a processor that still works with Blob would repeat events.

    Crash: each blob is written or not; the next look writes the rest.
    """
    there = {point.partition: point for point in kept(container, group)}
    did: dict[str, list[str]] = {"written": [], "ahead": [], "unknown": [], "raced": []}
    for position in ours:
        what = _plan(position, there.get(position["partition_id"]), backwards)
        if what == "written" and not dry_run and not _write(container, group, position, there.get(position["partition_id"])):
            what = "raced"
        if what:
            did[what].append(position["partition_id"])
    return Mirrored(**{name: tuple(partitions) for name, partitions in did.items()})


def _plan(ours: Position, theirs: Kept | None, backwards: bool) -> str | None:
    """What is to be done about one partition; None where both say the same."""
    if ours["offset"] is None or isinstance(ours["offset"], After):
        return "unknown"
    if theirs is None or theirs.sequence_number is None:
        return "written"
    if theirs.sequence_number == ours["sequence_number"]:
        return None
    return "ahead" if theirs.sequence_number > ours["sequence_number"] and not backwards else "written"


def _write(container: ContainerClient, group: Group, ours: Position, theirs: Kept | None) -> bool:
    names = group.parameters
    blob = container.get_blob_client(f"{names['namespace']}/{names['hub']}/{names['group']}/checkpoint/{ours['partition_id'].lower()}")
    metadata = {"offset": str(ours["offset"]), "sequencenumber": str(ours["sequence_number"])}
    try:
        if theirs is None:
            blob.upload_blob(b"", metadata=metadata, overwrite=False)
        else:
            blob.set_blob_metadata(metadata, etag=theirs.etag, match_condition=MatchConditions.IfNotModified)
    except _LOST_RACE:
        return False
    except AzureError as error:
        raise StoreUnavailable(f"Mirroring the checkpoints of {group} to Blob storage: {told(error)}. Try again.") from None
    return True


def told(error: Exception) -> str:
    """What went wrong, without the URL: it may hold a signature."""
    code = getattr(error, "error_code", None) or getattr(error, "status_code", None)
    return type(error).__name__ + (f" ({getattr(code, 'value', code)})" if code else "")


class BlobMirror(Mirror):
    """Keeps blobs up to date, from a thread of its own: a storage account that is down stops nobody, and shows in the log and in `health`.

    Args:
        container: with any credential.
        group: of which the checkpoints are.
        read: gives ours; asked at every look, e.g. `lambda: store.list_checkpoints(*group)`.
        every: the time between the beginnings of two looks, as a timedelta or in seconds.
    """

    def __init__(
        self, container: ContainerClient, group: Group, read: Callable[[], Iterable[Position]], *, every: Duration = EVERY
    ) -> None:
        super().__init__(group, "Blob storage", every)
        self._container, self._group, self._read = container, group, read

    def _mirror(self) -> Mirrored:
        return mirror(self._container, self._group, self._read())

    def _told(self, error: Exception) -> str:
        return told(error)
