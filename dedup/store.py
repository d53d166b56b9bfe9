"""The one seam: what the flow asks of a store, and the values that cross it.

A store keeps five things that change together: sink rows, reservations, dead letters, batch records and
checkpoints. It decides nothing: the flow plans with pure functions (planning.py) and the store executes.
Not a public extension point. Both stores pass the one contract suite in tests/contract.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pyarrow as pa

from checkpoint.position import Partition, Ranges
from deadletter.budget import Spent
from deadletter.letter import Kind
from deadletter.selection import Selection as Selection
from dedup.claims import Claim as Claim
from dedup.claims import Sharing
from dedup.claims import Slice as Slice
from dedup.wanted import ALL, Wanted

if TYPE_CHECKING:
    from dedup.outbox.message import Messages
    from dedup.outbox.store import Outbox
    from dedup.rows import PlainRows
    from dedup.steps import Merge, Step

Topic = tuple[str, str]
"""(source, topic)"""

RANGES = pa.list_(pa.struct([pa.field("first", pa.int64(), nullable=False), pa.field("last", pa.int64(), nullable=False)]))

KEYS = pa.schema([pa.field("key", pa.binary(16), nullable=False), pa.field("payload_hash", pa.int64(), nullable=False)])
"""One row per reservation: 128-bit key hash, 64-bit payload hash."""

BATCHES = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),  # -1 in key-only mode, with empty source and topic
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("batch_id", pa.int64(), nullable=False),
        pa.field("chunk", pa.int32(), nullable=False),  # 0, 1, ... within the batch
        pa.field("seen", RANGES, nullable=False),  # new positions of this chunk
        pa.field("duplicates", RANGES, nullable=False),  # positions of which every part was a duplicate
        pa.field("skipped", RANGES, nullable=False),  # positions of which every part was skipped
        pa.field("late", RANGES, nullable=False),  # positions at or below the checkpoint, never seen before
        pa.field("delivered", pa.int64(), nullable=False),  # rows; = redelivered + the next four counts
        pa.field("redelivered", pa.int64(), nullable=False),
        pa.field("processed", pa.int64(), nullable=False),
        pa.field("duplicate", pa.int64(), nullable=False),
        pa.field("skipped_rows", pa.int64(), nullable=False),
        pa.field("dead_lettered", pa.int64(), nullable=False),
        pa.field("reserved", pa.int64(), nullable=False),  # keys newly reserved
    ]
)
"""The batch record: one row per chunk and partition. Stores add consumer, generation, epoch, seq, committed_at."""

SEQUENCES = pa.schema(
    [
        pa.field("sequence", pa.binary(16), nullable=False),
        pa.field("letter", pa.string(), nullable=False),  # id of its last letter that is open or blocked
        pa.field("kind", pa.string(), nullable=False),  # of that letter
    ]
)
"""Blocked sequences."""

GROUPS = pa.schema(
    [
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("letters", pa.int64(), nullable=False),
        pa.field("first_failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("last_failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("example", pa.string(), nullable=False),  # id of the letter that failed last
        pa.field("reason", pa.string(), nullable=False),  # of the example
    ]
)
"""Dead letters of one consumer or several, by fingerprint and kind."""


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
    seq: int = 0  # decisions so far; +1 at each commit of any kind
    epoch: int = 0
    generation: int = 0  # +1 at reset and accept-restore
    keyspace: int = 0  # the generation that began with the last reset: keys and batch records of older ones no longer count
    settings: Mapping[str, str] | None = None  # canonical key settings the state was written with
    query_id: str | None = None  # last query and batch that committed anything
    batch_id: int | None = None
    batch_ended: bool = True  # its last chunk is decided, too
    gap_accepted: bool = False  # set by a person, cleared by the next batch
    spent: Mapping[Kind, Spent] = field(default_factory=dict)  # of the budget, by the batches of the stream
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


class Rows(Protocol):
    """What `tx.write` recorded: rows of one sink, evaluated exactly once by one of the three methods."""

    @property
    def in_tasks(self) -> bool:
        """Whether they are too many for the driver: use files()."""

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows, known without evaluating them."""

    def plain(self) -> PlainRows | None:
        """The rows where they are Python objects, which have no types before the sink's are known; None for others."""

    def arrow(self) -> pa.Table:
        """The rows, on this machine."""

    def files(self, write: Callable[[Any], Any], columns: list[str]) -> list[str]:
        """The results of `write(iterator of record batches)` -> iterator of str, run where the rows are (Spark tasks)."""


Meanwhile = Callable[[pa.Table], None]
"""Makes something ready, given keys that are known (KEYS)."""


class Transaction(Protocol):
    """One chunk, or some letters. Left without Commit executed, nothing of it is true."""

    head: Head  # as read under this transaction's fence

    @property
    def connection(self) -> Any:
        """The database connection of this transaction; AttributeError with advice where the store has none."""

    def seen(self, spans: Mapping[Partition, tuple[int, int]]) -> dict[Partition, Ranges]:
        """Positions in [first, last] that batch records hold as seen: generations >= head.keyspace, current incarnations."""

    def ask(self, keys: pa.Array) -> None:
        """Begin to look up these keys, distinct and sorted: `reserve` comes next, with the same ones, and takes the answer."""

    def reserve(self, keys: pa.Table, meanwhile: Meanwhile | None = None) -> pa.Table:
        """Reserve the new ones of these distinct keys (KEYS); returns the known ones with the payload hash they were reserved with.

        Args:
            meanwhile: called, where there is something to wait for, with the keys that are known so far, while the others are
                written. It must leave the transaction alone, and what it makes ready may turn out not to be wanted.
        """

    def known(self, keys: pa.Table) -> pa.Table:
        """Those of these distinct keys (KEYS) that are reserved or held by a letter, with their payload hash. Reserves nothing."""

    def lock(self, ids: Sequence[str]) -> pa.Table:
        """LETTERS + duplicates of these letters, in position order; nobody else can change them now.

        Those that somebody else has locked are left out.
        """

    def blocked(self, sequences: pa.Array) -> pa.Table:
        """Which of these distinct sequences (binary(16)) are blocked, by SEQUENCES. None of them is released meanwhile."""

    def attempt(self) -> AbstractContextManager[None]:
        """What is written inside vanishes if the block raises; the transaction goes on."""

    def apart(self, tables: Collection[str]) -> bool:
        """Whether these are different tables, none of which can see when another one gets its rows (triggers, foreign keys)."""

    def write(self, table: str, rows: Rows) -> int:
        """Append rows to a sink as part of this transaction. Returns their number. Raises SinkMismatch before any row is sent."""

    def merge(self, table: str, rows: Rows, merge: Merge) -> int:
        """Insert, update or delete by key as part of this transaction. Returns the number of rows.

        Args:
            rows: of one key the last one counts (dedup/reduce.py); `merge.delete_when` may be a column beside those of the sink.

        Raises SinkMismatch before any row is sent.
        """

    def publish(self, messages: Messages) -> None:
        """Put messages into the outbox as part of this transaction, in their order."""

    def execute(self, step: Step) -> None:
        """Do one step of the decision."""


class Store(Sharing, Protocol):
    """Where a consumer's state lives, beside its sinks. Picklable; opens its connections lazily."""

    steps: ClassVar[Mapping[str, str]]  # every name given to on_step, in order -> what is true if the process dies right before it
    on_step: Callable[[str], None]  # called with each name right before the step acts
    default_max_events: ClassVar[int]

    def migrate(self) -> list[str]:
        """Bring the state to this library's version; returns what was applied. Safe to call twice, and twice at once."""

    def take_epoch(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become the one copy that may commit; returns the new head. Waits `takeover_after` seconds for a live or unknowable holder."""

    def head(self, consumer: str) -> Head:
        """The state now, without any lock."""

    def begin(self, consumer: str, epoch: int, claim: Claim | None = None) -> AbstractContextManager[Transaction]:
        """Open the transaction of one chunk.

        Args:
            claim: the partition of the chunk, where the epoch is shared; in a task its `Slice`.

        Raises Fenced when a newer epoch was taken, PartitionLost when another process claimed the partition.
        """

    def begin_letters(self, consumer: str, *, positions: bool = False) -> AbstractContextManager[Transaction]:
        """Open a transaction of letters under the epoch that there is: it takes none and stalls no stream.

        Args:
            positions: also decide positions (a batch record): then it excludes the stream for as long as it is open.
        """

    def trial(self, consumer: str, scope: str = "") -> str | None:
        """What `set_trial` kept last under this scope: that of a claim, or the whole consumer."""

    def set_trial(self, consumer: str, trial: str | None, scope: str = "") -> None:
        """Note what is about to be tried, outside any transaction, so that the next process knows what this one died of."""

    def heartbeat(self, consumer: str, epoch: int, every: float, run_id: str = "") -> AbstractContextManager[None]:
        """While the block runs, tell other copies every `every` seconds that this one (this run) is alive, outside any transaction."""

    def amend(self, consumer: str, change: Callable[[Head], Head], *, by: str, reason: str) -> Head:
        """A person's decision about the state (accept-gap and so on): replace the head by `change(head)`, recorded with who and why."""

    def publish(self, consumer: str) -> int:
        """Bring decided batches that their sinks do not show yet; returns how many. Always 0 where sinks commit with the decision."""

    def outbox(self, consumer: str) -> Outbox:
        """The messages that this consumer has published."""

    def consumers(self) -> list[str]:
        """Names, sorted."""

    def batches(self, consumer: str, wanted: Wanted = ALL) -> pa.Table:
        """Batch records (BATCHES + generation int32, epoch int64, seq int64, committed_at timestamp), in seq order."""

    def letters(self, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
        """Dead letters (LETTERS + duplicates int64, or only these columns) in position order."""

    def groups(self, selection: Selection) -> pa.Table:
        """GROUPS: the selected letters (its limit counts groups) by fingerprint, the largest first."""

    def history(self, *letter_ids: str) -> pa.Table:
        """HISTORY of these letters, each one's oldest first."""

    def reserved(self, consumer: str) -> int | None:
        """How many reservations of its current keyspace are kept; None where this cannot be told per consumer."""

    def require_letters(self, consumer: str) -> None:
        """Raise StoreRestored or PublicationStuck where dead letters may be missing, because the tables were restored or copied back."""

    def problems(self, consumer: str) -> list[str]:
        """Contradictions only this store can see (headers, publication marks); empty when all is well."""

    def close(self) -> None:
        """Let go of connections. The store can be used again."""
