"""PostgresStore: sink rows, reservations, dead letters, batch records and checkpoints in one database transaction.

The store of `Consumer(..., store=PostgresStore(dsn))`. The modules of this package implement its parts; this one has three classes: `Reads`
for people and `verify`, `Joins` for processes that share an epoch, and the store itself.
"""

from __future__ import annotations

import copy
import datetime as dt
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import MappingProxyType
from typing import Any, ClassVar, Self

import psycopg
import pyarrow as pa
from psycopg.pq import TransactionStatus

from checkpoint import given
from checkpoint.errors import StoreError
from checkpoint.head import OVER_BUDGET, Claim, Head, Holder, Present, SliceClaim
from checkpoint.holders import is_alive, this_process
from checkpoint.position import Partition
from checkpoint.postgres import sql
from checkpoint.postgres.connection import Connection, DsnWithPassword, checked, checked_schema, redacted, translating
from checkpoint.postgres.sql import Statements
from checkpoint.records import ALL, RecordFilter
from deadletter.selection import Selection
from dedup.core.retention import Remains
from dedup.core.settings import POSTGRES_STORE
from dedup.postgres import letters, sinks, state, stored_filter, transaction
from dedup.postgres.connection import Lease, Pool, renew
from dedup.postgres.deletion import Deletes
from dedup.postgres.epoch import (
    TakeoverWait,
    beating,
    begin_fenced,
    claim_partition,
    enter_epoch,
    enter_slice,
    join_epoch,
    room_for_slices,
    session_of,
    take_epoch,
)
from dedup.postgres.key_filter import KnownFilter
from dedup.postgres.outbox import PgOutbox, remains
from dedup.postgres.tending import PgTending
from dedup.postgres.transaction import LettersTransaction, PgTransaction
from dedup.postgres.upkeep import Upkeeps

log = logging.getLogger("dedup")

_OF_A_TASK = 4
"""There may be many processes of tasks on a host: each takes so much less memory for its filter."""

_NOTHING = "nothing of the chunk is true; it is delivered again"
_IN_DOUBT = "the server has all of it or nothing; the next run reads which"


def _no_step(name: str) -> None:
    """Tell nobody."""


class Reads:
    """Each method is one snapshot, takes no lock, and raises StoreError where the server cannot answer."""

    _sql: Statements

    def _connection(self, doing: str) -> AbstractContextManager[Connection]:
        """A connection outside any transaction."""
        raise NotImplementedError

    def outbox(self, consumer: str) -> PgOutbox:
        """The messages that this consumer has published."""
        return PgOutbox(consumer, self._sql, self._connection)

    def consumers(self) -> list[str]:
        """Names, sorted."""
        with self._connection("Reading the consumers") as connection:
            return [row[0] for row in connection.execute(self._sql["consumers"], {})]

    def was_used(self) -> bool:
        """True: where the tables are missing, whatever reads them says so."""
        return True

    def present(self, consumer: str) -> list[Present]:
        """The processes that hold the consumer's epoch or share it. One whose database session goes on is alive, wherever it is."""
        with self._connection(f"Reading who runs {consumer!r}") as connection:
            rows = connection.execute(self._sql["present"], {"consumer": consumer}).fetchall()
        found = [(host, pid, is_alive(host, pid, started), connected) for host, pid, started, connected in rows]
        return [Present(host, pid, alive if connected is None or alive is False else connected) for host, pid, alive, connected in found]

    def batches(self, consumer: str, record_filter: RecordFilter = ALL) -> pa.Table:
        """Batch records in seq order."""
        with self._connection(f"Reading the batch records of {consumer!r}") as connection:
            return state.batches(connection, self._sql, consumer, record_filter)

    def letters(self, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
        """Dead letters in position order. Leave out `body` and `extras` where they are not needed: they may be large.

        Raises ConfigError where `selection.after` names no letter.
        """
        with self._connection("Reading dead letters") as connection:
            return letters.letters(connection, self._sql, selection, columns)

    def groups(self, selection: Selection) -> pa.Table:
        """GROUPS of the selected letters, the largest first.

        By consumer, kind, status and fingerprint it is fast however many letters there are; with other conditions all matching letters
        are read.
        """
        with self._connection("Grouping dead letters") as connection:
            return letters.groups(connection, self._sql, selection)

    def history(self, *letter_ids: str) -> pa.Table:
        """HISTORY of these letters, each one's oldest first."""
        with self._connection("Reading the history of letters") as connection:
            return letters.history(connection, self._sql, letter_ids)

    def named(self, consumer: str, key: str, hashes: Sequence[bytes] = ()) -> list[str]:
        """Ids of the letters that show this idempotence key, or showed it, or had one of these hashes, before an edit."""
        with self._connection("Looking for dead letters") as connection:
            return letters.named(connection, self._sql, consumer, key, hashes)

    def reserved(self, consumer: str) -> int | None:
        """How many reservations are kept; None where several consumers, or lives of one, share the tables."""
        with self._connection("Counting reservations") as connection:
            found = state.read(connection, self._sql, consumer)
            return state.reserved(connection, self._sql, found.head.keyspace) if found else 0

    def reserved_since(self, consumer: str) -> dt.datetime | None:
        """When the oldest table of reservations that was not purged was begun. All consumers share it."""
        with self._connection("Looking at reservations") as connection:
            began: dt.datetime | None = state.value(connection, self._sql["reserved_since"])
        return began

    def unpublished_since(self, consumer: str) -> None:
        """Sinks show a batch as soon as it is committed."""

    def require_letters(self, consumer: str) -> None:
        """Raise StoreRestored where tables were restored, all of them or some."""
        with self._connection(f"Checking the tables of {consumer!r}") as connection:
            found = [str(row[0]) for row in connection.execute(self._sql["restore_contradictions"], {"consumer": consumer})]
        state.refuse_restored(consumer, "; ".join(found) or None)

    def problems(self, consumer: str) -> list[str]:
        """Contradictions between the tables. Reads every reservation: minutes where there are billions."""
        with self._connection(f"Checking the tables of {consumer!r}") as connection:
            return [*state.problems(connection, self._sql, consumer), *stored_filter.problems(connection, self._sql)]


class Joins:
    """Each method is a transaction of its own, or none."""

    _sql: Statements
    dsn: str
    filter_memory: int
    _of_a_task = False
    _registered: dict[Any, int]

    def _begin_anew(self) -> None:
        """Without connections."""
        raise NotImplementedError

    def _connection(self, doing: str) -> AbstractContextManager[Connection]:
        """A connection outside any transaction."""
        raise NotImplementedError

    def join(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become one of the processes that share the consumer's epoch; returns the head.

        An epoch that is shared is entered; one that a single instance holds is taken over by the rules of `take_epoch`.

        Raises:
            StillHeld: a single instance showed life for twice `takeover_after`, or its session cannot be ended from here.

        Crash: this process is on record or not; on record, it counts as gone with its database session.
        """
        with self._connection(f"Joining {consumer!r}") as connection:
            join_epoch(connection, self._sql, consumer, holder, TakeoverWait(takeover_after, force, on_wait))
            found = state.read(connection, self._sql, consumer)
        assert found is not None
        return found.head

    def leave(self, consumer: str, epoch: int, run_id: str) -> None:
        """Take this process off the record, so that nobody waits for it.

        Crash: as if it had not been called.
        """
        with self._connection(f"Leaving {consumer!r}") as connection:
            connection.execute(self._sql["leave"], {"consumer": consumer, "run_id": run_id})

    def claim(self, consumer: str, epoch: int, run_id: str, partition: Partition, *, takeover_after: float) -> Claim:
        """Make one partition this process's own: whoever had it cannot commit any more.

        Waits for a batch of it that is open, as long as its process shows life; after `takeover_after` seconds without, its session is
        ended.

        Raises:
            Fenced: a newer epoch was taken. StillHeld: the open batch takes longer than twice `takeover_after`.

        Crash: the number is raised or not; raised, nobody commits for the partition until the next claim.
        """
        with self._connection(f"Claiming {partition} for {consumer!r}") as connection:
            number = claim_partition(connection, self._sql, consumer, epoch, run_id, partition, takeover_after)
        return Claim(partition, number, run_id)

    def in_tasks(self) -> Self:
        """The same store for a process of tasks: of the filter of known keys it keeps what is stored, in a quarter of the memory."""
        store = copy.copy(self)
        store.filter_memory //= _OF_A_TASK
        store._of_a_task = True
        store._begin_anew()
        return store

    def room(self, consumer: str) -> int:
        """How many connections this role could have here for tasks, those of this consumer's tasks included."""
        with self._connection(f"Counting connections for {consumer!r}") as connection:
            return room_for_slices(connection, self._sql, consumer)

    def _register(self, connection: Connection, consumer: str, epoch: int, claim: Claim | None) -> None:
        """Put this session on record, so that whoever takes over, or claims the partition, knows which one to look for."""
        session, key = connection.info.backend_pid, (consumer, epoch, claim and claim.run_id)
        if self._registered.get(key) == session:
            return
        if claim is None:
            connection.execute(self._sql["register_session"], {"consumer": consumer, "epoch": epoch, **session_of(connection)})
        elif isinstance(claim, SliceClaim):
            enter_slice(connection, self._sql, consumer, epoch, Holder(*this_process(), claim.run_id))
        else:
            enter_epoch(connection, self._sql, consumer, epoch, Holder(*this_process(), claim.run_id))
        self._registered = {key: session}

    def crash_marker(self, consumer: str, scope: str = "") -> str | None:
        """What `set_crash_marker` kept last under this scope; None once a batch of it has been recorded."""
        with self._connection(f"Reading what {consumer!r} was trying") as connection:
            row = connection.execute(self._sql["crash_marker"], {"consumer": consumer, "scope": scope}).fetchone()
        return row[0] if row else None

    def crash_markers(self, consumer: str) -> dict[str, str]:
        """Scope -> what a slice has kept by `set_crash_marker`; it has not recorded a batch since."""
        with self._connection(f"Reading what {consumer!r} was trying") as connection:
            return dict(connection.execute(self._sql["crash_markers"], {"consumer": consumer, "note": OVER_BUDGET}).fetchall())

    def set_crash_marker(self, consumer: str, marker: str | None, scope: str = "") -> None:
        """Note what is about to be tried, outside any transaction.

        Crash: it outlives this process as soon as this returns; a crash of the server may forget it.
        """
        with self._connection(f"Noting what {consumer!r} is trying") as connection:
            connection.execute(self._sql["set_crash_marker"], {"consumer": consumer, "marker": marker, "scope": scope})

    def heartbeat(self, consumer: str, epoch: int, every: float, run_id: str = "") -> AbstractContextManager[None]:
        """While the block runs, show life every `every` seconds, on a connection of its own."""
        return beating(self.dsn, self._sql, consumer, epoch, every, run_id)


class PostgresStore(Reads, Joins, Deletes, PgTending, Upkeeps):
    """State and sinks in one PostgreSQL database (14 or newer). One transaction commits each chunk.

    Args:
        dsn: libpq connection string or URL. Leave the password to `~/.pgpass` or PGPASSWORD where you can; it is never shown.
        password: a function that returns the password, for tokens that expire. It is called for each new connection, also in Spark's
            tasks, to which it goes by pickle. What it raises counts as an outage.
        schema: the schema of dedup's tables. Sinks may be in any schema of the database.
        on_step: called with the name of each step right before it acts.
        auto_migrate: create or upgrade the tables at first use, if the role may. False: tables that are missing or old are SchemaOutdated.
        filter_memory: bytes of the filter of known keys, which spares large batches most look-ups; 0: no filter. It takes two to four bytes
            for a key of a packed table, less where they do not fit, and four to eight for another one. Each process of tasks takes a
            quarter. See docs/how-to/postgres.md.

    Raises:
        ConfigError: the DSN or the schema's name cannot be used.
    """

    steps: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "fence": _NOTHING,
            "redeliveries": _NOTHING,
            "reserve": _NOTHING,
            "handler": _NOTHING,
            "write": _NOTHING,
            "outbox": _NOTHING,
            "release": _NOTHING,
            "park": _NOTHING,
            "note": _NOTHING,
            "record": _NOTHING,
            "advance": _NOTHING,
            "commit": f"{_NOTHING}; once COMMIT is sent, {_IN_DOUBT}",
            "committed": "all of the chunk is true; delivered again, its positions are dropped as redeliveries",
        }
    )
    default_max_events: ClassVar[int] = 100_000

    def __init__(
        self,
        dsn: str,
        schema: str = "dedup",
        on_step: Callable[[str], None] = _no_step,
        auto_migrate: bool = True,
        filter_memory: int = 512 * 2**20,
        password: Callable[[], str] | None = None,
    ) -> None:
        given.check(POSTGRES_STORE, locals())
        dsn = dsn if password is None else DsnWithPassword(dsn, password)
        self.dsn, self.schema, self.on_step, self.auto_migrate = checked(dsn), checked_schema(schema), on_step, auto_migrate
        self.filter_memory = filter_memory
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._sql = Statements(self.schema)
        self._pool = Pool(self.dsn)
        self.known_filter = KnownFilter(self._pool.fresh, self._sql, self.filter_memory, reads=not self._of_a_task)
        self._ready = False
        self._registered: dict[Any, int] = {}  # (consumer, epoch, run of a claim) -> session on record

    def __getstate__(self) -> dict[str, Any]:
        return {
            "dsn": self.dsn,
            "schema": self.schema,
            "on_step": self.on_step,
            "auto_migrate": self.auto_migrate,
            "filter_memory": self.filter_memory,
        }

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._begin_anew()

    def __repr__(self) -> str:
        return f"PostgresStore({redacted(self.dsn)!r}, schema={self.schema!r})"

    def migrate(self, *, dry_run: bool = False) -> list[str]:
        """Bring the tables to this library's version; returns the names of what was applied. Safe to call twice, and twice at once.

        Args:
            dry_run: change nothing; returns the names of what would be applied.

        Raises:
            StateTooNew: a newer library made the tables, and says that this one does not work on them.
            StoreError: another SQL was applied under the name of a migration.

        Crash: each migration is applied as a whole or not at all.
        """
        with self._pool.borrow() as connection:
            if dry_run:
                return sql.missing(connection, self.schema)
            applied = sql.migrate(connection, self.schema)
        self._ready = True
        return applied

    def migration_sql(self) -> str:
        """What `migrate` runs on an empty database, for a DBA to read and run."""
        return sql.migration_sql(self.schema)

    @contextmanager
    def _connection(self, doing: str) -> Iterator[Connection]:
        """A connection outside any transaction, with the tables known to be right; the driver's errors translated."""
        with self._pool.borrow() as connection, translating(doing):
            self._ensure(connection)
            yield connection

    def _ensure(self, connection: Connection) -> None:
        if not self._ready:
            sql.ensure(connection, self.schema, auto=self.auto_migrate)
            self._ready = True

    def take_epoch(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become the one instance that may commit; returns the new head.

        At once where the holder is provably gone (its database session, or its process on this host), with `force`, or for the same run;
        else after `takeover_after` seconds without a commit or heartbeat of it. A session of the older epoch that keeps its
        transaction open is ended.

        Args:
            on_wait: called about once a second with the seconds left and who holds it.

        Raises:
            StillHeld: the holder showed life for twice `takeover_after`, or its session cannot be ended from here.
            StoreRestored: the tables were restored, all of them or some.

        Crash: the epoch is raised or not; raised, the next instance finds this one gone and takes over at once.
        """
        patience = TakeoverWait(takeover_after, force, on_wait)
        with self._connection(f"Taking the epoch of {consumer!r}") as connection:
            number = take_epoch(connection, self._sql, consumer, holder, patience)
            self._registered[consumer, number, None] = connection.info.backend_pid
            found = state.read(connection, self._sql, consumer)
        assert found is not None
        return found.head

    def head(self, consumer: str) -> Head:
        """The state now, without any lock. Of a consumer that was deleted nothing but the epoch."""
        with self._connection(f"Reading the state of {consumer!r}") as connection:
            found = state.read(connection, self._sql, consumer)
            gone = None if found else state.one(connection, self._sql, "last_deletion", consumer=consumer)
        return found.head if found else Head(consumer, epoch=gone["epoch"] if gone else 0)

    @contextmanager
    def begin(self, consumer: str, epoch: int, claim: Claim | None = None) -> Iterator[PgTransaction]:
        """Open the transaction of one chunk.

        Args:
            claim: the partition of the chunk, where the epoch is shared; in a task its `SliceClaim`.

        Raises:
            Fenced: a newer epoch was taken. PartitionLost: another process claimed the partition.
            StoreRestored: the tables were restored, all of them or some. StoreUnavailable: no connection.

        Crash: without a commit nothing of the transaction is true, also when the process vanishes.
        """
        with self._pool.borrow() as connection:
            with translating(f"Beginning a batch of {consumer!r}"):
                self._ensure(connection)
                self._register(connection, consumer, epoch, claim)
                self.on_step("fence")
            lease: Lease | None = None
            try:
                with translating(f"Beginning a batch of {consumer!r}"):
                    found, attempt = begin_fenced(connection, self._sql, consumer, epoch, claim)
                lease = Lease(connection, attempt.xid)
                made = PgTransaction(connection, self._sql, found, attempt, self, lease)
                yield made
                if made.committed and made.closes:
                    with suppress(psycopg.Error):  # the batch is committed whatever comes of this, and the next one tries again
                        connection.execute(self._sql["close_reservations"], {})
            finally:
                _end(connection, lease)

    def fresh(self) -> AbstractContextManager[Connection]:
        """A new connection of its own, for use beside a transaction whose connection broke. Raises StoreUnavailable, psycopg.Error."""
        return self._pool.fresh()

    def epoch_now(self, consumer: str) -> Mapping[str, Any] | None:
        """The epoch and its holder as a new connection sees them; None where that cannot be known."""
        try:
            with self.fresh() as connection:
                return state.one(connection, self._sql, "epoch_now", consumer=consumer)
        except (psycopg.Error, StoreError):
            return None

    @contextmanager
    def begin_letters(self, consumer: str, *, positions: bool = False) -> Iterator[LettersTransaction]:
        """Open a transaction of letters. The stream goes on meanwhile, unless `positions` are decided: then it waits.

        Raises:
            ConfigError: there is no such consumer. StoreRestored: the tables were restored. StoreUnavailable: no connection.

        Crash: without a commit nothing of the transaction is true; its letters can be locked again at once.
        """
        with self._pool.borrow() as connection:
            lease: Lease | None = None
            try:
                with translating(f"Beginning with letters of {consumer!r}"):
                    self._ensure(connection)
                    found, attempt = transaction.begin(connection, self._sql, consumer, positions=positions)
                lease = Lease(connection, attempt.xid)
                yield LettersTransaction(connection, self._sql, found, attempt, self, lease)
            finally:
                _end(connection, lease)

    def amend(self, consumer: str, change: Callable[[Head], Head], *, by: str, reason: str) -> Head:
        """Replace the head by `change(head)`, between two batches; who and why is kept in consumer_action. Returns the new head.

        Raises:
            ConfigError: there is no such consumer.
            StoreRestored: the tables were restored, and the change does not begin a new generation.

        Crash: the change and its record are one transaction.
        """
        with self._connection(f"Changing the state of {consumer!r}") as connection, connection.transaction():
            return state.amend(connection, self._sql, consumer, change, by, reason)

    def accept_sink(
        self, consumer: str, sink: str, *, at: str | None = None, lost: bool = False, by: str, reason: str, dry_run: bool = False
    ) -> None:
        """Go on with the table that is under a sink's name now: it was dropped and created again, loaded, or renamed, on purpose.

        Args:
            at: for a Delta store; here a sink is found by its name.
            lost: as for a Delta store; here no decided row waits for its sink.
            dry_run: raise what the change would raise, and change nothing.

        Raises:
            ConfigError: the consumer has never written to that sink, there is no such consumer, or `at` is given.
            SinkMismatch: there is no table.

        Crash: it is accepted, with its record, or it is not.
        """
        sinks.refuse_address(at)
        with self._connection(f"Accepting a sink of {consumer!r}") as connection, connection.transaction():
            if not dry_run:
                state.amend(connection, self._sql, consumer, lambda head: head, by, reason)
            found = state.existing(connection, self._sql, consumer)
            sinks.accept(connection, self._sql, sink, sinks.Writer(found.id, found.head.generation, consumer), dry_run=dry_run)

    def publish(self, consumer: str) -> int:
        """Always 0: sinks commit with the decision."""
        return 0

    def scrub(self, consumer: str, *, dry_run: bool = False) -> list[Remains]:
        """Nothing is left to do here; returns where what was erased can still be found."""
        return remains(self.schema)

    def close(self) -> None:
        """Let go of connections: another instance may then take over at once. The store can be used again."""
        self.known_filter.close()
        self._pool.close()
        self._registered.clear()


def _end(connection: Connection, lease: Lease | None) -> None:
    """Roll back what was not committed, and undo what a handler did to the session: later batches must not see it."""
    if lease is not None:
        lease.over = True
    _leave(connection)
    if lease is not None and lease.used and not connection.closed:
        renew(connection)


def _leave(connection: Connection) -> None:
    """Roll back what was not committed, so that the connection is as good as new; one that cannot is closed."""
    try:
        if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
            connection.execute("rollback")
    except psycopg.Error:
        connection.close()
