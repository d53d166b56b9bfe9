"""What makes tests cheap whichever they are: files in memory, JVMs that compile quickly, less searching for garbage, fewer threads."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

MEMORY, ENOUGH = Path("/dev/shm"), 8 << 30
"""A file system in memory, and how many bytes of it and of memory are free where the tests write there. Creating and removing a file costs
a tenth of what it costs on a disk, and a killed process leaves it behind just as well."""

LASTING = "-XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m -XX:-UseCodeCacheFlushing"
"""For a session of hours: after some thirty tests whose commits Spark makes, the next ones take two thirds of the CPU. Throwing code out of
the cache, and compiling it again, takes a sixth of a long session's."""

JVM = f"-XX:TieredStopAtLevel=1 {LASTING}"
"""Small actions never gain what compiling better costs: a session of Spark that commits three times takes half of the CPU."""

LASTS = "DEDUP_TEST_LASTS"
"""Variable of a run whose sessions are worth it."""

INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
"""Settings of a session that interprets its plans, and plans each once: for a few rows, compiling them and planning what is left of them
again costs more than running them. The full run does both."""


def archive() -> Path:
    """Where kit.class_archive keeps Spark's classes: it belongs to this environment's Spark."""
    return Path(sys.prefix) / "spark.jsa"


def use_memory() -> None:
    """For temporary files, where there is enough of it; whoever sets TMPDIR decides."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir():
        return
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    if min(available, shutil.disk_usage(MEMORY).free) >= ENOUGH:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)  # what failed tests wrote stays until the next run
        os.environ["TMPDIR"] = os.environ["SPARK_LOCAL_DIRS"] = tempfile.tempdir = _folder()


def _folder() -> str:
    """Anybody may write there, as in /tmp; removed with what killed processes left in it when the first process of the run ends."""
    folder = tempfile.mkdtemp(prefix="dedup-tests-", dir=MEMORY)
    Path(folder).chmod(0o1777)
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork ends, too
        shutil.rmtree(folder, ignore_errors=True)


def compile_quickly() -> None:
    """For every JVM that spark-submit starts, the one of a session, too, and for Kafka's; whoever sets these variables decides."""
    shared = f" -XX:SharedArchiveFile={archive()} -Xlog:disable -Xlog:all=error:stderr" if archive().exists() else ""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", (LASTING if LASTS in os.environ else JVM) + shared)
    os.environ.setdefault("DEDUP_TEST_JVM", JVM)


def keep_what_is_collected() -> None:
    """Search for garbage only behind the tests' collection, and never among what it made: modules and tests stay until the end."""
    gc.freeze()
    gc.enable()


def use_one_thread() -> None:
    """For delta-rs, in this process and those that it starts: for a few rows, waking a second thread costs more than it does."""
    os.environ.setdefault("TOKIO_WORKER_THREADS", "1")
