"""What a store knows of one consumer, as values: `Head` and its parts, and `StateStore`, which keeps them.

A store that several processes share is `Sharing`: each process claims partitions (`Claim`), and a task of Spark's works on a
`SliceClaim`. Read and written by both stores and by all that decides. Values only: nothing is computed or connected here.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa

from checkpoint.position import Partition
from checkpoint.records import ALL, RecordFilter

OVER_BUDGET = "over budget"
"""The scope under which a slice notes the attempt in which it was over the budget."""

Topic = tuple[str, str]
"""(source, topic)"""


@dataclass(frozen=True)
class Claim:
    """A partition that one of several processes under one epoch has claimed. Its number is what fences: each claim raises it."""

    partition: Partition
    number: int
    run_id: str  # of the process

    @property
    def scope(self) -> str:
        """What the crash marker of this partition is kept under."""
        return str(self.partition)


@dataclass(frozen=True)
class SliceClaim(Claim):
    """The events of one partition in one batch, as a task of the driver that holds the epoch works on them.

    What fences it is the epoch, and not its number; two tasks of one slice take turns, and the second one finds its positions seen.
    """

    query_id: str
    batch_id: int
    expected: int | None  # where the checkpoint has to stand, unless at a chunk end that this query and batch recorded
    attempt: str  # of the driver at this batch: where one slice is over the budget, no other one begins a transaction
    patience: float  # seconds after which a run of the handler has ended itself; infinite without a limit


class Sharing(Protocol):
    """Entering an epoch beside others, leaving it, and making partitions one's own."""

    def join(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become one of the processes that share an epoch; returns the head. For a single instance it waits as `take_epoch` does."""

    def leave(self, consumer: str, epoch: int, run_id: str) -> None:
        """Go, so that nobody waits for this process."""

    def claim(self, consumer: str, epoch: int, run_id: str, partition: Partition, *, takeover_after: float) -> Claim:
        """Make one partition this process's own: whoever had it cannot commit any more. Raises Fenced, StillHeld."""


@dataclass(frozen=True)
class Checkpoint:
    """The low watermark of one partition: every position up to it is decided."""

    sequence_number: int
    offset: str | None = None  # the broker's opaque offset of that event
    enqueued_time: dt.datetime | None = None  # aware, UTC
    query_id: str = ""  # the query that last advanced it
    log_time: bool = False  # whether enqueued_time is the broker's clock, which goes forward, and not what a producer said


@dataclass(frozen=True)
class Head:
    """A consumer's state as of its last decision. Empty mappings and seq 0 for a new one."""

    consumer: str
    seq: int = 0  # decisions so far; +1 at each commit of any kind (of letters alone on Delta only)
    epoch: int = 0
    generation: int = 0  # +1 at reset and accept-restore
    keyspace: int = 0  # the generation that began with the last reset: keys and batch records of older ones no longer count
    settings: Mapping[str, str] | None = None  # canonical key settings the state was written with
    query_id: str | None = None  # last query and batch that committed anything
    batch_id: int | None = None
    batch_ended: bool = True  # its last chunk is decided, too
    gap_accepted: bool = False  # set by a person, cleared by the next batch
    spent: Mapping[str, Spent] = field(default_factory=dict)  # of the budget, by the batches of the stream
    floors: Mapping[Partition, int] = field(default_factory=dict)  # at or below: reservations may have been purged
    checkpoints: Mapping[Partition, Checkpoint] = field(default_factory=dict)
    passed: Mapping[Partition, int] = field(default_factory=dict)  # a person went on behind: what no batch has seen up to it is absent
    incarnations: Mapping[Topic, int] = field(default_factory=dict)  # topics not named here are in incarnation 0
    incarnation_ids: Mapping[Topic, str] = field(default_factory=dict)  # the broker's own ids of the present ones, where it told them


@dataclass(frozen=True)
class Run:
    """Which query and batch a chunk belongs to."""

    query_id: str
    batch_id: int
    chunk: int = 0
    ends: bool = True  # no chunk of the batch comes after this one
    durable: bool = False  # the query id outlives the process (Spark's own, or query=): the restore guard is on
    joined: bool = False  # one of several processes under one epoch: it speaks for its own partition only


@dataclass(frozen=True)
class Holder:
    """The process that takes an epoch."""

    host: str
    pid: int
    started: str  # the process's start time as its host tells it; equal only for the same process
    run_id: str


class Present(NamedTuple):
    """A process that holds an epoch or shares it, as seen from here."""

    host: str
    pid: int
    alive: bool | None  # None: it cannot be known from here


class StateStore(Sharing, Protocol):
    """Where consumers stand: their heads, who may commit, and what was decided."""

    def take_epoch(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become the one instance that may commit; returns the new head. Waits `takeover_after` seconds for a live or unknowable holder."""

    def head(self, consumer: str) -> Head:
        """The state now, without any lock."""

    def present(self, consumer: str) -> list[Present]:
        """The processes that hold the consumer's epoch or share it; empty where nobody has run it."""

    def heartbeat(self, consumer: str, epoch: int, every: float, run_id: str = "") -> AbstractContextManager[None]:
        """While the block runs, tell other instances every `every` seconds that this one (this run) is alive, outside any transaction."""

    def amend(self, consumer: str, change: Callable[[Head], Head], *, by: str, reason: str) -> Head:
        """A person's decision about the state (accept-gap and so on): replace the head by `change(head)`, recorded with who and why."""

    def consumers(self) -> list[str]:
        """Names, sorted."""

    def batches(self, consumer: str, record_filter: RecordFilter = ALL) -> pa.Table:
        """Batch records (BATCHES + generation int32, epoch int64, seq int64, committed_at timestamp), in seq order."""


@dataclass(frozen=True)
class Spent:
    """What one kind has used of its budget."""

    decided: int = 0  # events that have come to where they may fail in this way: the clock
    failures: tuple[int, ...] = ()  # which of the last ones failed, as values of that clock, ascending
    lifted: int = 0  # failures up to this value of the clock are admitted: a person has said so
    out_of_time: int = 0  # events that ran out of time since one passed, without those that are admitted
