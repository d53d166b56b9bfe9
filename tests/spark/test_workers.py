"""Spark's workers with an interpreter that lacks what tasks need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kit.paths import environment

pytestmark = [pytest.mark.spark, pytest.mark.delta]


@pytest.mark.full
def test_workers_without_the_packages_are_told_in_three_lines_before_anything_is_written(tmp_path: Path) -> None:
    """`check` and the first batch name both interpreters, what is missing and what to set; a good worker is asked once."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=120)
    python = str(bare / "bin/python")
    command = [sys.executable, "-m", "kit.workers_child", str(tmp_path / "job")]
    child = subprocess.run(command, env=environment(PYSPARK_PYTHON=python), capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout.splitlines()[-1])
    for refused in (told["check"], told["batch"]):
        assert refused.startswith("ConfigError: Consumer 'shop': ") and refused.count("\n") <= 2
        version = ".".join(map(str, sys.version_info[:3]))
        assert f"{python} (Python {version})" in refused and f"{sys.executable} (Python {version})" in refused
        assert "numpy, pyarrow" in refused and "PYSPARK_PYTHON" in refused and "spark.pyspark.python" in refused
    assert told["rows"] == []
    assert told["own"] == told["again"] == "None"
    assert "processed 3" in told["own batch"] and told["own rows"] == 3
    (none, no_program), (old, no_start) = told["others"].items()
    assert f"cannot start {none}" in no_program and f"{old}, which cannot start PySpark" in no_start
    assert all("export PYSPARK_PYTHON=" in said for said in (no_program, no_start))
    assert "lacks shop_module. Install it" in told["module"] and "--py-files" in told["module"] and "export" not in told["module"]
