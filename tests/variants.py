"""The stores that the contract suite runs on: what of them `make test` runs, and a run's last lines, which say which of them ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

CONTRACT = Path(__file__).parent / "contract"

OUTCOMES = ("passed", "failed", "error", "skipped")

SELECTED = frozenset(
    {
        "test_a_batch_is_written_once_and_accounted_for",
        "test_a_replayed_batch_changes_nothing",
        "test_merge_keeps_the_last_row_of_each_key",
        "test_an_older_copy_is_fenced",
        "test_a_lost_partition_cannot_commit",
        "test_a_store_restored_to_the_middle_of_a_batch_is_noticed",
        "test_a_parked_event_keeps_its_key_until_it_is_reprocessed",
        "test_a_released_key_is_free_until_it_is_taken_again",
        "test_events_wait_behind_a_dead_letter_of_their_sequence",
        "test_a_stream_is_written_once_through_restarts_and_a_lost_checkpoint",
        "test_what_raises_in_a_dataframe_handler_is_isolated_and_reprocessed",
        "test_each_partition_commits_by_itself_and_all_of_it_adds_up",
    }
)
"""What `make test` runs on the store whose commits Spark makes: the commit protocol, as each kind of transaction goes through it,
streams, and handlers in tasks. Those of streams and tasks run on Spark Connect, too."""


SEVERAL = frozenset({"test_runner_processes.py", "test_dispatchers_at_once_share_the_work_and_keep_the_order"})
"""Modules and tests in which several processes commit at once. They are not of that store: on a local disk Delta's Spark writer is safe
inside one JVM only (docs/delta-engine-spark.md)."""


def of_store(item: pytest.Item) -> str | None:
    """The store that a test of the contract suite was made for, if it was made for several."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("place") if callspec is not None and item.path.parent == CONTRACT else None


def possible(item: pytest.Item) -> bool:
    """Whether the test can be run on its store."""
    return of_store(item) != "delta-spark" or SEVERAL.isdisjoint({item.path.name, item.name.partition("[")[0]})


def in_ci(item: pytest.Item) -> bool:
    """Whether it is selected, as it is named or with the values of its parameters: `test_x` or `test_x[value]`."""
    names = {item.name.partition("[")[0], item.name.replace("[delta-spark]", "").replace("delta-spark-", "")}
    return not names.isdisjoint(SELECTED)


def counted(stats: dict[str, list[pytest.TestReport]]) -> list[str]:
    """A line for each store that a test ran on."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in OUTCOMES:
        for report in stats.get(outcome, ()):
            for name, store in getattr(report, "user_properties", ()):
                if name == "store":
                    counts[str(store)][outcome] += 1
    return [f"contract suite on {store}: {', '.join(f'{n} {what}' for what, n in counts[store].items())}" for store in sorted(counts)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A store that was left out is seen, and not taken for one that passed."""
    for line in counted(terminalreporter.stats):
        terminalreporter.write_line(line)
