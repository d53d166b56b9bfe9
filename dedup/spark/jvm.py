"""What became of the JVM that this process has started. Called where an error of Spark may be its end."""

from __future__ import annotations

import subprocess
from typing import Any

try:
    from pyspark import SparkContext

    Context: Any = SparkContext
except ImportError:  # Spark Connect's client has no JVM
    Context = None

SECONDS = 20.0
"""For the exit of a JVM whose context has stopped: it runs its hooks first."""


def exit_code() -> int | None:
    """Of that process; None where it works on, or where somebody else has started it (spark-submit, a notebook, Spark Connect)."""
    process = getattr(getattr(Context, "_gateway", None), "proc", None)
    if process is None or _works():
        return None
    try:
        return int(process.wait(SECONDS))
    except subprocess.TimeoutExpired:
        return None


def _works() -> bool:
    """Whether it answers, and its context has not stopped by itself; one that this process stopped is forgotten here."""
    context = Context._active_spark_context
    try:
        return context is None or not context._jsc.sc().isStopped()
    except Exception:  # noqa: BLE001 - of py4j, of sockets
        return False
