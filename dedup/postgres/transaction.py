"""One chunk, or some letters, as one database transaction. Without a commit nothing of it is true.

The transaction of a chunk is READ COMMITTED, durable and fenced by its epoch; the pipeline opens it by `PostgresStore.begin`. The
transaction of letters takes no epoch and stalls no stream; it is fenced only against a reset. Reprocess, discard and the like open it by
`PostgresStore.begin_letters`. The statements are in sql/postgres/queries.sql, each with the rule that keeps it correct.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import psycopg
import pyarrow as pa
from psycopg.pq import TransactionStatus

from checkpoint.errors import ConfigError, Fenced, HandlerError, StoreUnavailable
from checkpoint.head import Head
from checkpoint.position import Partition, Range, Ranges
from checkpoint.postgres.connection import Connection, ends_transaction, is_lost, translate
from checkpoint.postgres.sql import Statements
from deadletter.store import KEYS, Change, Commit, Erase, Free, Note, Park
from dedup.core.messages import Messages
from dedup.core.rows import Rows
from dedup.core.steps import Advance, Merge, Record, Step
from dedup.core.store import Meanwhile
from dedup.postgres import commit, letters, merges, outbox, sinks, state
from dedup.postgres.commit import Attempt
from dedup.postgres.connection import ENDED, HandlerConnection, Lease
from dedup.postgres.epoch import check_epoch, open_guarded, own_settings, refuse_lazy_commit
from dedup.postgres.keys import Probe, begin_probe, look_up, reserve_probed, some_new

_RUNNING = (
    "A statement of the handler still runs on tx.connection, in another thread perhaps. Nothing of this batch is committed. End all "
    "statements before the handler returns."
)

_SWALLOWED = (
    "The handler went on after an error of tx.connection, and the database takes nothing any more until that is undone. "
    "Let the error through, or make the part that may fail a savepoint: `with tx.connection.transaction():`. A `cursor.stream()` that is "
    "left before its end cancels its query, which is such an error: read it to its end, or ask for fewer rows."
)


class PgTransaction:
    """What `PostgresStore.begin` yields."""

    def __init__(
        self, connection: Connection, sql: Statements, found: state.ConsumerState, attempt: Attempt, store: Any, lease: Lease
    ) -> None:
        self.head: Head = found.head
        self._connection, self._sql, self._state, self._attempt = connection, sql, found, attempt
        self._store = store  # for on_step, and for a second connection when an answer is lost
        self._lease = lease
        self._seq: int | None = None
        self._asked: Probe | None = None
        self._reserved: tuple[int, list[bytes]] | None = None  # table of reservations, some of the keys that are new there
        self._parked: set[bytes] = set()
        self.committed = False
        self.closes = False  # a table of reservations is closing

    @property
    def connection(self) -> HandlerConnection:
        """The handler's view of this transaction's connection. Raises HandlerError once the handler's attempt has ended."""
        return HandlerConnection(self._connection, self._lease)

    @contextmanager
    def _our_statements(self, doing: str, *, anew: bool = True) -> Iterator[None]:
        """Under our own settings, and with the driver's errors translated; a lost connection is a takeover where a newer epoch exists.

        Args:
            anew: not for rows of the user's tables, for which sinks.py keeps what a handler has set.
        """
        try:
            if anew:
                self._set_our_settings()
            yield
        except psycopg.Error as error:
            if is_lost(error) or self._connection.closed:
                self._refuse_fenced(error)
            raise translate(error, f"Consumer {self.head.consumer!r}, {doing}") from error

    def _set_our_settings(self) -> None:
        """Undo what a handler has set: our own statements must not depend on it."""
        if self._lease.changed and self._connection.info.transaction_status == TransactionStatus.INTRANS:
            self._connection.execute(own_settings(self._sql, anew=True))
            self._lease.changed = False

    def _refuse_fenced(self, cause: BaseException) -> None:
        row = self._store.epoch_now(self.head.consumer)
        if row is not None and row["epoch"] > self.head.epoch:
            try:
                check_epoch(self.head.consumer, self.head.epoch, row)
            except Fenced as fenced:
                raise fenced from cause

    def seen(self, spans: Mapping[Partition, tuple[int, int]]) -> dict[Partition, Ranges]:
        """Positions in [first, last] that batch records of this generation's incarnations hold as seen, since the last reset."""
        topics = self._state.topics
        known = [p for p in spans if (p.source, p.topic) in topics]
        if not known:
            return {}
        lives = [self.head.incarnations.get((p.source, p.topic), 0) for p in known]
        asked = {
            "topics": [topics[p.source, p.topic] for p in known],
            "incarnations": lives,
            "partitions": [p.partition for p in known],
            "firsts": [spans[p][0] for p in known],
            "lasts": [spans[p][1] for p in known],
        }
        found: dict[Partition, list[Range]] = {p: [] for p in spans}
        with self._our_statements("reading the batch records"):
            rows = self._connection.execute(self._sql["seen"], {"id": self._state.id, "keyspace": self.head.keyspace, **asked})
            for number, first, last in rows:
                found[known[number - 1]].append(Range(first, last))
        return {p: Ranges.of(items) for p, items in found.items()}

    def known(self, keys: pa.Table) -> pa.Table:
        """Those of these distinct keys (KEYS) that are reserved or held by a letter, with their payload hash."""
        with self._our_statements("looking keys up"):
            return look_up(self._connection, self._sql, self._attempt.phase, keys)

    def ask(self, keys: pa.Array) -> None:
        """Begin to look up these keys, distinct; until `reserve` has taken the answer the connection is busy."""
        if len(keys):
            with self._our_statements("looking keys up"):
                self._asked = self._probe(keys)

    def _probe(self, keys: pa.Array) -> Probe:
        return begin_probe(self._connection, self._sql, self._attempt.phase, keys, self._store.known_filter)

    def reserve(self, keys: pa.Table, meanwhile: Meanwhile | None = None) -> pa.Table:
        """Reserve the new ones of these distinct keys; returns the known ones. Waits for another transaction that holds one of them.

        Args:
            meanwhile: called with the keys known so far, while the server takes the others.

        Crash: before the commit nothing is reserved.
        """
        if not keys.num_rows:
            return KEYS.empty_table()
        with self._our_statements("reserving keys"):
            asked = self._asked or self._probe(keys["key"])
            self._asked = None
            known = reserve_probed(self._connection, self._sql, asked, keys, meanwhile)
        self._reserved = asked.tables.current.id, some_new(keys, known)
        self.closes = asked.tables.current.closing is not None
        return known

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What is written inside vanishes if the block raises; the transaction goes on.

        Deferred constraints are checked at the end of the block, where a failure can still be undone, and stay deferred for the next one.

        Raises:
            HandlerError: the block ended the transaction.
            StoreUnavailable, CommitConflict: an error after which only a new transaction can go on, whatever the block did with it.
            Whatever else the block raised, as it is.

        Crash: nothing of the block is true before the commit.
        """
        with self._our_statements("beginning an attempt"):
            self._connection.execute("savepoint dedup_attempt")
        try:
            with self._lease.lent():
                yield
            self._refuse_fatal()
            self._store.on_step("release")
            self._release()
        except psycopg.Error as error:
            self._refuse_fatal()
            if ends_transaction(error) or self._connection.closed:
                self._restart(error)
            self._undo_attempt()
            raise
        except Exception:
            self._refuse_fatal()
            self._undo_attempt()
            raise

    def _refuse_fatal(self) -> None:
        """Raise for an error that the handler has seen, and after which only a new transaction can go on."""
        if self._lease.fatal is not None:
            self._restart(self._lease.fatal)

    def _restart(self, error: psycopg.Error) -> NoReturn:
        self._refuse_fenced(error)
        raise translate(error, f"Consumer {self.head.consumer!r}, in the handler") from error

    def _release(self) -> None:
        self._refuse_ended()
        try:
            self._connection.execute("savepoint dedup_constraints")
            self._allow_commit()
            self._connection.execute("set constraints all immediate")
            # Back to how they were: the next attempt may need them deferred. The commit checks them once more.
            self._connection.execute("rollback to savepoint dedup_constraints")
            self._connection.execute("release savepoint dedup_attempt")
        except psycopg.errors.InvalidSavepointSpecification as error:
            raise HandlerError(ENDED) from error
        except psycopg.IntegrityError as error:
            raise sinks.refused("A deferred constraint", error) from error

    def _allow_commit(self) -> dict[str, Any]:
        """Name the token that the guard asks for."""
        found = state.one(self._connection, self._sql, "transaction_check", token=str(self._attempt.id))
        assert found is not None
        if found["xid"] != self._attempt.xid:
            raise HandlerError(ENDED)
        return found

    def _undo_attempt(self) -> None:
        if self._lease.ended or self._connection.info.transaction_status == TransactionStatus.IDLE:
            raise HandlerError(ENDED)
        if self._connection.info.transaction_status == TransactionStatus.ACTIVE:
            self._connection.close()  # nothing can be undone here: all of the transaction is
            raise HandlerError(_RUNNING)
        if self._connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            try:
                self._connection.execute("rollback to savepoint dedup_attempt")
                self._connection.execute("release savepoint dedup_attempt")
            except psycopg.errors.InvalidSavepointSpecification as error:
                raise HandlerError(ENDED) from error
            except psycopg.Error as error:
                raise translate(error, f"Consumer {self.head.consumer!r}, undoing an attempt") from error

    def _refuse_ended(self) -> None:
        if self._lease.ended or self._connection.info.transaction_status == TransactionStatus.IDLE:
            raise HandlerError(ENDED)
        if self._connection.info.transaction_status == TransactionStatus.ACTIVE:
            raise HandlerError(_RUNNING)
        if self._connection.info.transaction_status == TransactionStatus.INERROR:
            raise psycopg.errors.InFailedSqlTransaction(_SWALLOWED)

    def write(self, table: str, rows: Rows) -> int:
        """Append rows to a sink as part of this transaction. Raises SinkMismatch; then nothing of them is kept.

        Crash: undone with the transaction.
        """
        self._refuse_ended()
        self._store.on_step("write")
        with self._our_statements(f"writing to {table!r}", anew=False):
            return merges.append(self._connection, self._sql, table, rows, self._writer())

    def apart(self, tables: Collection[str]) -> bool:
        """Whether these are different tables without triggers, rules and foreign keys, as the handler's session finds them."""
        self._refuse_ended()
        with self._our_statements("looking at sinks", anew=False):
            try:
                with self._connection.transaction():
                    row = self._connection.execute(self._sql["sinks_apart"], {"tables": list(tables)}).fetchone()
            except (psycopg.errors.SyntaxError, psycopg.errors.InvalidName, psycopg.errors.FeatureNotSupported):
                return False  # `write` tells what is wrong with the name
        return bool(row and row[0])

    def lock(self, ids: Sequence[str]) -> pa.Table:
        """LETTERS + duplicates of those of these letters that nobody else is at work on, in position order. Never waits."""
        with self._our_statements("locking dead letters"):
            return letters.locked(self._connection, self._sql, ids)

    def blocked(self, sequences: pa.Array) -> pa.Table:
        """SEQUENCES of those that are blocked. Waits for whoever is about to release one."""
        with self._our_statements("asking what blocks"):
            return letters.blocked(self._connection, self._sql, sequences)

    def merge(self, table: str, rows: Rows, merge: Merge) -> int:
        """Insert, update or delete by key. Raises SinkMismatch; then nothing of the rows is kept.

        Crash: undone with the transaction.
        """
        self._refuse_ended()
        self._store.on_step("write")
        with self._our_statements(f"merging into {table!r}", anew=False):
            return merges.merge(self._connection, self._sql, table, rows, merge, self._writer())

    def _writer(self) -> sinks.Writer:
        return sinks.Writer(self._state.id, self.head.generation, self.head.consumer, self._lease.changed)

    def enqueue(self, messages: Messages) -> None:
        """Store messages to send as part of this transaction.

        Crash: undone with the transaction.
        """
        self._refuse_ended()
        self._store.on_step("outbox")
        with self._our_statements(f"storing messages to {messages.topic!r}"):
            outbox.enqueue(self._connection, self._sql, self._state.id, messages)

    def execute(self, step: Step) -> None:
        """Do one step of the decision.

        Crash: before Commit has reached the server nothing is true; after it, all is. In between the next run reads it from the tables.
        """
        doing: dict[type[Any], Callable[[Any], None]] = {
            Park: lambda s: self._park(s),
            Change: lambda s: letters.change(self._connection, self._sql, s, self.head.consumer),
            Free: lambda s: letters.free(self._connection, self._sql, s),
            Note: lambda s: letters.note(self._connection, self._sql, s),
            Erase: lambda s: letters.erase(self._connection, self._sql, s),
            Record: lambda s: self._record(s),
            Advance: lambda s: commit.advance(self._connection, self._sql, self._state, s),
            Commit: lambda s: self._commit(),
        }
        with self._our_statements(step.name):
            self._refuse_ended()
            doing[type(step)](step)

    def _park(self, step: Park) -> None:
        letters.park(self._connection, self._sql, step, self.head.consumer)
        self._parked.update(step.letters["key"].drop_null().to_pylist())

    def _record(self, step: Record) -> None:
        seq = self._decision(recorded=step.batches.num_rows > 0)
        commit.record(self._connection, self._sql, self._state, step, seq, self._attempt.id)

    def _decision(self, *, recorded: bool = False) -> int:
        if self._seq is None:
            self._seq = commit.bump(self._connection, self._sql, self._state, self._attempt.id, self._left(recorded))
        return self._seq

    def _left(self, recorded: bool) -> commit.Left:
        """With a key that no letter holds: people free those of letters."""
        table, keys = self._reserved or (None, [])
        key = next((k for k in keys if k not in self._parked), None)
        return commit.Left(recorded, key, table if key else None)

    def _number(self) -> None:
        """A batch is a decision, with a record or without."""
        self._decision()

    def _commit(self) -> None:
        self._number()
        refuse_lazy_commit(self._allow_commit()["synchronous_commit"])
        try:
            answer = self._connection.execute("commit").statusmessage
        except psycopg.IntegrityError as error:
            raise sinks.refused("A deferred constraint", error) from error
        except psycopg.Error as error:
            if not (is_lost(error) or self._connection.closed):
                raise
            self._resolve_unknown_commit(error)
            answer = "COMMIT"
        if answer != "COMMIT":
            raise HandlerError(
                "A statement of the handler failed and its error was swallowed: PostgreSQL rolled the transaction back. Let it raise."
            )
        self.committed = True
        self._store.on_step("committed")

    def _resolve_unknown_commit(self, error: psycopg.Error) -> None:
        try:
            commit.resolve_unknown_commit(self._store, self._sql, self._state, self._attempt, error)
        except StoreUnavailable:
            self._refuse_fenced(error)
            raise


def begin(connection: Connection, sql: Statements, consumer: str, *, positions: bool) -> tuple[state.ConsumerState, Attempt]:
    """Open the transaction and read the head. Raises ConfigError for a consumer that does not exist, StoreRestored, psycopg.Error.

    Args:
        positions: lock the checkpoints, too, as a batch does: the stream waits from here to the end.

    Crash: nothing of it is true, and its locks end with the session.
    """
    attempt = open_guarded(connection, sql)
    row = state.one(connection, sql, "fence_letters", consumer=consumer)
    if row is not None:
        state.refuse_restored(consumer, row["restored"])
    if row is not None and positions:
        connection.execute(sql["lock_claims"], {"id": row["id"]})
        connection.execute(sql["lock_checkpoints"], {"id": row["id"]})
    found = state.read(connection, sql, consumer) if row else None
    if found is None:
        raise ConfigError(f"There is no consumer {consumer!r} here. `dedup consumer list` shows the names.")
    state.refuse_deleted(consumer, found.deleted_by)  # read after the lock was granted: a deletion may have held it
    return found, attempt


class LettersTransaction(PgTransaction):
    """What `PostgresStore.begin_letters` yields."""

    def _number(self) -> None:
        """Letters alone are no decision about positions: the sequence number of decisions stays."""

    def _refuse_fenced(self, cause: BaseException) -> None:
        """A takeover does not concern letters."""

    def _resolve_unknown_commit(self, error: psycopg.Error) -> None:
        commit.resolve_unknown_commit(self._store, self._sql, self._state, self._attempt, error, commit.ask_server)
