"""The interface of a store: what the pipeline calls, and the values that it passes.

A store keeps six things that change together: sink rows, reservations, dead letters, messages, batch records and checkpoints.
It decides nothing: the pipeline plans with pure functions (planning.py, decision.py) and the store executes. `StateStore` and
`LetterStore` are the parts of `Store` that need no sinks. For tasks of Spark a store offers more: with `Slicing` tasks commit by
themselves; with `Filing` tasks write files, and one commit of the driver names them. Not a public extension point. Both stores pass the one
contract suite in tests/contract.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import pyarrow as pa

from checkpoint.head import Claim, Head
from checkpoint.position import Partition, Ranges
from deadletter.store import LetterStore
from dedup.core.rows import Rows

if TYPE_CHECKING:
    from dedup.core.deletion import Deletion
    from dedup.core.messages import Messages, Outbox
    from dedup.core.retention import Remains, UpkeepTurn, Upkept
    from dedup.core.steps import Merge, Step


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
            rows: of one key the last one counts (dedup/core/merges.py); `merge.delete_when` may be a column beside those of the sink.

        Raises SinkMismatch before any row is sent.
        """

    def enqueue(self, messages: Messages) -> None:
        """Put messages into the outbox as part of this transaction, in their order."""

    def execute(self, step: Step) -> None:
        """Do one step of the decision."""


class Store(LetterStore, Protocol):
    """Where a consumer's state lives, beside its sinks. Picklable; opens its connections lazily."""

    steps: ClassVar[Mapping[str, str]]  # every name given to on_step, in order -> what is true if the process dies right before it
    on_step: Callable[[str], None]  # called with each name right before the step acts
    default_max_events: ClassVar[int]

    def migrate(self, *, dry_run: bool = False) -> list[str]:
        """Bring the state to this library's version; returns what was applied. Safe to call twice, and twice at once.

        Args:
            dry_run: change nothing; returns what would be applied.
        """

    def begin(self, consumer: str, epoch: int, claim: Claim | None = None) -> AbstractContextManager[Transaction]:
        """Open the transaction of one chunk.

        Args:
            claim: the partition of the chunk, where the epoch is shared; in a task its `SliceClaim`.

        Raises Fenced when a newer epoch was taken, PartitionLost when another process claimed the partition.
        """

    def begin_letters(self, consumer: str, *, positions: bool = False) -> AbstractContextManager[Transaction]:
        """Open a transaction of letters under the epoch that there is: it takes none and stalls no stream.

        Args:
            positions: also decide positions (a batch record): then it excludes the stream for as long as it is open.
        """

    def crash_marker(self, consumer: str, scope: str = "") -> str | None:
        """What `set_crash_marker` kept last under this scope: that of a claim, or the whole consumer."""

    def set_crash_marker(self, consumer: str, marker: str | None, scope: str = "") -> None:
        """Note what is about to be tried, outside any transaction, so that the next process knows what this one died of.

        Args:
            marker: a JSON object; None takes the note away.
        """

    def publish(self, consumer: str) -> int:
        """Make decided batches visible in their sinks; returns how many became visible. Always 0 where sinks commit with the decision."""

    def outbox(self, consumer: str) -> Outbox:
        """The messages that this consumer has published."""

    def upkeep(self, retention: dt.timedelta, *, although_behind: Collection[str] = (), dry_run: bool = False) -> list[Upkept]:
        """Forget reservations and sent messages that are older than that, of all consumers, as far as these have read their logs.

        Args:
            although_behind: consumers that count as having read everything.
        """

    def tell_retention(self, consumer: str, retention: dt.timedelta | None, *, upkeep: bool) -> None:
        """Note how long this consumer needs its reservations (None: for ever), where others share its tables.

        Args:
            upkeep: whether its own processes carry it out.
        """

    def upkeep_turn(self, consumer: str, retention: dt.timedelta) -> UpkeepTurn:
        """What the consumer's own process does for its upkeep. Begins nothing yet. Raises ConfigError where this store has none."""

    def holding_up(self) -> list[str]:
        """Consumers that have not told their retention, while another one's own upkeep waits for that. Empty where none shares tables."""

    def delete_consumer(
        self, consumer: str, *, although_running: bool = False, although_waiting: bool = False, dry_run: bool = False, by: str, reason: str
    ) -> Deletion:
        """Delete all that is kept of a consumer. No instance of it commits from then on; one that gets its name begins as a new one.

        Raises ConfigError where there is none, Refused where it runs or something waits and that is not allowed.
        """

    def scrub(self, consumer: str, *, dry_run: bool = False) -> list[Remains]:
        """Take what was erased out of the files of the tables, as far as that can be done now; returns where it can still be found.

        Also what an earlier call has left, because it died.
        """

    def reserved(self, consumer: str) -> int | None:
        """How many reservations of its current keyspace are kept; None where this cannot be told per consumer."""

    def was_used(self) -> bool:
        """Whether there is a store, be it one whose consumers were all deleted: a folder that was mounted may be gone."""

    def reserved_since(self, consumer: str) -> dt.datetime | None:
        """When the oldest reservations were made that are kept, at the latest; None where none is. Aware; cheap, however many there are."""

    def unpublished_since(self, consumer: str) -> dt.datetime | None:
        """When the first decision was committed that a sink does not show yet; None where all are shown. Aware."""

    def require_letters(self, consumer: str) -> None:
        """Raise StoreRestored or PublicationStuck where dead letters may be missing, because the tables were restored or copied back."""

    def problems(self, consumer: str) -> list[str]:
        """Contradictions only this store can see (headers, publication marks); empty when all is well."""

    def close(self) -> None:
        """Let go of connections. The store can be used again."""


@runtime_checkable
class Slicing(Protocol):
    """A store whose slices can be committed by Spark's tasks: `begin` takes their `SliceClaim`."""

    def in_tasks(self) -> Any:
        """The same store for a process of tasks."""

    def crash_markers(self, consumer: str) -> dict[str, str]:
        """Scope -> what a slice has kept by `set_crash_marker`; it has not recorded a batch since."""

    def room(self, consumer: str) -> int:
        """How many connections this role could have for tasks, those of this consumer's tasks included."""


class Frames(Protocol):
    """The operations of `Tx` on one kind of rows (DataFrames, Arrow tables)."""

    def columns(self, rows: Any) -> list[str]:
        """Column names."""

    def positions(self, rows: Any, condition: Any | None, columns: list[str]) -> pa.Table:
        """These columns of the rows for which the condition is true (None: of all rows). One evaluation."""

    def without(self, rows: Any, positions: pa.Table) -> Any:
        """The rows whose position is not among `positions`, compared by its columns."""

    def rows(self, rows: Any) -> Rows:
        """The rows as a store takes them. Accepts the frame's own kind, an Arrow table, a dict, or a list of dicts."""

    def answering(self) -> AbstractContextManager[None]:
        """For the time that a handler works with such frames. Raises SparkGone in place of its errors where who has the rows has ended."""


class TaskFiles(Protocol):
    """Writes rows of one sink, anywhere. Travels to tasks."""

    def write(self, rows: Rows) -> list[str]:
        """Write these rows as files that no commit names yet; returns what `adopt` takes.

        Raises:
            SinkMismatch: they do not fit the sink. RowsRefused: some of them break a rule of it.

        Crash: files that no commit names are invisible; they are removed after some days.
        """


@runtime_checkable
class Filing(Protocol):
    """A transaction that takes files of tasks."""

    def task_files(self, table: str) -> TaskFiles:
        """What writes rows of this sink in tasks. Raises SinkMismatch where there is no such sink."""

    def adopt(self, table: str, files: Sequence[str]) -> int:
        """Make these files, and what is in them, part of this transaction; returns the number of rows.

        Raises:
            RowsRefused: some rows break a rule of the sink.
        """
