"""Lanes on a Spark standalone cluster of two workers, and what can die of one: driver, executors, their Python workers, a worker."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from crash.drivers import Garage
from crash.lane import Lane
from crash.spark_lane import FAULTS as OF_DRIVERS
from crash.spark_lane import SparkLane, at_work, moment_of
from kit.cluster_apps import CONF
from kit.foreach_kit import classic
from kit.paths import TESTS, environment
from kit.spark_cluster import MARK, Cluster, running_cluster, until

EXECUTOR, PYTHON_WORKER = "CoarseGrainedExecutorBackend", "pyspark.daemon"

ALL = 2
"""Executors of one driver."""


class ClusterLane(SparkLane):
    """Its processes are drivers of applications on a cluster. Each application has an executor on both workers."""

    cluster: ClassVar[Cluster]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Garage]:
    """A cluster for the length of the block, and the garage of its drivers. Two of them may have their executors at once."""
    with running_cluster(cores=ALL) as cluster:
        ClusterLane.cluster = cluster
        conf = {**CONF, "spark.master": cluster.url, "spark.cores.max": str(ALL), "spark.submit.pyFiles": ",".join(_shipped(cluster))}
        local = str(cluster.home / "tmp")
        around = {**classic(), "PYTHONPATH": environment()["PYTHONPATH"], "PYSPARK_PYTHON": str(cluster.python)}
        around |= {MARK: str(cluster.folder), "TMPDIR": local, "SPARK_LOCAL_DIRS": local}
        with contextlib.closing(Garage(folder, [json.dumps(conf)], around)) as garage:
            yield garage


def _shipped(cluster: Cluster) -> list[str]:
    """The library as users ship it, and the handlers of the loops, which executors import."""
    library, handlers = cluster.home / "dedup_spark.zip", cluster.home / "handlers.zip"
    shutil.copy(cluster.wheel, library)
    with zipfile.ZipFile(handlers, "w") as out:
        for folder in ("crash", "kit"):
            for file in (TESTS / folder).rglob("*.py"):
                out.write(file, file.relative_to(TESTS))
    return [str(library), str(handlers)]


def _killed(word: str, kill: Callable[[int], None]) -> Callable[[Lane, random.Random], str]:
    def fault(lane: Lane, dice: random.Random) -> str:
        """Kill one of the processes with this word in their command line, or what is above it, in the middle of a batch."""
        assert isinstance(lane, ClusterLane)
        lane.nursery.retire()
        until(lambda: len(lane.cluster.running(EXECUTOR)) <= ALL, lambda: "the end of executors of drivers that have ended")
        driver = at_work(lane)
        while not lane.cluster.running(word) and not driver.ended:
            time.sleep(0.05)
        moment, found = moment_of(dice), lane.cluster.running(word)
        lane.missed = driver.ended or not found
        if not lane.missed:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                kill(dice.choice(found))
        lane.wait(driver)
        lane.cluster.mend()
        return f"{moment}, {len(found)} of them"

    return fault


def _sigkill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _kill_worker(pid: int) -> None:
    ClusterLane.cluster.kill_worker(pid)


FAULTS: dict[str, Callable[[Any, random.Random], str]] = {
    "Cluster: kill -9 of an executor": _killed(EXECUTOR, _sigkill),
    "Cluster: kill -9 of a worker, with its executors": _killed(EXECUTOR, _kill_worker),
    "Cluster: kill -9 of an executor's Python worker": _killed(PYTHON_WORKER, _sigkill),
    **{name.replace("Spark:", "Cluster:"): fault for name, fault in OF_DRIVERS.items() if "Python worker" not in name},
}
"""Of both stores."""
