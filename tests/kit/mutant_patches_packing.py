"""Deliberate breaks of closed tables of reservations, of packing, and of the keys that edited letters hold. Applied by mutants.py."""

from __future__ import annotations

from kit.mutant import Mutant

_PACKED, _PACKING = "sql/postgres/0009_packed_reservations.sql", "tests/stores/postgres/test_postgres_packing.py::"

_STORED = "tests/stores/postgres/test_postgres_stored_filter.py::"

PACKING = (
    Mutant(
        "a packed table whose stored filter is gone is ruled out by the filter of rows",
        "dedup/postgres/key_filter.py",
        "if number not in found]\n                found_in",
        "if False]\n                found_in",
        _STORED + "test_a_table_whose_filter_is_gone_is_asked",
    ),
    Mutant(
        "packed tables without a stored filter are not read into the filter of rows",
        "dedup/postgres/key_filter.py",
        "self._keys(connection, tables.asked, packed))",
        "self._keys(connection, tables.asked, ()))",
        _STORED + "test_a_table_whose_filter_is_gone_is_asked",
    ),
    Mutant(
        "parts of another copy of the database are read as those of a filter",
        "sql/postgres/queries.sql",
        "on f.generation = p.generation and f.made = p.made",
        "on f.generation = p.generation",
        _STORED + "test_a_filter_that_cannot_be_used_is_not",
    ),
    Mutant(
        "a filter is read without what a purge gave up while a transaction relies on it",
        "dedup/postgres/key_filter.py",
        "tables = tables_now(connection, self._sql, phase=0)",
        "tables = tables_now(connection, self._sql)",
        "tests/stores/postgres/test_postgres_known_filter.py::test_a_transaction_asks_what_a_purge_gave_up_after_it_began",
    ),
    Mutant(
        "a batch fails with the loading of filters",
        "dedup/postgres/key_filter.py",
        "                if connection.broken:\n",
        "                if True:\n",
        _STORED + "test_a_batch_does_without_filters_that_cannot_be_loaded",
    ),
    Mutant(
        "a filter of another kind is read as one of ours",
        "dedup/postgres/stored_filter.py",
        "        if told.kind != KIND or",
        "        if",
        _STORED + "test_a_filter_that_cannot_be_used_is_not",
    ),
    Mutant(
        "a filter of which parts are missing is used",
        "dedup/postgres/stored_filter.py",
        "if done == len(flat) else None",
        "if done >= 0 else None",
        _STORED + "test_a_filter_that_cannot_be_used_is_not",
    ),
    Mutant(
        "a filter is known by the number of its table",
        "sql/postgres/queries.sql",
        "array_agg(f.made::text order by a.id desc)",
        "array_agg(a.id::text order by a.id desc)",
        _STORED + "test_the_first_batch_asks_packed_tables_for_what_they_may_have",
    ),
    Mutant(
        "a key that two tables have counts twice",
        "dedup/postgres/keys.py",
        "answer = _once_each(wire.known_table(asked.answer.result()))",
        "answer = wire.known_table(asked.answer.result())",
        _STORED + "test_a_key_in_two_tables_is_known_once",
    ),
    Mutant(
        "halving a filter drops every other word",
        "dedup/core/bloom.py",
        "np.bitwise_or.reduce(words.reshape(-1, 1 << times), axis=1)",
        "words.reshape(-1, 1 << times)[:, 0]",
        _STORED + "test_folding_loses_no_key",
    ),
    Mutant(
        "a table is closed while a batch is open that writes it alone",
        "sql/postgres/0002_reservations.sql",
        "where closing and closed_at is null and not older_phase_is_open(phase);",
        "where closing and closed_at is null;",
        "tests/stores/postgres/test_postgres_retention.py::test_a_rotation_waits_for_no_batch_and_no_batch_waits_for_it",
    ),
    Mutant(
        "a key that is freed while its table is packed stays in the pages",
        _PACKED,
        "join reservation_generation g on g.packing is not null and c.relname",
        "join reservation_generation g on false and c.relname",
        _PACKING + "test_who_frees_a_key_while_its_table_is_packed_is_waited_for",
    ),
    Mutant(
        "packing does not wait for transactions that do not know of it",
        _PACKED,
        "    elsif older_phase_is_open(next.packing_phase) then\n",
        "    elsif false then\n",
        _PACKING + "test_who_frees_a_key_while_its_table_is_packed_is_waited_for",
    ),
    Mutant(
        "pages are asked although they lack rows",
        _PACKED,
        "    if same then\n",
        "    if true then\n",
        _PACKING + "test_rows_that_were_written_by_hand_are_not_lost",
    ),
    Mutant(
        "a key in a page is freed nowhere",
        _PACKED,
        "    perform take_out(g.id, g.page_shift, wanted)\n    from reservation_generation g",
        "    perform take_out(g.id, g.page_shift, wanted)\n    from (select * from reservation_generation where false) g",
        _PACKING + "test_between_any_two_steps_known_is_what_was_reserved_and_not_freed",
    ),
    Mutant(
        "who waits for a page writes what was in it before",
        _PACKED,
        "set keys = without_keys(p.keys, 16, p.keys, l.gone)",
        "set keys = without_keys((select o.keys from only %1$I o where o.page = l.page), 16, "
        "(select o.keys from only %1$I o where o.page = l.page), l.gone)",
        _PACKING + "test_two_that_free_keys_of_one_page_both_do",
    ),
    Mutant(
        "whoever takes keys out misses pages that are dropped",
        _PACKED,
        "exception when undefined_table then\n    null;",
        "exception when lock_not_available then\n    null;",
        _PACKING + "test_who_frees_a_key_does_not_miss_pages_that_are_dropped",
    ),
    Mutant(
        "verify lets tables be dropped under its snapshot",
        "dedup/postgres/state.py",
        '        connection.execute(sql["lock_reservations"], {})\n',
        "",
        _PACKING + "test_a_table_that_is_dropped_while_it_is_looked_at_contradicts_nothing",
    ),
    Mutant(
        "rows that are packed and dropped meanwhile count as lost",
        _PACKED,
        "or g.rows_dropped_at is not null and not pages",
        "",
        _PACKING + "test_a_table_that_is_dropped_while_it_is_looked_at_contradicts_nothing",
    ),
    Mutant(
        "bytes across two keys are taken for a key",
        "dedup/postgres/keys.py",
        "case when mod(f.at, 16) = 1 then",
        "case when f.at > 0 then",
        _PACKING + "test_bytes_across_two_keys_are_no_key",
    ),
    Mutant(
        "letters do not hold keys that edits replaced",
        "sql/postgres/queries.sql",
        "    where h.key is not null and l.holds_key",
        "    where false and l.holds_key",
        "tests/contract/test_letter_purges.py::test_a_purge_frees_no_key_that_an_edit_replaced",
    ),
    Mutant(
        "a letter that passes leaves keys that edits replaced to a purge",
        "sql/postgres/queries.sql",
        "    where h.letter_id = any(%(ids)s) and c.status in ('REPROCESSED', 'DUPLICATE')",
        "    where h.letter_id = any(%(ids)s) and c.status in ('DUPLICATE')",
        "tests/contract/test_letter_purges.py::test_a_letter_that_passes_after_a_purge_leaves_all_its_keys_decided",
    ),
    Mutant(
        "the payload of a key that an edit replaced is that of the new one",
        "dedup/postgres/letters.py",
        '    if step.history["key"].null_count < step.history.num_rows:\n',
        "    if False:\n",
        "tests/contract/test_letter_purges.py::test_an_original_is_no_conflict_with_the_body_that_repaired_it",
    ),
    Mutant(
        "the filter lacks keys that edits replaced",
        "sql/postgres/queries.sql",
        "    where h.key is not null and d.holds_key",
        "    where false and d.holds_key",
        "tests/stores/postgres/test_postgres_known_filter.py::test_keys_that_edits_replaced_are_known_where_their_table_was_purged",
    ),
)
