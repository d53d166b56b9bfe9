"""The commit header: one JSON document per decision, in the ledger. It is the decision.

Promises that a header of another state version is refused, and that a header read back equals the one written. Pure.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from checkpoint.errors import SchemaOutdated, StateTooNew
from checkpoint.position import Partition
from deadletter import budget
from dedup.delta.files import Add
from dedup.delta.lineage import version_of
from dedup.steps import Merge
from dedup.store import Checkpoint, Head, Holder

STATE_VERSION = 4
"""Version of everything this package keeps: ledger columns, headers, dead letter events. Any other version is refused."""


@dataclass(frozen=True)
class SinkFiles:
    """What one decision adds to one sink."""

    name: str  # as the handler calls it
    uri: str
    table_id: str  # of the table that the rows were checked against
    mode: str  # "files": the adds are files of the sink; "rows": staged files below the store, which Spark appends
    fingerprint: str  # of the sink's schema then
    adds: tuple[Add, ...]
    version: int | None = None  # of the sink's table when it was first looked at; None in headers of the time before this was kept
    merge: Merge | None = None  # staged files, and how they are merged; None: they are appended
    part: int = 0  # one decision may write several times to a sink: 0, 1, ... in the order of the calls
    parts: int = 1

    @property
    def rows(self) -> int:
        """How many rows."""
        return sum(add.rows for add in self.adds)

    @property
    def is_last(self) -> bool:
        """Whether it is the last write of its decision to its sink."""
        return self.part == self.parts - 1

    @property
    def staged(self) -> bool:
        """Whether the files lie below the store's folder."""
        return self.mode == "rows" or self.merge is not None


@dataclass(frozen=True)
class Mark:
    """How far one sink shows the ledger, as of the last publication."""

    seq: int  # of that publication
    table_id: str
    version: int  # of the sink's table: a RESTORE since then may have taken rows back (restores.py)
    uri: str = ""
    generation: int = 0  # of that publication
    shown: int | None = None  # transaction version that the sink showed after it; None: none that counts
    accepted: int = 0  # seq at which a person accepted another table under this name; decisions up to it may go there


@dataclass(frozen=True)
class Header:
    """One decision: the head it leads to, and what belongs to it alone."""

    kind: str  # "epoch", "join", "leave", "claim", "batch", "letters", "amend", "accept-sink", "purge"
    attempt: str  # tells whose commit this is when the answer was lost
    head: Head
    committed_at: dt.datetime
    after: int = 0  # seq of the decision that this one was planned on
    follows: str = ""  # its attempt: a header that follows another one belongs to another history
    holder: Holder | None = None  # of the epoch
    held_since: dt.datetime | None = None  # when the epoch was taken
    members: tuple[Holder, ...] | None = None  # the processes that share the epoch; None: `holder` has it alone
    claims: Mapping[Partition, int] = field(default_factory=dict)  # partitions that were claimed: the number of the last claim
    generation_since: int = 0  # seq of the decision that began the generation; damage before it was accepted
    keyspace_since: int = 0  # seq of the decision that began the keyspace; reservations and batch records above it count
    summary: int = 0  # seq of the newest summary of seen positions at or before this one, 0 for none
    sinks: tuple[SinkFiles, ...] = ()
    marks: Mapping[str, Mark] = field(default_factory=dict)
    pending: tuple[int, ...] = ()  # earlier seqs that were not known to be published when this was decided
    dropped: tuple[tuple[int, str], ...] = ()  # (seq, sink) that a person gave up
    purged_before: str | None = None  # ISO date: reservations decided on earlier days are gone
    reserved: int = 0  # reservation rows of this decision
    freed: int = 0  # keys that it freed
    by: str = ""
    reason: str = ""

    @property
    def seq(self) -> int:
        """Number of the decision."""
        return self.head.seq

    @property
    def version(self) -> int:
        """The transaction version by which a table shows this decision."""
        return version_of(self.seq, self.attempt)

    def to_json(self) -> str:
        """The document."""
        return json.dumps(_encode(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Header:
        """The inverse of `to_json`. Raises StateTooNew, SchemaOutdated."""
        value = json.loads(text)
        _require_version(value["v"], value["head"]["consumer"])
        return _decode(value)

    def following(self, kind: str, attempt: str, now: dt.datetime, **changes: Any) -> Header:
        """The header after this one: everything that lasts stays, what belongs to one decision alone is cleared."""
        alone: dict[str, Any] = {"sinks": (), "reserved": 0, "freed": 0, "by": "", "reason": ""}
        told = {"kind": kind, "attempt": attempt, "committed_at": now, "follows": self.attempt}
        return replace(self, **(alone | told | changes))


def _require_version(version: int, consumer: str) -> None:
    told = f"The ledger of consumer {consumer!r} was written with state version {version}; this library knows {STATE_VERSION}."
    if version > STATE_VERSION:
        raise StateTooNew(f"{told} Upgrade this installation of dedup.")
    if version < STATE_VERSION:
        raise SchemaOutdated(
            f"{told} The versions are incompatible, and there is no conversion. "
            "Use a new store folder and a new consumer, or the older version of dedup that wrote it."
        )


def first_header(consumer: str) -> Header:
    """What stands before the first decision."""
    return Header("", "", Head(consumer), dt.datetime.fromtimestamp(0, dt.UTC))


def _encode(h: Header) -> dict[str, Any]:
    return {
        "v": STATE_VERSION,
        "kind": h.kind,
        "attempt": h.attempt,
        "after": h.after,
        "follows": h.follows,
        "head": _encode_head(h.head),
        "committed_at": _micros(h.committed_at),
        "holder": None if h.holder is None else vars(h.holder),
        "held_since": _micros(h.held_since),
        "members": None if h.members is None else [vars(m) for m in h.members],
        "claims": [[*p, number] for p, number in h.claims.items()],
        "generation_since": h.generation_since,
        "keyspace_since": h.keyspace_since,
        "summary": h.summary,
        "sinks": [{**vars(s), "adds": [a._asdict() for a in s.adds], "merge": s.merge and vars(s.merge)} for s in h.sinks],
        "marks": {name: vars(mark) for name, mark in h.marks.items()},
        "pending": h.pending,
        "dropped": h.dropped,
        "purged_before": h.purged_before,
        "reserved": h.reserved,
        "freed": h.freed,
        "by": h.by,
        "reason": h.reason,
    }


_PLAIN_OF_HEADER = (
    *("kind", "attempt", "after", "follows", "generation_since", "keyspace_since", "summary", "purged_before", "reserved", "freed"),
    *("by", "reason"),
)


def _decode(value: dict[str, Any]) -> Header:
    plain = {name: value[name] for name in _PLAIN_OF_HEADER}
    committed_at = _moment(value["committed_at"])
    assert committed_at is not None
    return Header(
        **plain,
        head=_decode_head(value["head"]),
        committed_at=committed_at,
        holder=Holder(**value["holder"]) if value["holder"] else None,
        held_since=_moment(value["held_since"]),
        members=None if value["members"] is None else tuple(Holder(**m) for m in value["members"]),
        claims={Partition(s, t, p): number for s, t, p, number in value["claims"]},
        sinks=tuple(map(_decode_sink, value["sinks"])),
        marks={name: Mark(**mark) for name, mark in value["marks"].items()},
        pending=tuple(value["pending"]),
        dropped=tuple((int(seq), name) for seq, name in value["dropped"]),
    )


_PLAIN = ("consumer", "seq", "epoch", "generation", "keyspace", "query_id", "batch_id", "gap_accepted")


def _decode_sink(value: dict[str, Any]) -> SinkFiles:
    merge = value["merge"]
    how = Merge(**{**merge, "keys": tuple(merge["keys"])}) if merge else None
    return SinkFiles(**{**value, "adds": tuple(Add(**a) for a in value["adds"]), "merge": how})


def _encode_head(head: Head) -> dict[str, Any]:
    return {
        **{name: getattr(head, name) for name in _PLAIN},
        "batch_ended": head.batch_ended,
        "spent": budget.to_json(head.spent),
        "settings": None if head.settings is None else dict(head.settings),
        "floors": [[*p, floor] for p, floor in head.floors.items()],
        "passed": [[*p, number] for p, number in head.passed.items()],
        "checkpoints": [
            [*p, c.sequence_number, c.offset, _micros(c.enqueued_time), c.query_id, c.log_time] for p, c in head.checkpoints.items()
        ],
        "incarnations": [[*topic, life] for topic, life in head.incarnations.items()],
        "incarnation_ids": [[*topic, told] for topic, told in head.incarnation_ids.items()],
    }


def _decode_head(value: dict[str, Any]) -> Head:
    return Head(
        **{name: value[name] for name in _PLAIN},
        batch_ended=value["batch_ended"],
        spent=budget.from_json(value["spent"]),
        settings=value["settings"],
        floors={Partition(s, t, p): floor for s, t, p, floor in value["floors"]},
        passed={Partition(s, t, p): number for s, t, p, number in value["passed"]},
        checkpoints={
            Partition(s, t, p): Checkpoint(n, offset, _moment(at), query_id, log_time)
            for s, t, p, n, offset, at, query_id, log_time in value["checkpoints"]
        },
        incarnations={(s, t): life for s, t, life in value["incarnations"]},
        incarnation_ids={(s, t): told for s, t, told in value["incarnation_ids"]},
    )


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _micros(moment: dt.datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // dt.timedelta(microseconds=1)


def _moment(micros: int | None) -> dt.datetime | None:
    return None if micros is None else _EPOCH + dt.timedelta(microseconds=micros)
