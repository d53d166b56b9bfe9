"""Deliberate breaks of the protocol: one piece of text for another, and the test that has to notice. Applied by mutants.py."""

from __future__ import annotations

from kit.mutant import Mutant
from kit.mutant_patches_delta import DELTA
from kit.mutant_patches_letters import LETTERS
from kit.mutant_patches_packing import PACKING

_RETENTION = "tests/stores/postgres/test_postgres_retention.py::"
_TX, _QUERIES = "dedup/postgres/transaction.py", "sql/postgres/queries.sql"
_RESTORED = "tests/stores/postgres/test_postgres_restored.py::"
_PG, _COMMIT, _TAKEOVER = (
    "tests/stores/postgres/test_postgres_store.py::",
    "tests/stores/postgres/test_postgres_commit.py::",
    "tests/stores/postgres/test_postgres_takeover.py::",
)
_PLAN = "tests/unit/test_planning.py::"
_DELIVERY, _GUARDS, _JOIN = "tests/contract/test_delivery.py::", "tests/contract/test_guards.py::", "tests/contract/test_join.py::"
_HELD = "    union all\n    {held}\n"
_GUARD = _PLAN + "test_the_guard_refuses_exactly_what_contradicts_the_state"
_BEHIND = "tests/contract/test_purge_bound.py::"
_BOUND = _BEHIND + "test_a_duplicate_that_the_log_still_holds_is_known_after_a_purge"
_GUARDED = "tests/stores/postgres/test_postgres_guard.py::"
_SLICES = "tests/crash/test_slices.py::"
_KEPT = "tests/stores/postgres/test_slices_kept.py::"

MUTANTS = (
    # planning and decision: both stores
    Mutant(
        "a newer library's tables are worked on, whatever they say",
        "checkpoint/postgres/sql.py",
        "    if needed > latest_version():\n",
        "    if False:\n",
        "tests/stores/postgres/test_postgres_versions.py::test_a_newer_schema_that_does_not_say_so_is_refused",
    ),
    Mutant(
        "a change of letters is a row of their table",
        "sql/postgres/0003_dead_letters.sql",
        "    changes letter_change[];",
        "    changes letter_count[];",
        "tests/stores/postgres/test_postgres_versions.py::test_an_instance_goes_on_while_another_version_migrates_and_takes_over",
    ),
    Mutant(
        "what a purge took compares >= for >",
        "dedup/core/planning.py",
        "due[rows] &= index.numbers[rows] > head.floors.get(",
        "due[rows] &= index.numbers[rows] >= head.floors.get(",
        _PLAN + "test_a_purged_position_is_not_suspected",
    ),
    Mutant(
        "redeliveries are looked for only where there is a checkpoint",
        "dedup/pipeline/commit.py",
        "transaction.seen(chunk.index.spans)",
        "transaction.seen({p: span for p, span in chunk.index.spans.items() if p in head.checkpoints})",
        "tests/stores/postgres/test_postgres_restored.py::test_what_an_older_checkpoint_does_not_know_is_a_redelivery",
    ),
    Mutant(
        "a query past its first batch begins on an empty store",
        "checkpoint/guards.py",
        "and _begins(head) and not head.gap_accepted:",
        "and False:",
        _GUARDS + "test_a_query_that_is_further_than_an_empty_store_is_refused",
    ),
    Mutant(
        "redeliveries count as new",
        "dedup/core/planning.py",
        "state[rows[known]] = REDELIVERED",
        "pass",
        _DELIVERY + "test_a_replayed_batch_changes_nothing",
    ),
    Mutant(
        "of one key in a batch the last position wins",
        "dedup/core/planning.py",
        "is_first[first[at < 0]] = True",
        "is_first[rows[::-1][np.unique(group[::-1], return_index=True)[1]][at < 0]] = True",
        _DELIVERY + "test_a_duplicate_in_one_batch_is_dropped_and_the_first_position_wins",
    ),
    Mutant(
        "the payload of a known key is not compared",
        "dedup/core/planning.py",
        "conflict = duplicates & (index.payload[rows] != reference[group])",
        "conflict = duplicates & (index.payload[rows] != index.payload[rows])",
        _DELIVERY + "test_a_key_with_another_body_is_a_conflict",
    ),
    Mutant(
        "a restored store is not noticed",
        "checkpoint/guards.py",
        "run.batch_id > ours + head.batch_ended",
        "run.batch_id > ours + 2",
        _GUARD,
    ),
    Mutant(
        "half a batch passes for a batch",
        "checkpoint/guards.py",
        "run.batch_id > ours + head.batch_ended",
        "run.batch_id > ours + 1",
        _GUARDS + "test_a_store_restored_to_the_middle_of_a_batch_is_noticed",
    ),
    Mutant(
        "after an accepted restore the old query goes on where it was",
        "checkpoint/changes.py",
        'replace(point, query_id="") for p, point',
        "point for p, point",
        _GUARDS + "test_the_old_query_cannot_leave_out_what_a_restore_lost",
    ),
    Mutant(
        "a query that the state does not know goes on",
        "checkpoint/guards.py",
        "if _is_stranger(head, run) and not head.gap_accepted:",
        "if False:",
        _GUARDS + "test_the_old_query_cannot_leave_out_what_a_restore_lost",
    ),
    Mutant(
        "a gap of one position is let through",
        "checkpoint/guards.py",
        "first <= point.sequence_number + 1:",
        "first <= point.sequence_number + 2:",
        _GUARD,
    ),
    Mutant(
        "the checkpoint goes past an undecided position",
        "dedup/pipeline/commit.py",
        "p: Checkpoint(int(settled.index.numbers[row]),",
        "p: Checkpoint(int(settled.index.numbers[row]) + 1,",
        _DELIVERY + "test_a_batch_is_written_once_and_accounted_for",
    ),
    Mutant(
        "the checkpoint goes backwards",
        "dedup/core/decision.py",
        "mark.sequence_number > point.sequence_number",
        "mark.sequence_number != point.sequence_number",
        _DELIVERY + "test_a_late_event_is_handled_as_new",
    ),
    Mutant(
        "commit before the batch record",
        "dedup/core/decision.py",
        "return (*steps, Commit())",
        "return (Commit(), *steps)",
        _DELIVERY + "test_a_batch_is_written_once_and_accounted_for",
    ),
    Mutant(
        "a re-created topic passes for redeliveries",
        "dedup/core/planning.py",
        "return replayed[~explained]",
        "return replayed[:0]",
        _GUARDS + "test_a_recreated_topic_is_refused_and_accepted",
    ),
    Mutant(
        "keys of before a reset go on to count",
        "dedup/pipeline/commit.py",
        "keyspace=head.keyspace,",
        "keyspace=0,",
        _GUARDS + "test_after_a_reset_the_same_events_are_new_in_any_order",
    ),
    *LETTERS,
    # PostgreSQL
    Mutant(
        "skip the fence",
        "dedup/postgres/epoch.py",
        'if row["epoch"] > epoch:',
        "if False:",
        _PG + "test_an_older_epoch_is_fenced_and_told_by_whom",
    ),
    Mutant(
        "the claim of a partition is not compared",
        "dedup/postgres/epoch.py",
        "row[0] != claim.number",
        "False",
        _JOIN + "test_a_lost_partition_cannot_commit",
    ),
    Mutant(
        "commits that are not durable are taken",
        "dedup/postgres/epoch.py",
        'if setting == "off":',
        'if setting == "none":',
        _PG + "test_commits_that_are_not_durable_are_refused",
    ),
    Mutant(
        "forget the read-back: a lost answer means committed",
        "dedup/postgres/commit.py",
        "committed = (ask or ask_tables)(store, sql, state, attempt)",
        "committed = True",
        _COMMIT + "test_a_commit_that_never_arrived_is_read_back_as_not_committed",
    ),
    Mutant(
        "forget the read-back: a lost answer means not committed",
        "dedup/postgres/commit.py",
        "committed = (ask or ask_tables)(store, sql, state, attempt)",
        "committed = False",
        _COMMIT + "test_a_commit_whose_answer_was_lost_is_read_back_as_committed",
    ),
    Mutant(
        "a session that may still commit is not ended",
        "dedup/postgres/commit.py",
        "        _wait_for_end(connection, sql, state, attempt)\n",
        "",
        _COMMIT + "test_a_session_that_might_still_commit_is_ended_before_it_is_called_not_committed",
    ),
    Mutant(
        "checkpoints are not locked",
        _QUERIES,
        "select from {schema}.checkpoint where consumer_id = %(id)s order by topic_id, partition for update;",
        "select from {schema}.checkpoint where consumer_id = %(id)s order by topic_id, partition;",
        _COMMIT + "test_a_commit_in_doubt_is_waited_for_by_the_next_chunk",
    ),
    Mutant(
        "a loaded row passes for one that was written here",
        "sql/postgres/0008_restored.sql",
        "where p.written_by::xid <> p.xmin",
        "where false",
        _RESTORED + "test_a_schema_whose_data_was_restored_is_refused",
    ),
    Mutant(
        "tables that were restored are not looked for before an epoch is taken",
        "dedup/postgres/epoch.py",
        '        refuse_restored(consumer, row["restored"])\n',
        "",
        _RESTORED + "test_a_row_of_the_consumer_from_before_a_takeover_is_refused",
    ),
    Mutant(
        "a decision names no key that it reserved",
        _TX,
        "return commit.Left(recorded, key, table if key else None)",
        "return commit.Left(recorded)",
        _RESTORED + "test_a_table_that_was_restored_alone_is_refused",
    ),
    Mutant(
        "another table under a sink's name is written to",
        "dedup/postgres/sinks.py",
        "    elif before != oid:\n",
        "    elif False:\n",
        _RESTORED + "test_a_sink_that_was_loaded_from_a_dump_is_refused_and_accepted",
    ),
    Mutant(
        "a checkpoint that moved is no conflict",
        "dedup/postgres/commit.py",
        "**row, **expected}).fetchone() is None:",
        "**row, **expected}).fetchone() is False:",
        _PG + "test_a_checkpoint_that_moved_is_a_conflict",
    ),
    Mutant(
        "a failed attempt is not undone",
        _TX,
        'self._connection.execute("rollback to savepoint dedup_attempt")',
        "pass",
        _PG + "test_an_attempt_that_raises_leaves_nothing_and_the_transaction_goes_on",
    ),
    Mutant(
        "deferred constraints wait for the commit",
        _TX,
        'self._connection.execute("set constraints all immediate")',
        "pass",
        _PG + "test_deferred_constraints_are_judged_at_the_end_of_each_attempt",
    ),
    Mutant(
        "a commit of the handler is not noticed",
        _TX,
        'if found["xid"] != self._attempt.xid:',
        "if False:",
        _PG + "test_a_transaction_that_somebody_else_ended_is_noticed",
    ),
    Mutant(
        "the server lets a handler commit",
        "sql/postgres/0007_transaction_guard.sql",
        "if current_setting('dedup.commit', true) is not distinct from new.token::text then",
        "if true then",
        _GUARDED + "test_whatever_a_handler_ends_its_transaction_with_nothing_of_the_batch_is_true",
    ),
    Mutant(
        "the guard is asked once",
        "sql/postgres/0007_transaction_guard.sql",
        "    insert into open_transaction (token) values (new.token) returning xmin, ctid into writer, place;\n",
        "    select null into writer, place;\n",
        _GUARDED + "test_a_handler_may_ask_for_its_deferred_constraints_and_still_cannot_commit",
    ),
    Mutant(
        "one text of a handler may hold several statements",
        "dedup/postgres/connection.py",
        "force_extended=True, binary=binary",
        "force_extended=force_extended, binary=binary",
        _GUARDED + "test_whatever_a_handler_ends_its_transaction_with_nothing_of_the_batch_is_true",
    ),
    Mutant(
        "what the handler did not raise did not happen",
        _TX,
        "if self._lease.fatal is not None:",
        "if False:",
        "tests/contract/test_hostile.py::test_a_deadlock_starts_the_transaction_anew",
    ),
    Mutant(
        "settings of a handler reach what is written after it",
        _TX,
        "if self._lease.changed and",
        "if False and",
        _GUARDED + "test_no_setting_of_a_handler_changes_what_is_written_after_it",
    ),
    Mutant(
        "a reservation that another one won is overwritten by silence",
        "dedup/postgres/keys.py",
        "return _take_free(connection, sql, tables, keys, hashes)",
        "return keys[:0]",
        _TAKEOVER + "test_two_processes_want_the_same_keys_and_the_first_one_commits",
    ),
    Mutant(
        "after a rotation the new table alone is written",
        "dedup/postgres/keys.py",
        "return [number] if closing is None else [closing, number]",
        "return [number]",
        _RETENTION + "test_two_batches_around_a_rotation_cannot_reserve_one_key_twice",
    ),
    Mutant(
        "after a rotation the old table alone is written",
        "dedup/postgres/keys.py",
        "return [number] if closing is None else [closing, number]",
        "return [number] if closing is None else [closing]",
        _RETENTION + "test_a_batch_that_writes_both_tables_meets_those_that_write_the_new_one",
    ),
    Mutant(
        "the retention of PostgreSQL is counted from now",
        "sql/postgres/0013_purge_bounds.sql",
        "least(before, at - greatest(",
        "least(before, now() - greatest(",
        _BOUND,
    ),
    Mutant(
        "the retention of Delta is counted from now",
        "dedup/core/retention.py",
        "min(before, reached - max(",
        "min(before, now - max(",
        "tests/contract/test_upkeep.py::test_a_consumer_that_stopped_keeps_what_its_log_may_repeat",
    ),
    Mutant(
        "in the middle of a batch PostgreSQL takes a quiet partition for read to its end",
        "sql/postgres/0013_purge_bounds.sql",
        "(not e.asked_all or d.at",
        "(d.at",
        _BEHIND + "test_in_the_middle_of_a_batch_each_partition_counts",
    ),
    Mutant(
        "among processes of a runner Delta takes a quiet partition for read to its end",
        "dedup/delta/ledger_log.py",
        "before = None if state.header.head.batch_ended and state.header.members is None else NEVER",
        "before = None if state.header.head.batch_ended else NEVER",
        _BEHIND + "test_of_a_runner_that_goes_on_each_partition_counts",
    ),
    Mutant(
        "a purged table is dropped while a batch may ask it",
        "sql/postgres/0009_packed_reservations.sql",
        "continue when older_phase_is_open(old.phase);",
        "",
        _RETENTION + "test_a_purge_waits_for_no_batch_and_drops_no_table_that_one_may_ask",
    ),
    Mutant(
        "a batch that read the floors before a purge does not ask the purged table",
        _QUERIES,
        "(a.purged_at is null or a.phase > %(phase)s)",
        "a.purged_at is null",
        _RETENTION + "test_a_purge_waits_for_no_batch_and_drops_no_table_that_one_may_ask",
    ),
    Mutant(
        "commit before reservation: keys are not written",
        "dedup/postgres/keys.py",
        "    if not new.any():\n",
        "    if True:\n",
        _PG + "test_everything_of_a_chunk_is_true_after_its_commit",
    ),
    Mutant(
        "letters do not hold their keys",
        _QUERIES,
        "limit 1) r\n    {apart}\n" + _HELD,
        "limit 1) r\n    {apart}\n",
        "tests/stores/postgres/test_postgres_retention.py::test_a_purge_never_frees_a_key_that_a_letter_holds",
    ),
    Mutant(
        "letters do not hold keys that the filter says may be known",
        _QUERIES,
        "    ) r\n    {apart}\n" + _HELD,
        "    ) r\n    {apart}\n",
        "tests/stores/postgres/test_postgres_known_filter.py::test_keys_of_letters_are_known_where_their_table_was_purged",
    ),
    Mutant(
        "the generation of a batch record is not checked",
        _QUERIES,
        "join {schema}.batch b on b.consumer_id = %(id)s and b.generation >= %(keyspace)s and b.topic_id = w.topic_id",
        "join {schema}.batch b on b.consumer_id = %(id)s and %(keyspace)s >= 0 and b.topic_id = w.topic_id",
        _GUARDS + "test_after_a_reset_the_same_events_are_new_in_any_order",
    ),
    Mutant(
        "a task that is tried again does not know where its own chunks ended",
        "dedup/postgres/epoch.py",
        'row = connection.execute(sql["slice_end"], asked).fetchone()',
        "row = asked and None",
        _SLICES + "test_a_task_that_is_killed_at_any_step_is_tried_again",
    ),
    Mutant(
        "a slice begins wherever the checkpoint stands",
        "dedup/postgres/epoch.py",
        "if stands == claim.expected or (",
        "if True or (",
        _SLICES + "test_a_task_of_an_older_batch_finds_its_checkpoint_elsewhere",
    ),
    Mutant(
        "a slice commits although another one was over the budget",
        "dedup/postgres/epoch.py",
        "if row is not None and row[0] == claim.attempt:",
        "if False:",
        "tests/stores/postgres/test_slices_fail.py::test_after_a_slice_over_the_budget_no_slice_of_another_task_begins",
    ),
    Mutant(
        "a slice begins behind a gap",
        "dedup/spark/committing.py",
        "            if number == 0:\n                self._refuse_gap(index)\n",
        "",
        _KEPT + "test_a_gap_is_refused_before_any_slice_begins",
    ),
    Mutant(
        "slices of kept rows begin behind a gap",
        "dedup/spark/tasks.py",
        "    guard(job, head, run, firsts)\n    outcomes",
        "    outcomes",
        _KEPT + "test_a_gap_is_refused_before_any_slice_begins",
    ),
    Mutant(
        "a task begins slices although a file of its rows is gone",
        "dedup/spark/committing.py",
        "            part.open(files)\n",
        "            pass\n",
        _KEPT + "test_a_file_that_is_gone_decides_nothing_and_the_next_try_is_shuffled",
    ),
    Mutant(
        "the event in hand is at fault when its query is stopped",
        "deadletter/classify.py",
        "    if known.CANCELLED.search(text):",
        "    if False:",
        "tests/spark/test_stopped_query.py::test_who_stops_a_query_parks_nothing",
    ),
    Mutant(
        "an error of the handler counts although its query was stopped",
        "dedup/spark/answering.py",
        "        if is_over():\n",
        "        if False:\n",
        "tests/spark/test_stopped_query.py::test_what_a_handler_raises_after_its_query_was_stopped_says_nothing",
    ),
    Mutant(
        "a query that is stopped ends with the text of what broke off",
        "deadletter/outage.py",
        "        raise SparkGone(QUERY_STOPPED) from None\n",
        "        raise SparkGone(QUERY_STOPPED) from error\n",
        "tests/spark/test_stopped_query.py::test_who_stops_a_query_parks_nothing",
    ),
    Mutant(
        "a pause in an outage goes on although the query was stopped",
        "deadletter/outage.py",
        "        while not is_over():\n",
        "        while True:\n",
        "tests/unit/test_outage.py::test_a_pause_ends_soon_once_nobody_waits",
    ),
    Mutant(
        "who stops a query kills the tasks of its handler",
        "dedup/spark/tasks.py",
        "        if is_cancelled(error):",
        "        if False:",
        "tests/spark/test_stopped_query.py::test_who_stops_a_query_parks_nothing",
    ),
    Mutant(
        "an error of the handler counts although Spark's JVM has ended",
        "dedup/spark/answering.py",
        "if (why := _ended(session)) is not None:",
        "if (why := _ended(session)) is not None and False:",
        "tests/crash/test_jvm_gone.py::test_a_jvm_that_dies_while_frames_are_handled_parks_no_event",
    ),
    Mutant(
        "the checkpoints are read after the topics",
        "dedup/postgres/state.py",
        """    points, floors, passed = _checkpoints(connection, sql, consumer)
    row = one(connection, sql, "head", consumer=consumer)
    if row is None:
        return None
    topics = connection.execute(sql["topics"], {"id": row["id"]}).fetchall()
""",
        """    row = one(connection, sql, "head", consumer=consumer)
    if row is None:
        return None
    topics = connection.execute(sql["topics"], {"id": row["id"]}).fetchall()
    points, floors, passed = _checkpoints(connection, sql, consumer)
""",
        _COMMIT + "test_the_first_batch_is_decided_once_wherever_another_call_of_it_commits",
    ),
    Mutant(
        "what this process knows is looked at after the state",
        "dedup/consumer.py",
        "guards.refuse_older(head, live.head)",
        "guards.refuse_older(head, self._live.head)",
        _COMMIT + "test_the_first_batch_is_decided_once_wherever_another_call_of_it_commits",
    ),
    Mutant(
        "a lost commit ends whatever its session does now",
        _QUERIES,
        "where a.pid = %(pid)s and a.backend_start = %(start)s and a.backend_xid = (%(xid)s::text::xid8)::xid;",
        "where a.pid = %(pid)s and a.backend_start = %(start)s and %(xid)s::text is not null;",
        "tests/stores/postgres/test_pooler.py::test_a_transaction_is_ended_only_while_it_is_open",
    ),
    Mutant(
        "the server does not look after its client",
        _QUERIES,
        "set_config('tcp_keepalives_idle', '30', true)",
        "set_config('tcp_keepalives_idle', '0', true)",
        "tests/crash/test_host_gone.py::test_a_transaction_asks_the_server_to_look_after_its_client",
    ),
    Mutant(
        "a mirror moves what another program has committed",
        "dedup/kafka/group.py",
        "if not overwrite and place in there",
        "if False and place in there",
        "tests/brokers/test_kafka_group.py::test_what_another_program_has_committed_is_moved_only_where_that_was_said",
    ),
    *DELTA,
    *PACKING,
)
