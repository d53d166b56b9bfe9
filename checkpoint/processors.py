"""What azure-eventhub's event processors ask of our tables: each call as one statement, and its answer as the dicts that they expect.

No driver and no azure here: eventhub.py (threads) and aio.py (asyncio) are shells around these calls. Each call may be repeated after a
lost connection: a claim finds its own etag, a checkpoint only moves forward.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from checkpoint.errors import ConfigError

_log = logging.getLogger(__name__)

_LATE = "%s partition %s: the checkpoint stays at %d, %d is behind it. If this hub was created again: `dedup checkpoint set`."

Answer = TypeVar("Answer")
Rows = list[dict[str, Any]]
Ownership = dict[str, Any]
"""fully_qualified_namespace, eventhub_name, consumer_group, partition_id, owner_id; in answers etag, last_modified_time, owner_number."""
Position = dict[str, Any]
"""A checkpoint: the first four keys of Ownership, sequence_number (int), offset (str)."""


class Group(NamedTuple):
    """A consumer group of an event hub, as the caller writes it."""

    namespace: str  # fully qualified: name.servicebus.windows.net
    hub: str
    name: str = "$Default"

    @property
    def parameters(self) -> dict[str, str]:
        """The names as our tables keep them: in lower case, because Event Hubs takes any case for the same."""
        return {"namespace": self.namespace.lower(), "hub": self.hub.lower(), "group": self.name.lower()}

    @property
    def keys(self) -> dict[str, Any]:
        """The keys that name it in azure's dicts."""
        return {"fully_qualified_namespace": self.namespace, "eventhub_name": self.hub, "consumer_group": self.name}

    def __str__(self) -> str:
        return f"{self.namespace}/{self.hub}/{self.name}"


class After(int):
    """A sequence number in place of an offset that nobody knows: the SDK takes a number for one, and 0, as it is false, for nothing."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class ProcessorCall(Generic[Answer]):
    """One statement of queries.sql."""

    doing: str  # for errors: "Claiming partitions of ..."
    statement: str
    parameters: Mapping[str, Any]
    read: Callable[[Rows], Answer]


def group_of(named: Mapping[str, Any]) -> Group:
    """The consumer group that an ownership or a checkpoint belongs to. Raises KeyError."""
    return Group(named["fully_qualified_namespace"], named["eventhub_name"], named["consumer_group"])


def owners(group: Group) -> ProcessorCall[list[Ownership]]:
    """All ownerships of a consumer group, each a new dict."""
    return ProcessorCall(
        f"Listing owners of {group}", "partition_owners", group.parameters, lambda rows: [{**group.keys, **row} for row in rows]
    )


def claims(wanted: Iterable[Ownership]) -> list[ProcessorCall[list[Ownership]]]:
    """Claim these partitions; the answers hold those that were won, each a new dict with its new etag. One call per consumer group.

    A partition may be named by a number as well; its answer names it as it was asked for.

    Crash: a partition is claimed or not; a claim whose answer was lost is found by its etag when it is repeated, and expires otherwise.
    """
    groups: dict[Group, dict[str, Ownership]] = {}
    for ownership in wanted:
        groups.setdefault(group_of(ownership), {}).setdefault(str(ownership["partition_id"]), ownership)
    return [_claim(group, partitions) for group, partitions in groups.items()]


def in_order(wanted: Iterable[Ownership], won: Iterable[Ownership]) -> list[Ownership]:
    """The ownerships that were won, in the order in which they were asked for."""
    found = {(group_of(ownership), str(ownership["partition_id"])): ownership for ownership in won}
    names = dict.fromkeys((group_of(ownership), str(ownership["partition_id"])) for ownership in wanted)
    return [found[name] for name in names if name in found]


def gives_back(wanted: Iterable[Ownership]) -> bool:
    """Whether a claim only says that nobody owns these partitions any more. azure's client for threads makes such a claim unguarded."""
    return not any(ownership["owner_id"] for ownership in wanted)


def not_given_back(wanted: Iterable[Ownership], error: Exception) -> list[Ownership]:
    """The answer to giving partitions back when the store cannot: none. They expire."""
    _log.warning(
        "could not give partitions %s back; their ownership expires by itself: %s", ", ".join(str(o["partition_id"]) for o in wanted), error
    )
    return []


def _claim(group: Group, partitions: dict[str, Ownership]) -> ProcessorCall[list[Ownership]]:
    asked = list(partitions.values())
    parameters = {
        **group.parameters,
        "partitions": list(partitions),
        "owners": [ownership["owner_id"] for ownership in asked],
        "seen": [ownership.get("etag") or None for ownership in asked],
        "etags": [uuid.uuid4().hex for _ in asked],
    }

    def won(rows: Rows) -> list[Ownership]:
        lost = sorted({*partitions} - {row["partition_id"] for row in rows})
        if lost:
            _log.info("%s: another processor has claimed partitions %s", group, ", ".join(lost))
        answers = [(partitions[row["partition_id"]], row) for row in rows]
        return [{**asked, **row, "partition_id": asked["partition_id"]} for asked, row in answers]

    return ProcessorCall(f"Claiming partitions of {group}", "claim_partitions", parameters, won)


def checkpoints(group: Group) -> ProcessorCall[list[Position]]:
    """All checkpoints of a consumer group, each a new dict. An offset that is not known is the sequence number, as a number."""

    def read(rows: Rows) -> list[Position]:
        return [_position(group, **row) for row in rows]

    return ProcessorCall(f"Listing checkpoints of {group}", "processor_checkpoints", group.parameters, read)


def _position(group: Group, partition_id: str, sequence_number: int, event_offset: str | None) -> Position:
    offset = After(sequence_number) if event_offset is None else event_offset
    return {**group.keys, "partition_id": partition_id, "offset": offset, "sequence_number": sequence_number}


def advance(
    group: Group, positions: Iterable[Mapping[str, Any]], *, by: str | None = None, reason: str | None = None
) -> ProcessorCall[list[str]]:
    """Move checkpoints forward; the answer names the partitions that moved.

    One that stands further on already stays, and a warning says so: a processor that has lost its partition may be late with an old event.

    Args:
        by: the person who decided that, if one did, and why (`reason`): both are kept with the checkpoints that move.

    Raises:
        ConfigError: a checkpoint without a sequence number.

    Crash: all of them are moved or none; moving them again changes nothing.
    """
    given = {str(p["partition_id"]): p for p in positions}
    wrong = [partition for partition, p in given.items() if p.get("sequence_number") is None]
    if wrong:
        raise ConfigError(f"{group}: a checkpoint needs the sequence number of its event; partitions {', '.join(wrong)} have none.")
    numbers = {partition: int(p["sequence_number"]) for partition, p in given.items()}
    offsets = [_offset(p.get("offset")) for p in given.values()]
    parameters = {
        **group.parameters,
        "partitions": list(numbers),
        "numbers": list(numbers.values()),
        "offsets": offsets,
        "by": by,
        "reason": reason,
    }

    def moved(rows: Rows) -> list[str]:
        for row in rows:
            if not row["moved"] and row["stood"] > numbers[row["partition_id"]]:
                _log.warning(_LATE, group, row["partition_id"], row["stood"], numbers[row["partition_id"]])
        return [row["partition_id"] for row in rows if row["moved"]]

    return ProcessorCall(f"Moving checkpoints of {group}", "advance_processors", parameters, moved)


def put(group: Group, partition: str, number: int, offset: str | None, *, seen: int | None, by: str, reason: str) -> ProcessorCall[bool]:
    """Set a checkpoint as a person decided, forward or back; the answer is whether it still stood at `seen`.

    Crash: it is set or not; repeat it to see which.
    """
    parameters = {**group.parameters, "partition": partition, "number": number, "offset": offset, "seen": seen, "by": by, "reason": reason}
    return ProcessorCall(f"Setting the checkpoint of {group}, partition {partition}", "set_processor", parameters, bool)


def _offset(offset: Any) -> str | None:
    return None if offset is None or isinstance(offset, After) else str(offset)
