"""One chunk on a real PostgreSQL: what is true after it, and what never is."""

from __future__ import annotations

import contextlib
import pickle

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint.errors import CommitConflict, ConfigError, Fenced, HandlerError, SinkMismatch, StoreError, StoreRestored
from checkpoint.head import Checkpoint
from checkpoint.position import Partition, Range, Ranges
from deadletter.store import Commit
from dedup.core.steps import Advance
from dedup.postgres import PostgresStore
from fixtures.variants import of_which
from kit.pg_help import ORDERS, chunk, epoch, finish, keys, record, rows
from kit.pg_run import run


@pytest.fixture
def store(postgres: str) -> PostgresStore:
    run(postgres, "create table sink (a int primary key, b text)")
    return PostgresStore(postgres)


def in_sink(postgres: str) -> list[int]:
    return [row[0] for row in run(postgres, "select a from sink order by a")]


def test_everything_of_a_chunk_is_true_after_its_commit(store: PostgresStore, postgres: str) -> None:
    """Sink rows, reservations, batch record and checkpoint appear together."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        assert tx.reserve(keys([1, 2])).num_rows == 0
        with tx.attempt():
            assert tx.write("sink", rows(a=[1, 2], b=["x", None])) == 2
        assert in_sink(postgres) == [] and store.head("shop").seq == 0
        finish(tx, 0, 1)
    head = store.head("shop")
    assert (head.seq, head.query_id, head.batch_id, head.settings) == (1, "q", 0, {"columns": "id"})
    assert head.checkpoints == {ORDERS: Checkpoint(1, "offset-1", None, "q")}
    assert in_sink(postgres) == [1, 2] and store.reserved("shop") == 2 and store.problems("shop") == []


def test_nothing_of_a_chunk_is_true_without_a_commit(store: PostgresStore, postgres: str) -> None:
    """Leaving the block without Commit, or by an exception, undoes all of it, and the next chunk begins clean."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        tx.reserve(keys([1]))
        tx.write("sink", rows(a=[1]))
    with pytest.raises(ZeroDivisionError), store.begin("shop", number) as tx:
        tx.reserve(keys([1]))
        tx.execute(record(0, 0))
        raise ZeroDivisionError
    assert in_sink(postgres) == [] and store.reserved("shop") == 0 and store.head("shop").seq == 0
    assert chunk(store, number, 1, 1) == 0


def test_known_keys_come_back_with_the_payload_they_were_reserved_with(store: PostgresStore) -> None:
    """A second reservation of a key returns the first one's payload hash, whatever the order of the keys."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        tx.reserve(keys(range(100), payload=-3))
        finish(tx, 0, 99)
    asked = keys(range(50, 150), payload=8)
    with store.begin("shop", number) as tx:
        known = tx.reserve(asked.take(list(reversed(range(100)))))
        assert sorted(known["key"].to_pylist()) == sorted(keys(range(50, 100))["key"].to_pylist())
        assert set(known["payload_hash"].to_pylist()) == {-3}
        assert tx.known(asked).num_rows == 100, "a reservation is known to its own transaction"
        assert tx.known(keys([]).slice(0)).num_rows == tx.reserve(keys([])).num_rows == 0


def test_keys_of_a_slice_are_read_from_its_own_place(store: PostgresStore) -> None:
    """A sliced Arrow table reserves its own rows and no others."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        tx.reserve(keys(range(10)).slice(4, 3))
        assert tx.known(keys(range(10)))["key"].to_pylist() == keys(range(10)).slice(4, 3)["key"].to_pylist()


def test_seen_positions_are_read_within_the_span(store: PostgresStore) -> None:
    """Ranges of all records of the partition, cut to what was asked; other partitions and incarnations do not count."""
    number = epoch(store)
    chunk(store, number, 0, 9)
    chunk(store, number, 20, 29, batch_id=1)
    other = Partition("broker", "orders", 1)
    with store.begin("shop", number) as tx:
        assert tx.seen({ORDERS: (5, 24), other: (0, 100), Partition("", "new", 0): (1, 2)}) == {
            ORDERS: Ranges.of((Range(5, 9), Range(20, 24))),
            other: Ranges(),
            Partition("", "new", 0): Ranges(),
        }


def test_a_checkpoint_that_moved_is_a_conflict(store: PostgresStore, postgres: str) -> None:
    """A checkpoint that another transaction has added since the head was read is never overwritten."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        tx.execute(record(5, 9))
        run(postgres, "insert into dedup.topic (consumer_id, source, topic) values (1, 'broker', 'late')")
        run(
            postgres,
            "insert into dedup.checkpoint (consumer_id, topic_id, partition, sequence_number) select 1, max(id), 0, 3 from dedup.topic",
        )
        with pytest.raises(CommitConflict, match="late"):
            tx.execute(Advance({Partition("broker", "late", 0): Checkpoint(9)}))


def test_an_older_epoch_is_fenced_and_told_by_whom(store: PostgresStore) -> None:
    """The error names the epoch that took over, its host and process."""
    old = epoch(store)
    new = epoch(store)
    with pytest.raises(Fenced, match=rf"epoch {old} .* epoch {new} \(host .*, process \d+\) at \d{{4}}-"), store.begin("shop", old):
        pass
    with pytest.raises(StoreRestored, match="accept-restore"), store.begin("shop", new + 1):
        pass


def test_an_attempt_that_raises_leaves_nothing_and_the_transaction_goes_on(store: PostgresStore, postgres: str) -> None:
    """Only what the failed attempt wrote vanishes; the handler's exception comes out as it is."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        tx.reserve(keys([1]))
        with pytest.raises(psycopg.errors.DivisionByZero), tx.attempt():
            tx.write("sink", rows(a=[1]))
            tx.connection.execute("select 1 / 0")
        with tx.attempt():
            tx.write("sink", rows(a=[2]))
        finish(tx, 0, 0)
    assert in_sink(postgres) == [2] and store.reserved("shop") == 1


def test_deferred_constraints_are_judged_at_the_end_of_each_attempt(store: PostgresStore, postgres: str) -> None:
    """A violation is found where it can be undone, and every attempt may defer anew."""
    run(postgres, "create table child (parent int references sink (a) deferrable initially deferred)")
    number = epoch(store)
    with store.begin("shop", number) as tx:
        for a in (1, 2):
            with tx.attempt():
                tx.write("child", rows(parent=[a]))
                tx.write("sink", rows(a=[a]))
        with pytest.raises(SinkMismatch, match="child_parent_fkey"), tx.attempt():
            tx.write("child", rows(parent=[9]))
        finish(tx, 0, 0, reserved=0)
    assert run(postgres, "select parent from child order by 1") == [(1,), (2,)]


@pytest.mark.parametrize("state", ["40001", "40P01"])
def test_errors_that_no_savepoint_survives_are_not_the_handlers(store: PostgresStore, state: str) -> None:
    """Serialization failures and deadlocks inside the handler ask for a new transaction."""
    number = epoch(store)
    raising = f"do $$ begin raise exception 'later' using errcode = '{state}'; end $$"
    with pytest.raises(CommitConflict, match="plan it again"), store.begin("shop", number) as tx, tx.attempt():
        tx.connection.execute(raising)


def test_statements_that_only_look_like_transaction_control_pass(store: PostgresStore, postgres: str) -> None:
    """Words in literals, quoted names and savepoints are the handler's own business."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        tx.connection.execute("insert into sink values (1, '; commit'), (2, $$; rollback$$)")
        for statement in ('create temp table t ("; commit" int)', "savepoint mine", "rollback to savepoint mine"):
            tx.connection.execute(statement)
        with pytest.raises(ZeroDivisionError), tx.connection.transaction():
            tx.connection.execute("insert into sink values (%s)", [3])
            raise ZeroDivisionError
        finish(tx, 0, 0, reserved=0)
    assert in_sink(postgres) == [1, 2]


def test_the_connection_offers_no_other_way_to_end_the_transaction(store: PostgresStore) -> None:
    """commit, rollback, close and autocommit are refused by name."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        for name in ("commit", "rollback", "close", "autocommit"):
            with pytest.raises(HandlerError):
                getattr(tx.connection, name)
        with pytest.raises(AttributeError):
            tx.connection.autocommit = True
        assert tx.connection.execute("select current_setting('transaction_isolation')").fetchone() == ("read committed",)


@pytest.mark.parametrize("text", of_which(2, ["commit", "rollback; begin; savepoint dedup_attempt", "rollback", "rollback; begin"]))
def test_a_transaction_that_somebody_else_ended_is_noticed(store: PostgresStore, postgres: str, text: str) -> None:
    """On the raw connection nothing can be refused but the COMMIT; then the checkpoint does not move, and nothing of ours is there."""
    number = epoch(store)
    for inside in (True, False):
        with pytest.raises(HandlerError, match="ended the transaction"), store.begin("shop", number) as tx:
            tx.reserve(keys([1]))
            with tx.attempt() if inside else contextlib.nullcontext(), contextlib.suppress(psycopg.Error):
                tx._connection.execute(text)
            finish(tx, 0, 0)
    assert store.head("shop").checkpoints == {} and run(postgres, "select count(*) from dedup.reservation") == [(0,)]


def test_a_swallowed_error_is_no_commit(store: PostgresStore) -> None:
    """After a failed statement PostgreSQL answers COMMIT by a rollback: that must not pass for a commit."""
    number = epoch(store)
    with pytest.raises(StoreError, match="went on after an error"), store.begin("shop", number) as tx:
        with pytest.raises(psycopg.Error):
            tx.connection.execute("select 1 / 0")
        tx.execute(Commit())
    assert store.head("shop").seq == 0


def test_commits_that_are_not_durable_are_refused(store: PostgresStore, postgres: str) -> None:
    """synchronous_commit=off or no triggers, by the role or the DSN, is an error that says what to set; what a handler sets ends."""
    number = epoch(store)
    untriggered = PostgresStore(make_conninfo(postgres, options="-c session_replication_role=replica"))
    with pytest.raises(ConfigError, match="RESET session_replication_role"), untriggered.begin("shop", number):
        pytest.fail("no trigger would guard the commit")
    lazy = PostgresStore(make_conninfo(postgres, options="-c synchronous_commit=off"))
    with pytest.raises(ConfigError, match="synchronous_commit = on"), lazy.begin("shop", number):
        pass
    with store.begin("shop", number) as tx:
        with tx.attempt():
            tx.connection.execute("set local synchronous_commit = off")
        tx.execute(record(0, 0))
        assert tx._connection.execute("show synchronous_commit").fetchone() == ("on",)
        tx.execute(Commit())
    lazy.close()


def test_a_store_travels_without_its_connections_and_never_shows_a_password(postgres: str) -> None:
    """pickle and repr."""
    secret = make_conninfo(postgres, password="hush-hush")
    store = PostgresStore(secret, schema="other")
    assert store.consumers() == []
    copy = pickle.loads(pickle.dumps(store))
    assert copy.consumers() == [] and copy.schema == "other"
    assert "hush" not in repr(store) and "***" in repr(store)
    for wrong in ("postgresql://u:hush@[", "host=x password='hush", "postgresql://u:TOP@hush@host:1/shop"):
        with pytest.raises(ConfigError) as raised:
            PostgresStore(wrong)
        assert "hush" not in str(raised.value)


def test_a_person_decides_between_two_batches_and_is_recorded(store: PostgresStore, postgres: str) -> None:
    """amend replaces the head; who, why, before and after are kept."""
    number = epoch(store)
    chunk(store, number, 0, 9)
    from checkpoint import changes

    head = store.amend("shop", lambda h: changes.accept_incarnation(h, "broker", "orders"), by="ann", reason="hub re-created")
    assert head.incarnations == {("broker", "orders"): 1} and head.checkpoints == {} and head.seq == 2
    with store.begin("shop", number) as tx:
        assert tx.seen({ORDERS: (0, 9)}) == {ORDERS: Ranges()}, "records of the old life do not apply"
    head = store.amend("shop", changes.reset, by="bob", reason="start over")
    assert (head.generation, head.keyspace, head.query_id) == (1, 1, None)
    told = run(postgres, "select by, reason, before -> 'checkpoints' from dedup.consumer_action order by id")
    assert told == [("ann", "hub re-created", {"broker/orders/0": 9}), ("bob", "start over", {})]
    with pytest.raises(ConfigError, match="no consumer 'nobody'"):
        store.amend("nobody", changes.reset, by="x", reason="y")


def test_consumers_are_sorted_and_apart(store: PostgresStore) -> None:
    """Names with any characters; one consumer's positions are not another one's."""
    names = ["b", '"; drop table consumer; --', "ä%s", "a"]
    for name in names:
        chunk(store, epoch(store, name), 0, 0, consumer=name)
    assert store.consumers() == sorted(names)
    assert store.batches("a").num_rows == 1 and store.reserved("a") is None


def test_records_and_letters_come_back_as_they_were_written(store: PostgresStore) -> None:
    """Types and values of BATCHES survive."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        finish(tx, 3, 12)
    kept = store.batches("shop")
    assert kept.select(record(3, 12).batches.column_names).to_pylist() == record(3, 12).batches.to_pylist()
    assert kept["epoch"].to_pylist() == [number] and kept["seq"].to_pylist() == [1]
    assert pa.types.is_timestamp(kept.schema.field("committed_at").type)
