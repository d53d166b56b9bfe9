"""Deliberate breaks of the Delta store. Applied by mutants.py."""

from __future__ import annotations

from kit.mutant import Mutant

_LEDGER, _DELIVERY = "tests/stores/delta/test_delta_ledger.py::", "tests/contract/test_delivery.py::"
_COMMITS, _PUBLICATION = "tests/stores/delta/test_delta_commits.py::", "tests/stores/delta/test_delta_publication.py::"
_BACK = "tests/stores/delta/test_delta_copied_back.py::"
_FEATURES = "tests/stores/delta/test_delta_features.py::"
_KEYS, _DAMAGE = "tests/stores/delta/test_key_files.py::", "tests/stores/delta/test_key_damage.py::"
_COPIES = "tests/stores/delta/test_key_copies.py::"
_PURGES = "tests/stores/delta/test_key_purges.py::"
_COMPACTION = "tests/stores/delta/test_delta_compaction.py::"

DELTA = (
    Mutant(
        "an open table keeps the token that it was opened with",
        "dedup/delta/tables.py",
        " and given == self._given:",
        ":",
        "tests/stores/delta/test_storage_tokens.py::test_a_consumer_outlives_the_token_that_it_began_with",
    ),
    Mutant(
        "a look goes on from one that ended in the middle",
        "dedup/delta/state.py",
        "known, torn = self._whole, self.header is not self._whole",
        "known, torn = self._whole, False",
        _LEDGER + "test_a_look_that_fails_in_the_middle_forgets_nothing",
    ),
    Mutant(
        "after a look that failed, an older ledger is taken for the same",
        "dedup/delta/state.py",
        " and not (torn and known.seq and not self._has(known, table))",
        "",
        "tests/stores/delta/test_delta_damage.py::test_an_older_ledger_after_a_look_that_failed_is_noticed",
    ),
    Mutant(
        "a page of keys is not compared with its checksum",
        "dedup/delta/key_files.py",
        "if len(wrong := pages[np.array(sums, dtype=np.uint32) != self._sums[pages]]):",
        "if len(wrong := pages[:0]):",
        _DAMAGE + "test_no_byte_that_changes_while_a_file_is_open_changes_an_answer",
    ),
    Mutant(
        "the filter of a file of keys is not compared with its checksum",
        "dedup/delta/key_files.py",
        'if [zlib.crc32(block) for block in blocks] != told["sums"]:',
        "if False:",
        _DAMAGE + "test_no_changed_byte_changes_an_answer",
    ),
    Mutant(
        "files of keys of another history are opened",
        "dedup/delta/reservations.py",
        "return decided is not None and decided.attempt == listed.attempt",
        "return decided is not None",
        _DAMAGE + "test_files_of_a_history_that_was_taken_back_are_not_opened",
    ),
    Mutant(
        "copies of keys of another history are fetched",
        "dedup/delta/reservations.py",
        "decided.attempt == name.attempt and _of_history((copied := copies.load(name)).listed, look)",
        "(copied := copies.load(name))",
        _COPIES + "test_copies_of_a_history_that_was_taken_back_are_not_used",
    ),
    Mutant(
        "a list of copies is written before its files",
        "dedup/delta/key_objects.py",
        "        for run in kept.runs:\n",
        "        self._put(name.path, kept.listed.encoded(sizes=sizes), there)\n        for run in kept.runs:\n",
        _COPIES + "test_a_list_is_there_only_with_all_of_its_files",
    ),
    Mutant(
        "copies that were damaged are fetched again and again",
        "dedup/delta/key_objects.py",
        "        self._distrusted = True\n",
        "",
        _COPIES + "test_damaged_copies_are_fetched_once",
    ),
    Mutant(
        "the list says that keys in memory are in files",
        "dedup/delta/keys.py",
        "if self._tail or len(files) < len(self._stored):",
        "if len(files) < len(self._stored):",
        _KEYS + "test_a_list_never_leaves_out_keys_that_no_file_has",
    ),
    Mutant(
        "a key that is freed while files are joined comes back",
        "dedup/delta/keys.py",
        "            self._free_again(made)",
        "            pass",
        _KEYS + "test_a_key_that_is_freed_while_files_are_joined_stays_free",
    ),
    Mutant(
        "a key that is reserved after a purge counts as purged",
        "dedup/delta/keys.py",
        "np.maximum(np.asarray(day, dtype=np.uint16), np.uint16(self._since))",
        "day",
        _KEYS + "test_an_index_that_is_opened_again_answers_like_a_dictionary",
    ),
    Mutant(
        "a damaged file of keys ends the process that met it",
        "dedup/delta/reservations.py",
        """        except DamagedKeys as error:
            self._lose(error)
        return question(self._known(look))""",
        """        except DamagedKeys:
            raise
        return question(self._known(look))""",
        _DAMAGE + "test_a_file_that_is_damaged_while_it_is_open_is_made_again",
    ),
    Mutant(
        "what was reserved after a purge of its day is not read",
        "dedup/delta/reservations.py",
        ' | (rows["seq"].to_numpy() > header.purged_in)',
        "",
        _PURGES + "test_all_processes_forget_the_same_keys_in_a_purge_that_is_not_done",
    ),
    Mutant(
        "a purge drops rows of its own day",
        "dedup/delta/tending.py",
        "drop_reservations(min(before, decided))",
        "drop_reservations(before)",
        _PURGES + "test_a_purge_drops_nothing_that_was_reserved_after_it",
    ),
    Mutant(
        "a decision after a purge is of an earlier day",
        "dedup/delta/clocks.py",
        "max(now, purged, known)",
        "max(now, known)",
        _PURGES + "test_a_purge_drops_nothing_that_was_reserved_after_it",
    ),
    Mutant(
        "a decision is tried against a snapshot that nobody read",
        "dedup/delta/ledger.py",
        "tables.commit(table, adds, transactions, exact=True)",
        "tables.commit(self.open() or table, adds, transactions, exact=False)",
        _COMMITS + "test_an_instance_with_an_older_epoch_is_fenced_before_and_at_the_commit",
    ),
    Mutant(
        "a creator of a table tries again after another one",
        "dedup/delta/engine.py",
        "commit_properties=CommitProperties(max_commit_retries=0)",
        "commit_properties=CommitProperties()",
        _LEDGER + "test_of_many_creators_of_a_table_one_wins",
    ),
    Mutant(
        "txnVersion from the batch id",
        "dedup/delta/commit.py",
        "transactions = {state.ledger.app(table, header.head.generation): header.version}",
        "transactions = {state.ledger.app(table, header.head.generation): header.head.batch_id or 0}",
        _LEDGER + "test_a_running_consumer_keeps_its_files_few",
    ),
    Mutant(
        "somebody else's decision is taken for ours",
        "dedup/delta/commit.py",
        "if winner is not None and winner.attempt == header.attempt:",
        "if winner is not None:",
        _COMMITS + "test_an_instance_with_an_older_epoch_is_fenced_before_and_at_the_commit",
    ),
    Mutant(
        "forget the read-back of the ledger",
        "dedup/delta/commit.py",
        "        _read_back(state, failure)\n",
        "        if failure is not None:\n            raise StoreUnavailable from failure\n        _read_back(state, failure)\n",
        _COMMITS + "test_an_answer_that_was_lost_after_the_commit_landed_changes_nothing",
    ),
    Mutant(
        "a decision without its reservations",
        "dedup/delta/commit.py",
        "        (KEYS, kept),\n",
        "",
        _DELIVERY + "test_a_duplicate_in_the_next_batch_or_another_partition_is_dropped",
    ),
    Mutant(
        "a commit on object storage is a plain put",
        "dedup/delta/objects.py",
        'mode="create"',
        'mode="overwrite"',
        "tests/stores/delta/test_object_storage.py::test_of_two_commits_of_one_version_one_is_refused",
    ),
    Mutant(
        "a commit that was put is taken for the one that others replaced",
        "dedup/delta/objects.py",
        "return self.tag == other.tag if self.tag and other.tag else self.modified == other.modified",
        "return True",
        "tests/stores/delta/test_object_storage.py::test_a_table_that_was_created_again_is_not_taken_for_the_old_one",
    ),
    Mutant(
        "what a decision adds goes before what it leaves to the ledger",
        "dedup/delta/seen.py",
        "_ORDER = {SUMMARY: 0, STRETCH: 1, BATCH: 2}",
        "_ORDER = {SUMMARY: 0, STRETCH: 2, BATCH: 1}",
        "tests/stores/delta/test_delta_seen.py::test_what_is_left_to_the_ledger_is_known_to_every_process",
    ),
    Mutant(
        "a purge leaves out what was decided since one that asked for days to come",
        "dedup/delta/ledger_log.py",
        "filter(None, (state.header.purged_before, state.header.purged_on))",
        "filter(None, (state.header.purged_before,))",
        "tests/stores/delta/test_delta_days.py::test_purges_one_after_another_know_the_highest_position_of_each_partition",
    ),
    Mutant(
        "an older library forgets what a newer one has added",
        "dedup/delta/ledger.py",
        "        **h.later,\n",
        "",
        "tests/stores/delta/test_delta_damage.py::test_a_newer_state_that_only_adds_to_the_header_is_gone_on_with",
    ),
    Mutant(
        "only the newest decision is published",
        "dedup/delta/commit.py",
        "for seq in sorted(self.state.pending):",
        "for seq in sorted(self.state.pending)[-1:]:",
        _PUBLICATION + "test_several_decisions_are_published_in_their_order",
    ),
    Mutant(
        "publish without looking whether it is there",
        "dedup/delta/commit.py",
        "if not what.is_reached(shown):",
        "if True:",
        _PUBLICATION + "test_two_publishers_at_once_publish_once",
    ),
    Mutant(
        "publish in no order",
        "dedup/delta/commit.py",
        "for seq in sorted(self.state.pending):",
        "for seq in sorted(self.state.pending, reverse=True):",
        _PUBLICATION + "test_several_decisions_are_published_in_their_order",
    ),
    Mutant(
        "a mark has the number of the decision, and not which one it was",
        "dedup/delta/tables.py",
        "return seq << ID_BITS | _identity(attempt, ID_BITS)",
        "return seq << ID_BITS",
        _BACK + "test_a_sink_that_the_old_ledger_never_wrote_to_is_told_before_the_decision",
    ),
    Mutant(
        "a table that is ahead of the ledger is not told",
        "dedup/delta/state.py",
        "while self._unknown(name, shown) is not None:",
        "while False:",
        _BACK + "test_nothing_is_decided_on_a_state_that_was_copied_back",
    ),
    Mutant(
        "a table that others publish to meanwhile is taken for one of a lost ledger",
        "dedup/delta/state.py",
        "            if told is None:\n                break\n            before, shown = shown, self._look(name, table, whole=whole)\n",
        "            before = shown = self._look(name, table, whole=whole)\n            if (told := self._unknown(name, shown)) is None:\n"
        "                break\n",
        "tests/stores/delta/test_delta_publication.py::test_what_others_publish_between_two_looks_is_no_restore",
    ),
    Mutant(
        "a table that lacks a known publication is not told",
        "dedup/delta/state.py",
        "if shown is None or tables.seq_of(shown) < tables.seq_of(mark.shown):",
        "if last := False:",
        _BACK + "test_one_table_that_was_copied_back_is_told_and_accepted",
    ),
    Mutant(
        "tables are compared when they are written to, and not before anything is decided",
        "dedup/delta/state.py",
        "            self.agreement.require_known()\n",
        "            pass\n",
        _BACK + "test_every_way_in_is_closed",
    ),
    Mutant(
        "a decision is taken in whatever it follows",
        "dedup/delta/state.py",
        "if known and self.header.attempt not in",
        "if False and self.header.attempt not in",
        _BACK + "test_a_running_process_sees_that_its_ledger_was_copied_back",
    ),
    Mutant(
        "files are committed whether they are there or not",
        "dedup/delta/commit.py",
        "if not self.missing(entry, sink.uri):",
        "if True:",
        _BACK + "test_files_that_vanish_right_after_the_decision_are_not_committed",
    ),
    Mutant(
        "a new generation uses the numbers of lost messages",
        "dedup/delta/upkeep.py",
        "seq = max(header.seq, last_decision(state.sinks.engine, *state.outbox_uris()) + 1)",
        "seq = header.seq",
        _BACK + "test_after_an_accepted_restore_no_message_is_taken_for_a_sent_one",
    ),
    Mutant(
        "a compaction does not look whether its files are still there",
        "dedup/delta/compaction.py",
        "if table is None or not {file.path for file in files} <= tables.listed(table):",
        "if table is None:",
        _COMPACTION + "test_two_compactions_of_an_outbox_at_once_send_each_message_once",
    ),
    Mutant(
        "a compaction lands behind any other commit",
        "dedup/delta/compaction.py",
        "removes=removes, exact=True)",
        "removes=removes, exact=False)",
        _COMPACTION + "test_a_compaction_leaves_it_to_another_one",
    ),
    Mutant(
        "verify believes the ledger about publications",
        "dedup/delta/verify.py",
        "        return whole or (one.app in self._first",
        "        return False and (one.app in self._first",
        _BACK + "test_verify_finds_a_decision_that_a_sink_never_got",
    ),
    Mutant(
        "behind many commits of others a RESTORE is not looked for",
        "dedup/delta/restores.py",
        "return engine.listed(sink.table).issuperset(paths) and not",
        "return not",
        "tests/stores/delta/test_delta_restored_sinks.py::test_a_sink_that_was_restored_is_told_and_accepted",
    ),
    Mutant(
        "a freed key comes back",
        "dedup/delta/commit.py",
        'pa.concat_tables([held, freed_rows(header.seq, decision.freed["key"])])',
        "held",
        "tests/stores/delta/test_delta_letters.py::test_a_freed_key_is_new_again_and_stays_so",
    ),
    Mutant(
        "merges of one key are made as one",
        "dedup/core/merges.py",
        "if nearest[at] >= starts[-1]:",
        "if nearest[at] >= len(keys):",
        "tests/stores/delta/test_delta_merge.py::test_merges_of_a_decision_that_share_no_key_are_one_commit_of_the_sink",
    ),
    # features of tables
    Mutant(
        "row ids begin with the last one that was given",
        "dedup/delta/features.py",
        "initial=owed.highest + 1)",
        "initial=owed.highest)",
        _FEATURES + "test_each_batch_is_put_with_ids_and_a_time_of_its_own",
    ),
    Mutant(
        "a commit's time may be that of the commit before",
        "dedup/delta/features.py",
        "max(now, self.time + 1)",
        "max(now, self.time)",
        _FEATURES + "test_whoever_commits_between_is_gone_on_from",
    ),
    Mutant(
        "a table goes on from what this process knew, whoever committed since",
        "dedup/delta/snapshot.py",
        "if self._owed is None or self._owed.version != self.version():",
        "if self._owed is None:",
        _FEATURES + "test_whoever_commits_between_is_gone_on_from",
    ),
    Mutant(
        "row ids that only a checkpoint tells are given again",
        "dedup/delta/features.py",
        "(is_checkpoint and at == version)",
        "False",
        _FEATURES + "test_the_highest_row_id_is_found_wherever_the_log_tells_it",
    ),
)
