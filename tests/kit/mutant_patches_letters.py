"""Breaks of handlers, letters and order, on both stores."""

from __future__ import annotations

from kit.mutant import Mutant

_FAILURES = "tests/contract/test_failures.py::"
_DOG = "tests/unit/test_watchdog.py::"
_COMPANY = "tests/unit/test_company.py::"
_TRIES = "tests/unit/test_attempts.py::"
_EDITS = "tests/contract/test_letter_edits.py::"

LETTERS = (
    Mutant(
        "followers of a failed event are not blocked",
        "dedup/core/planning.py",
        "np.minimum.at(self._from, codes[codes >= 0], at)",
        "pass",
        _TRIES + "test_rows_behind_a_failed_one_of_their_sequence_wait",
    ),
    Mutant(
        "followers of a letter are not blocked",
        "dedup/core/planning.py",
        "self._from[codes.to_numpy()] = -1",
        "pass",
        _FAILURES + "test_events_wait_behind_a_dead_letter_of_their_sequence",
    ),
    Mutant(
        "a discard does not read its letters under their lock",
        "deadletter/work.py",
        "letters = transaction.lock(sorted(ids))",
        "letters = store.letters(Selection(ids=tuple(ids), limit=None))",
        _EDITS + "test_of_a_reprocess_and_a_discard_at_once_one_wins",
    ),
    Mutant(
        "the status of a letter is not looked at under its lock",
        "dedup/reprocessing/letters.py",
        "good = status == Status.OPEN or (status == Status.BLOCKED and before in allowed)",
        "good = True",
        _EDITS + "test_a_letter_that_is_discarded_after_it_was_listed_is_not_run",
    ),
    Mutant(
        "the budget is not kept",
        "dedup/core/decision.py",
        "    if excess:",
        "    if False:",
        _FAILURES + "test_over_budget_nothing_is_parked",
    ),
    Mutant(
        "a flood that does not come to the handler has no budget",
        "dedup/pipeline/commit.py",
        "    _require_budget(chunk, settled, used, head, policy)\n",
        "",
        "tests/contract/test_budgets.py::test_a_flood_of_one_kind_stops_until_it_is_admitted",
    ),
    Mutant(
        "a runner does not count what another one used meanwhile",
        "dedup/postgres/commit.py",
        ("    if state.claim is not None:\n        decision.require"),
        ("    if False:\n        decision.require"),
        "tests/contract/test_budgets.py::test_runners_that_commit_side_by_side_share_one_budget",
    ),
    Mutant(
        "what is everybody's fault parks events",
        "dedup/pipeline/attempts.py",
        "return SYSTEMIC in (found, outlasted(error) if found == TRANSIENT else None)",
        "return False",
        _TRIES + "test_what_is_everybodys_fault_parks_nothing",
    ),
    Mutant(
        "an event that kills is never found",
        "deadletter/crashes.py",
        "if self._tells(deaths) else self.dead",
        "if deaths < 0 else self.dead",
        _TRIES + "test_an_event_that_kills_is_found_and_parked",
    ),
    Mutant(
        "a limit that ends takes the others with it",
        "dedup/pipeline/reentry.py",
        "self.limits.pop(number, None)",
        "self.limits.clear()",
        _DOG + "test_a_hang_ends_the_process_whatever_else_is_limited",
    ),
    Mutant(
        "the watchdog waits for the last limit",
        "dedup/pipeline/reentry.py",
        "earliest = min((limit.end",
        "earliest = max((limit.end",
        _DOG + "test_a_hang_ends_the_process_whatever_else_is_limited",
    ),
    Mutant(
        "a hang that holds the interpreter's lock goes on",
        "dedup/pipeline/reentry.py",
        "_end_later(earliest + GRACE_SECONDS - time.monotonic())",
        "pass",
        _DOG + "test_a_hang_ends_the_process_whatever_else_is_limited",
    ),
    Mutant(
        "a suspect is tried beside others",
        "dedup/pipeline/company.py",
        "if not other.sends]",
        "if other.alone and not other.sends]",
        _COMPANY + "test_a_suspect_is_in_hand_alone",
    ),
    Mutant(
        "every death counts",
        "deadletter/crashes.py",
        "sure = self._alone and not self._accompanied and self._marker.deaths > 0",
        "sure = True",
        _COMPANY + "test_a_chunk_that_hangs_stops_no_other_query_for_ever",
    ),
    Mutant(
        "however many events run out of time, each is parked",
        "dedup/pipeline/attempts.py",
        "return self.before + len(self.rows) >= IN_A_ROW",
        "return False",
        "tests/stores/postgres/test_brownout.py::test_a_brownout_that_lasts_is_an_outage",
    ),
)
