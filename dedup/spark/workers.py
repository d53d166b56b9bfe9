"""Whether Spark's workers can run a consumer's tasks: those of all cores are asked for their interpreters and for what these lack.

Spark takes the interpreter of its workers from PYSPARK_PYTHON in the driver's environment, else `python3` of the PATH, which is not the one
of a virtual environment that was not activated. An executor that comes later is not asked: there an ImportError fails the batch and
parks nothing (deadletter/known.py). Called by dedup/spark/tasks.py before anything is written.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from checkpoint.errors import ConfigError
from deadletter.outage import words
from deadletter.redact import redact
from dedup.spark.session import ERRORS

NEEDED = ("numpy", "pyarrow", "dedup")
"""What every task imports."""

MOST = 1_000
"""Tasks that ask, at most."""

SEND = (
    "Install it for that interpreter, or send an environment that has it (spark.archives and PYSPARK_PYTHON). "
    "Send a module of your own with spark-submit --py-files, or SparkContext.addPyFile."
)
"""What to do where workers have the driver's interpreter."""

LOAD = (
    "Workers import the module of the handler, too, so what it reads then has to be there: set a variable of the environment for executors "
    "before Spark starts (spark.executorEnv.NAME), or read it inside the handler. Or take the driver: on='driver'."
)
"""What to do where a module fails as it is imported."""

_asked: set[tuple[str, str]] = set()
"""Spark application, consumer."""


def check(session: SparkSession, consumer: str, packed: Sequence[bytes]) -> None:
    """Ask by one job with a task for each core, once for each consumer and Spark application, unless it was refused.

    Args:
        packed: pickles that the tasks of this consumer will load.

    Raises:
        ConfigError: a worker's interpreter does not start, has another minor version, lacks packages, or cannot load what was packed.
    """
    asked = (_application(session), consumer)
    if asked in _asked:
        return
    problem = _problem(session, packed)
    if problem is not None:
        raise ConfigError(f"Consumer {consumer!r}: {problem}")
    _asked.add(asked)


def _application(session: SparkSession) -> str:
    """The application, or the session; empty where a platform shows neither: one process has one of them."""
    try:
        return str(session.sparkContext.applicationId)
    except (PySparkException, AttributeError):  # Spark Connect, or a platform that hides the context
        return str(getattr(session, "session_id", ""))


def _problem(session: SparkSession, packed: Sequence[bytes]) -> str | None:
    """What is wrong with a worker, and what to do. Raises what Spark raises for another reason."""
    try:
        answer, cores = F.udf(_question(packed), "string", useArrow=False), _cores(session)
        answers = [json.loads(row[0]) for row in session.range(0, cores, 1, cores).select(answer("id")).collect()]
    except ERRORS as error:
        problem = _known(words(error), _configured(session))
        if problem is None:
            raise
        return f"{problem} {_other_interpreter()}"
    return lacking(answers)


def lacking(answers: Sequence[Mapping[str, str]]) -> str | None:
    """What workers lack, and what to do; None: nothing.

    Args:
        answers: each with the `host`, its `path` and `version` of Python, what that `lacks`, and the error with which loading `fails`.
    """
    bad = [one for one in answers if one["lacks"]]
    if not bad:
        return _failing([one for one in answers if one["fails"]])
    first = bad[0]
    advice = SEND if first["path"] == sys.executable or len(bad) < len(answers) else _other_interpreter()
    return f"Spark's workers{_on(bad)} run {first['path']} (Python {first['version']}), which lacks {first['lacks']}. {advice}"


def _failing(bad: Sequence[Mapping[str, str]]) -> str | None:
    if not bad:
        return None
    told = redact(bad[0]["fails"])
    return f"Spark's workers{_on(bad)} cannot load the handler, or a module that it uses: {told}. {LOAD}"


def _on(answers: Sequence[Mapping[str, str]]) -> str:
    hosts = sorted({one["host"] for one in answers})
    return f" on {', '.join(hosts)}" if hosts != [platform.node()] else ""


def _cores(session: SparkSession) -> int:
    """How many tasks run at once; 1 on Spark Connect, which does not tell."""
    try:
        return min(MOST, max(1, session.sparkContext.defaultParallelism))
    except (PySparkException, AttributeError):
        return 1


def _configured(session: SparkSession) -> str:
    try:
        return str(session.sparkContext.pythonExec)
    except (PySparkException, AttributeError):  # Spark Connect does not tell
        return "another interpreter"


def _known(text: str, path: str) -> str | None:
    """What an error of a worker that does not get as far as the question means; None: something else."""
    if found := re.search(r"different version: (\S+) than", text):
        return f"Spark's workers run {path} (Python {found[1]}), and Spark needs one minor version of Python everywhere."
    if found := re.search(r'Cannot run program "([^"]+)"', text):
        return f"Spark cannot start {found[1]}, the interpreter of its workers."
    if found := re.search(r"No module named '([\w.]+)'", text):
        return f"Spark's workers run {path}, which lacks {found[1]}."
    return f"Spark's workers run {path}, which cannot start PySpark." if "Error from python worker" in text else None


def _other_interpreter() -> str:
    return (
        f"This process runs {sys.executable} (Python {platform.python_version()}). Name an interpreter of the workers with the same minor "
        f"version and the same packages before Spark starts: PYSPARK_PYTHON in the environment, or spark.pyspark.python for spark-submit. "
        f"Where workers run on this machine: export PYSPARK_PYTHON={shlex.quote(sys.executable)}"
    )


def _question(packed: Sequence[bytes]) -> Callable[[Any], str]:
    """What the worker runs. A function inside a function travels by value: the worker needs none of our modules for it."""
    needed = NEEDED

    def answer(_: Any) -> str:
        import importlib.util
        import json
        import pickle
        import platform
        import sys

        lacks, fails = [name for name in needed if importlib.util.find_spec(name) is None], ""
        try:
            for each in () if lacks else packed:
                pickle.loads(each)
        except ImportError as missing:
            lacks = [missing.name or str(missing)]
        except Exception as error:  # noqa: BLE001 - whatever a module raises when it is imported
            fails = f"{type(error).__name__}: {error}"
        found = {"host": platform.node(), "path": sys.executable, "version": platform.python_version()}
        return json.dumps({**found, "lacks": ", ".join(lacks), "fails": fails})

    return answer
