"""The contract suite's Spark part on a local Spark Connect server: a run of its own, because a process has classic Spark or Connect."""

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

LEFT_OUT = {
    "test_stateful_operators_upstream_are_refused_before_anything_is_written": "Connect does not show the plan (how-to/spark-connect.md)",
    "test_run_raises_the_error_of_ours_that_ended_the_query": "the callback runs in a process of the server (how-to/spark-connect.md)",
    "and_a_driver_that_dies": "the driver that dies is a process of its own, on classic Spark",
}
"""Tests, or values of their parameters, and why they do not run there."""

AT_LEAST = {"streams": 30, "tasks": 30}
"""Tests that are selected, when this was written."""


@pytest.mark.timeout(3200)
@pytest.mark.parametrize("part", PARTS)  # one after the other: their servers would have one port
def test_the_spark_part_of_the_contract_holds_on_connect(part: str) -> None:
    """The same tests through gRPC: all of those files but what is named with its reason; of `engine="spark"` its selection."""
    pytest.importorskip("grpc")
    files = [str(TESTS / "spark" / f"test_{name}.py") for name in PARTS[part]]
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "-W", "default", "-k", f"not {' and not '.join(LEFT_OUT)}"]
    run = [sys.executable, "-m", "pytest", *options, *files]
    env = {**os.environ, "DEDUP_TEST_SPARK": "connect"}
    for _ in range(2):
        done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500, check=False)
        if "failed to connect back" not in done.stdout:  # Spark gives its worker ten seconds to start, and a busy machine may not
            break
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    said = done.stdout.splitlines()
    assert "skipped" not in next(line for line in said if re.search(r"\d+ passed.* in ", line)), "nothing is left out unnamed"
    assert int(re.findall(r"(\d+) passed.* in ", done.stdout)[-1]) >= AT_LEAST[part]
