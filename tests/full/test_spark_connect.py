"""The contract suite's Spark part where Spark shows less of itself: runs of their own, because a process has one kind of session.

On a local Spark Connect server, and with a session that hides what managed platforms hide (kit.managed, a double of them).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kit.paths import ROOT, TESTS

pytestmark = [pytest.mark.spark, pytest.mark.delta, pytest.mark.postgres]


PARTS = {"streams": ("spark", "outbox_spark"), "tasks": ("foreach_spark", "foreach_files")}
"""Files of the contract suite: streams with restarts and replays, messages; handlers in tasks. Those with brokers run on classic Spark."""

_NO_PLAN = "the plan is not shown (how-to/spark-connect.md)"

_SETTINGS = "it changes settings of Parquet by the product's own code"

_ELSEWHERE = "the folder is one of the server's"

LEFT_OUT = {
    "connect": {
        "test_stateful_operators_upstream_are_refused_before_anything_is_written": _NO_PLAN,
        "test_run_raises_the_error_of_ours_that_ended_the_query": "the callback runs in a process of the server (how-to/spark-connect.md)",
        "and_a_driver_that_dies": "the driver that dies is a process of its own, on classic Spark",
        "test_a_scratch_folder_that_cannot_be_made_is_named": _ELSEWHERE,
        "test_staged_rows_have_the_types_that_they_were_written_with": "types are found at the write, which has these settings",
    },
    "managed": {
        "test_stateful_operators_upstream_are_refused_before_anything_is_written": _NO_PLAN,
        "test_check_and_run_go_from_start_to_end": _NO_PLAN
        + ", so a stream of files is not told from one of Kafka; the rest runs on Connect",
        "test_an_error_of_ours_stops_the_query_with_its_message": "two queries in one process; on such platforms each has one of its own",
        "test_scratch_files_hold_the_values_of_the_batch": _SETTINGS,
        "and_a_driver_that_dies": "the driver that dies is a process of its own, without limits",
        "test_a_scratch_folder_that_cannot_be_made_is_named": _ELSEWHERE,
        "test_staged_rows_have_the_types_that_they_were_written_with": _SETTINGS,
    },
}
"""Kind of session -> tests, or values of their parameters, and why they do not run there."""

_TOO_SLOW = "to connect back"
"""Spark gives its worker ten seconds to start, and a busy machine may not: what failed beside such a worker runs once more."""

AT_LEAST = {"streams": 30, "tasks": 30}
"""Tests that are selected, when this was written."""


@pytest.mark.timeout(3200)
@pytest.mark.parametrize("kind", LEFT_OUT)
@pytest.mark.parametrize("part", PARTS)  # one after the other: their servers would have one port
def test_the_spark_part_of_the_contract_holds_where_spark_hides_itself(part: str, kind: str) -> None:
    """The same tests: all of those files but what is named with its reason; of `engine="spark"` its selection."""
    pytest.importorskip("grpc")
    done = _run(kind, [str(TESTS / "spark" / f"test_{name}.py") for name in PARTS[part]])
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    again = _run(kind, failed) if failed and _TOO_SLOW in done.stdout else done
    assert again.returncode == 0, again.stdout[-4000:] + again.stderr[-2000:]
    said = done.stdout.splitlines()
    assert "skipped" not in next(line for line in said if re.search(r"\d+ passed.* in ", line)), "nothing is left out unnamed"
    assert int(re.findall(r"(\d+) passed.* in ", done.stdout)[-1]) >= AT_LEAST[part]


def _run(kind: str, chosen: list[str]) -> subprocess.CompletedProcess[str]:
    """These files or tests, but what is left out, in a session of this kind."""
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "-W", "default", "-k", f"not {' and not '.join(LEFT_OUT[kind])}"]
    run = [sys.executable, "-m", "pytest", *options, *chosen]
    env = {**os.environ, "DEDUP_TEST_SPARK": kind}
    return subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500, check=False)
