"""What is said of Spark's workers that lack packages, by their answers."""

from __future__ import annotations

import platform
import sys

from dedup.spark.workers import lacking


def answer(host: str, lacks: str = "", path: str = sys.executable) -> dict[str, str]:
    """Of one worker."""
    return {"host": host, "path": path, "version": "3.11.1", "lacks": lacks}


def test_one_executor_that_lacks_a_package_is_named() -> None:
    """One good worker does not speak for the others; the hosts are named, and what is missing there."""
    assert lacking([answer("a"), answer("b")]) is None
    said = lacking([answer("a"), answer("c", "shop"), answer("b", "shop"), answer("c", "shop")])
    assert said is not None and said.startswith(
        f"Spark's workers on b, c run {sys.executable} (Python 3.11.1), which lacks shop. Install it"
    )


def test_workers_of_this_machine_are_not_named_by_host() -> None:
    """Another interpreter everywhere is a wrong setting: the advice is what to set."""
    said = lacking([answer(platform.node(), "numpy, pyarrow", "/usr/bin/python3")] * 2)
    assert said is not None and "Spark's workers run /usr/bin/python3" in said and "PYSPARK_PYTHON" in said
