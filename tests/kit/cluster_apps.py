"""Applications on a cluster (kit.spark_cluster): the driver of each is a process of its own, which takes one task after the other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from kit.cluster_driver import ANSWER
from kit.cluster_ship import packed
from kit.foreach_kit import classic
from kit.paths import environment
from kit.servers import die_with_parent
from kit.spark_cluster import ADDRESSES, MARK, PATIENCE, Cluster

CONF = {
    "spark.driver.memory": "768m",
    "spark.driver.host": ADDRESSES[0],
    "spark.driver.bindAddress": ADDRESSES[0],
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
}
"""What an application needs to be small, and nothing that changes what it does."""


class Driver:
    """The process of one application on the cluster. What it says is in `said`."""

    def __init__(self, cluster: Cluster, conf: Mapping[str, str], python: str) -> None:
        self._log = cluster.home / f"log-{time.monotonic_ns()}"
        local = str(cluster.home / "tmp")
        around = {**classic(), "PYTHONPATH": environment()["PYTHONPATH"], "PYSPARK_PYTHON": python, MARK: str(cluster.folder)}
        around |= {"TMPDIR": local, "SPARK_LOCAL_DIRS": local}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kit.cluster_driver", json.dumps({**CONF, "spark.master": cluster.url, **conf})],
                env=around,
                cwd=cluster.home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def alive(self) -> bool:
        """Whether it takes tasks."""
        return self._process.poll() is None

    def give(self, **task: Any) -> None:
        """A task, without waiting for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What it answers to the task. Raises AssertionError with what it said where it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError(f"the driver has ended: {self.said()}")

    def ask(self, **task: Any) -> Any:
        """Give it a task; returns the answer."""
        self.give(**task)
        return self.answer()

    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """End it, and all below it: the cluster's cores are free then."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


class Applications:
    """One application at a time, which has all cores of the cluster: it is kept until a test needs another one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._driver: Driver | None = None
        self._conf: Mapping[str, str] = {}

    def with_wheel(self, **conf: str) -> Driver:
        """The wheel in `spark.submit.pyFiles`. Spark takes archives by their ending: as `.whl` it would not be on the path."""
        shipped = self._cluster.home / "dedup_spark.zip"
        if not shipped.exists():
            shutil.copy(self._cluster.wheel, shipped)
        return self.start({"spark.submit.pyFiles": str(shipped), **conf}, str(self._cluster.python))

    def packed(self, **conf: str) -> Driver:
        """An environment in `spark.archives`."""
        folder = self._cluster.home / "packed"
        archive = folder.with_suffix(".tar.gz") if folder.exists() else packed(folder, self._cluster.wheel)
        return self.start({"spark.archives": f"{archive}#packed", **conf}, "./packed/bin/python")

    def start(self, conf: Mapping[str, str], python: str) -> Driver:
        """The application with these settings, on a cluster that has all its workers."""
        self._cluster.mend()
        if self._driver is None or conf != self._conf or not self._driver.alive:
            self.stop()
            self._conf, self._driver = conf, Driver(self._cluster, conf, python)
        return self._driver

    def stop(self) -> None:
        """End the one that runs."""
        if self._driver is not None:
            self._driver.stop()
        self._driver = None
