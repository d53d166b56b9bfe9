"""Checkpoints as azure-eventhub-checkpointstoreblob keeps them in a Blob container: taken over from there, and mirrored to there.

One empty blob a partition, `{namespace}/{hub}/{group}/checkpoint/{partition}` in lower case, with the metadata `offset` and
`sequencenumber`. KEDA and Azure's own tools read it to tell the lag. Ownerships are not mirrored: two stores must not share partitions.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType

from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ResourceExistsError, ResourceModifiedError, ResourceNotFoundError
from azure.storage.blob import BlobProperties, ContainerClient

from checkpoint import given
from checkpoint.errors import ConfigError, DedupError, StoreUnavailable
from checkpoint.given import Duration
from checkpoint.processors import After, Group, Position

_log = logging.getLogger(__name__)

EVERY = 30.0
"""Seconds between two looks of a mirror: what KEDA asks at by default."""

MIRROR: given.Settings = {"every": given.duration("30.0", above=0)}
"""What `BlobMirror` takes beside a container, a group and what reads it."""

_LOST_RACE = (ResourceExistsError, ResourceModifiedError, ResourceNotFoundError)


@dataclass(frozen=True)
class Kept:
    """The checkpoint of one partition in a container. Without a sequence number it is not one that can be read."""

    partition: str
    sequence_number: int | None
    offset: str | None
    etag: str


@dataclass(frozen=True)
class Mirrored:
    """What one look has done, by partition."""

    written: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()  # the blob is further on than we are: left alone
    unknown: tuple[str, ...] = ()  # no offset is known, so that a processor could not resume from the blob: left alone
    raced: tuple[str, ...] = ()  # somebody else wrote in between: looked at again next time


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


@dataclass(frozen=True)
class Health:
    """How a mirror fares."""

    looks: int = 0  # that ended well
    written: int = 0  # blobs
    last: dt.datetime | None = None  # of the last look that ended well, UTC
    failures: int = 0  # looks in a row that failed
    error: str | None = None  # of the last of these
    ahead: tuple[str, ...] = ()  # partitions that are left alone: see Mirrored
    unknown: tuple[str, ...] = ()


class BlobMirror:
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
        given.check(MIRROR, locals())
        self._container, self._group, self._read, self._every = container, group, read, given.to_seconds(every)
        self._ending, self._thread = threading.Event(), threading.Thread(target=self._run, name="dedup blob mirror", daemon=True)
        self.health = Health()

    def start(self) -> BlobMirror:
        """Begin; returns itself."""
        self._thread.start()
        return self

    def wait(self) -> None:
        """Until it is stopped, by another thread or by Ctrl-C."""
        self._thread.join()

    def stop(self, timeout: Duration = 30.0) -> None:
        """Look a last time, and end. A look that hangs is left behind after this time."""
        self._ending.set()
        self._thread.join(given.to_seconds(timeout))

    def look(self) -> None:
        """Mirror once. Never raises: what went wrong is logged and in `health`.

        Crash: the blobs are behind until the next look of any mirror.
        """
        try:
            done = mirror(self._container, self._group, self._read())
        except Exception as error:  # noqa: BLE001  a mirror must not end because of what it mirrors
            self._failed(str(error) if isinstance(error, DedupError) else told(error))
            return
        if done.ahead and done.ahead != self.health.ahead:
            _log.warning(
                "%s: the blobs of partitions %s are ahead of our checkpoints and are left as they are", self._group, ", ".join(done.ahead)
            )
        now = dt.datetime.now(dt.UTC)
        self.health = Health(self.health.looks + 1, self.health.written + len(done.written), now, 0, None, done.ahead, done.unknown)

    def _failed(self, why: str) -> None:
        self.health = replace(self.health, failures=self.health.failures + 1, error=why)
        _log.warning("%s: mirroring checkpoints to Blob storage failed (%d in a row): %s", self._group, self.health.failures, why)

    def _run(self) -> None:
        pause = 0.0
        while not self._ending.wait(pause):
            begun = time.monotonic()
            self.look()
            pause = max(0.0, self._every - (time.monotonic() - begun))
        self.look()

    def __enter__(self) -> BlobMirror:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
