"""What is said of Spark's workers that lack packages, by their answers."""

from __future__ import annotations

import json
import pickle
import platform
import sys
from typing import Any

from dedup.spark.workers import _question, lacking


def answer(host: str, lacks: str = "", path: str = sys.executable, fails: str = "") -> dict[str, str]:
    """Of one worker."""
    return {"host": host, "path": path, "version": "3.11.1", "lacks": lacks, "fails": fails}


class Unset:
    """What cannot be loaded where a variable of the environment is not set."""

    def __reduce__(self) -> Any:
        variables: dict[str, str] = {}
        return variables.__getitem__, ("DEDUP_TEST_UNSET",)


def test_one_executor_that_lacks_a_package_is_named() -> None:
    """One good worker does not speak for the others; the hosts are named, and what is missing there."""
    assert lacking([answer("a"), answer("b")]) is None
    said = lacking([answer("a"), answer("c", "shop"), answer("b", "shop"), answer("c", "shop")])
    assert said is not None and said.startswith(
        f"Spark's workers on b, c run {sys.executable} (Python 3.11.1), which lacks shop. Install it"
    )


def test_a_module_that_fails_where_workers_import_it_is_told_with_its_error() -> None:
    """The driver has variables of the environment that executors lack: what to set is said, without a stack of Spark's."""
    found = json.loads(_question([pickle.dumps(1), pickle.dumps(Unset())])(0))
    assert (found["lacks"], found["fails"]) == ("", "KeyError: 'DEDUP_TEST_UNSET'")
    said = lacking([answer("a"), answer("b", fails="KeyError: 'LAKE'")])
    assert said is not None and "spark.executorEnv.NAME" in said
    assert said.startswith("Spark's workers on b cannot load the handler, or a module that it uses: KeyError: 'LAKE'. Workers import")


def test_workers_of_this_machine_are_not_named_by_host() -> None:
    """Another interpreter everywhere is a wrong setting: the advice is what to set."""
    said = lacking([answer(platform.node(), "numpy, pyarrow", "/usr/bin/python3")] * 2)
    assert said is not None and "Spark's workers run /usr/bin/python3" in said and "PYSPARK_PYTHON" in said
