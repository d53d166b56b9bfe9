"""What became of the JVM that this process has started. Called where an error of Spark may be its end."""

from __future__ import annotations

import subprocess

from pyspark import SparkContext

SECONDS = 20.0
"""For the exit of a JVM whose context is stopped: it runs its hooks first. Two seconds were seen."""


def exit_code() -> int | None:
    """Of that process; None where it works on, or where somebody else has started it (spark-submit, a notebook, Spark Connect)."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None or _works():
        return None
    try:
        return int(process.wait(SECONDS))
    except subprocess.TimeoutExpired:
        return None


def _works() -> bool:
    """Whether it answers, and its context is not stopped."""
    context = SparkContext._active_spark_context
    try:
        return context is not None and not context._jsc.sc().isStopped()
    except Exception:  # noqa: BLE001 - of py4j, of sockets
        return False
