"""The contract suite on PostgreSQL with packed reservations: a run of its own, in which each new store finds those before it in pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kit.paths import ROOT, TESTS

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(2400)]

LEFT_OUT = ("older_than_the_retention", "keeps_what_its_log_may_repeat")
"""Tests that count the tables of reservations: here are more."""


def test_the_contract_holds_on_packed_reservations() -> None:
    """Whatever a process has reserved, the next one looks up in pages, and frees there: no answer is another one."""
    selection = f"postgres and not deaths and not {' and not '.join(LEFT_OUT)}"
    every_step = "not full or crash"
    options = ["-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-W", "default", "-m", every_step, "-k", selection]
    run = [sys.executable, "-m", "pytest", *options, str(TESTS / "contract"), str(TESTS / "crash" / "test_kill.py")]
    env = {**os.environ, "DEDUP_TEST_PACKED": "1"}
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=2300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed.* in ", done.stdout)[-1]) > 300
