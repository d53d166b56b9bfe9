"""What the service decides: who may read where, where an event goes, what management answers - and the faults that tests order."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kit.eventhubs.codec import Described, Millis
from kit.eventhubs.hub import Hub, Partition
from kit.eventhubs.messages import ANNOTATIONS, APPLICATION, BATCH, VALUE, read, unpack

KEY_NAME, KEY = "RootManageSharedAccessKey", "ZG91YmxlLWRvdWJsZS1kb3VibGUtc2VjcmV0"
TOKEN = "a-token-of-entra"
"""What a bearer token has to be."""

MOST_READERS = 5
SELECTOR = re.compile(r"amqp\.annotation\.(x-opt-[a-z-]+)\s*(>=|>)\s*'?(@?-?[^']*)'?")

Refusal = tuple[str, str]
"""AMQP condition, description."""
NOT_AN_EVENT: Refusal = ("com.microsoft:argument-error", "An argument of the event is not valid.")
BUSY: Refusal = ("com.microsoft:server-busy", "The request was terminated because the namespace is being throttled. Error code : 50002.")


@dataclass
class Faults:
    """What goes wrong next; each count goes down when it has happened."""

    throttle: Counter[str] = field(default_factory=Counter)  # "send", "receive", "manage" -> how many are refused
    lost_answers: int = 0  # sends that are kept, and whose connection is then cut before the answer
    silent_sends: int = 0  # sends that are kept and never answered
    dropped_sends: int = 0  # sends that are not kept, and whose connection is cut
    refused: bytes | None = None  # sends with these bytes in them are refused as what no event may be
    resets: dict[int, int] = field(default_factory=dict)  # id of a partition -> deliveries until the connection breaks inside one
    again: dict[int, int] = field(default_factory=dict)  # id of a partition -> how many events the next reader is sent twice
    slow: float | None = None  # bytes a second of every link
    denied: str | None = None  # "token": no key is right; "link": who has a right key has no right to send or to listen


class Service:
    """One namespace."""

    def __init__(self) -> None:
        self.hubs: dict[str, Hub] = {}
        self.faults = Faults()
        self.counts: Counter[str] = Counter()
        self.selectors: list[str] = []
        self.refusals: list[str] = []
        """Why links were refused."""

    def hub(self, name: str) -> Hub:
        """Raises KeyError where there is none."""
        return self.hubs[name.lower()]

    def throttled(self, what: str) -> bool:
        """Whether this is one of those that are refused."""
        if self.faults.throttle[what] <= 0:
            return False
        self.faults.throttle[what] -= 1
        return True

    # ------------------------------------------------------------------ who may
    def accepts(self, raw: bytes) -> bool:
        """Whether a put-token message holds a signature made with our key, or our bearer token."""
        if self.faults.denied == "token":
            return False
        token = read(raw, VALUE).get(VALUE)
        token = token.decode() if isinstance(token, bytes) else str(token)
        if not token.startswith("SharedAccessSignature "):
            return token == TOKEN
        parts = dict(urllib.parse.parse_qsl(token.split(" ", 1)[1]))
        signed = f"{urllib.parse.quote_plus(parts['sr'])}\n{parts['se']}".encode()
        wanted = base64.b64encode(hmac.new(KEY.encode(), signed, hashlib.sha256).digest()).decode()
        return hmac.compare_digest(wanted, parts.get("sig", "")) and parts.get("skn") == KEY_NAME and int(parts["se"]) > time.time()

    def admit(self, link: Any, source: list[Any], properties: dict[str, Any]) -> Refusal | None:
        """Let a reader in at the position it asks for, ending those of a lower owner level; or say why not."""
        path = link.address.split("/")
        try:
            hub = self.hub(path[0])
            partition = hub.partitions[int(path[4])]
        except (KeyError, IndexError, ValueError):
            return "amqp:not-found", f"The messaging entity '{link.address}' could not be found."
        if path[2].lower() not in hub.groups:
            return "amqp:not-found", f"The messaging entity '{link.address}' could not be found: no consumer group '{path[2]}'."
        if self.throttled("receive"):
            return BUSY
        link.group, link.level, link.partition = path[2].lower(), properties.get("com.microsoft:epoch"), partition
        if refusal := self._refused(link, partition):
            return refusal
        at = self._begin(source, partition)
        if isinstance(at, str):
            return "com.microsoft:argument-error", at
        link.at = max(at, partition.first)
        self._end_others(link, partition)
        partition.readers.append(link)
        return None

    def _refused(self, link: Any, partition: Partition) -> Refusal | None:
        others = [other for other in partition.readers if other.group == link.group]
        levels = [other.level for other in others if other.level is not None] + [
            partition.taken[g] for g in partition.taken if g == link.group
        ]
        if levels and (link.level is None or link.level < max(levels)):
            kind = "without" if link.level is None else f"with epoch '{link.level}'"
            text = (
                f"At least one receiver for the endpoint is created with epoch of '{max(levels)}', and so a receiver {kind} is not allowed."
            )
            return "amqp:link:stolen", text
        if link.level is None and len(others) >= MOST_READERS:
            text = f"Exceeded the maximum number of allowed receivers per partition in a consumer group which is {MOST_READERS}."
            return "amqp:resource-limit-exceeded", text
        return None

    def _end_others(self, link: Any, partition: Partition) -> None:
        if link.level is not None:
            for other in [other for other in partition.readers if other.group == link.group]:
                self.steal(other, link.level)

    def steal(self, link: Any, level: int) -> None:
        """End a reader as one of a higher owner level does."""
        link.end(
            "amqp:link:stolen",
            f"New receiver with higher epoch of '{level}' is created hence current receiver '{link.name}' with epoch '{link.level}' is "
            "getting disconnected. If you are recreating the receiver, make sure a higher epoch is used.",
        )

    def _begin(self, source: list[Any], partition: Partition) -> int | str:
        filters = source[7] if len(source) > 7 else None
        expression = None
        for value in (filters or {}).values():
            expression = value.value if isinstance(value, Described) else value
        if expression is None:
            return partition.first
        text = expression.decode() if isinstance(expression, bytes) else str(expression)
        self.selectors.append(text)
        found = SELECTOR.match(text)
        if found is None:
            return f"The filter {text!r} is invalid."
        return partition.position(found[1], found[2] == ">", found[3])

    # ------------------------------------------------------------------ what comes and is asked
    def publish(self, address: str, raw: bytes, kind: int) -> Refusal | None:
        """Keep a message or a batch; or say why not."""
        self.counts["sends"] += 1
        if self.throttled("send"):
            return BUSY
        if self.faults.refused is not None and self.faults.refused in raw:
            return NOT_AN_EVENT
        path = address.split("/")
        key = (read(raw, ANNOTATIONS).get(ANNOTATIONS) or {}).get("x-opt-partition-key")
        partition = self.hub(path[0]).choose(path, key)
        for message in unpack(raw) if kind == BATCH else [raw]:
            partition.append(message, key)
        for reader in partition.readers:
            reader.wake.set()
        return None

    def manage(self, raw: bytes) -> tuple[int, str, Any]:
        """Status, description and body of a management request."""
        asked = read(raw, APPLICATION).get(APPLICATION) or {}
        if self.throttled("manage"):
            return 503, BUSY[1], None
        hub = self.hubs.get(str(asked.get("name")).lower())
        if hub is None:
            return 404, "The messaging entity could not be found.", None
        self.counts["managed"] += 1
        if asked["type"] == "com.microsoft:eventhub":
            return 200, "OK", _hub_properties(hub, asked)
        number = str(asked["partition"])
        if not number.isdigit() or int(number) >= len(hub.partitions):
            return 404, f"The messaging entity '{hub.name}/Partitions/{number}' could not be found.", None
        return 200, "OK", _partition_properties(hub.partitions[int(number)], asked)


def _hub_properties(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    ids = [str(number) for number in range(len(hub.partitions))]
    return {
        "name": asked["name"],
        "type": asked["type"],
        "created_at": Millis(hub.created),
        "partition_count": len(ids),
        "partition_ids": ids,
    }


def _partition_properties(partition: Partition, asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": asked["name"],
        "type": asked["type"],
        "partition": asked["partition"],
        "begin_sequence_number": partition.first,
        "last_enqueued_sequence_number": partition.next - 1,
        "last_enqueued_offset": str(partition.offsets[-1]) if partition.offsets else "-1",
        "last_enqueued_time_utc": Millis(partition.times[-1] if partition.times else 0),
        "is_partition_empty": not partition.events,
    }
