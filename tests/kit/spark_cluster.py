"""A Spark standalone cluster for tests: a real master and two workers of PySpark's own jars, on two addresses of this machine.

What a worker starts sees no checkout, no file of the driver and none of the other worker: `unshare` gives each worker a view of the file
system in which these folders are empty. They share `Cluster.shared` alone. The workers' Python (`Cluster.python`) has the packages of
this environment but dedup, which users ship: as a wheel, or in a packed environment. Plain functions, no pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyspark

from kit.cluster_ship import environment, wheel
from kit.maven import java
from kit.paths import ROOT
from kit.servers import die_with_parent

ADDRESSES = ("127.0.0.1", "127.0.0.2")
"""Of the workers: Spark starts the second attempt at a slow task on another host alone."""

PATIENCE = 180.0
"""Seconds that something may take to begin or to end."""

SPARK_HOME = Path(pyspark.__file__).resolve().parent
PREFIX = Path(sys.prefix).resolve()
SMALL = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dspark.master.rest.enabled=false")
MARK = "DEDUP_TEST_CLUSTER"
"""Variable of everything that a worker starts: the folder of its cluster."""


def until(condition: Callable[[], Any], what: Callable[[], str]) -> None:
    """Wait for it. Raises AssertionError with what it is."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE:.0f} s: {what()}"
        time.sleep(0.1)


class Cluster:
    """A master and two workers, below a folder.

    `shared` is what all of them can reach, `home` the driver's own, in which workers cannot write. `apart` each of them has for itself.

    Args:
        cores: of each worker.
    """

    def __init__(self, folder: Path, cores: int = 1) -> None:
        self.folder, self.shared, self.home, self.apart = folder, folder / "shared", folder / "driver", folder / "apart"
        for each in (self.shared, self.home / "tmp", self.apart):
            each.mkdir(parents=True)
        self.url = self._web = ""
        self._cores = cores
        self.python = environment(folder / "environment")
        self.wheel = wheel(folder / "wheel")
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """The master and both workers. Raises AssertionError with what they said where they do not start."""
        self._master = self._run("master", ["--host", ADDRESSES[0], "--port", "0", "--webui-port", "0"])
        until(lambda: "New state: ALIVE" in self._said("master"), lambda: f"a master: {self._said('master')}")
        ports = dict(re.findall(r"Successfully started service '(\w+)' on port (\d+)", self._said("master")))
        self.url, self._web = f"spark://{ADDRESSES[0]}:{ports['sparkMaster']}", f"http://{ADDRESSES[0]}:{ports['MasterUI']}"
        self.mend()

    def mend(self) -> None:
        """Start the workers that are not there, and wait until the master knows both and no dead one's cores."""
        for number in range(len(ADDRESSES)):
            if number not in self._workers or self._workers[number].poll() is not None:
                self._workers[number] = self._start_worker(number)
        said = lambda: "two workers: " + "".join(self._said(f"worker{number}") for number in self._workers)  # noqa: E731
        until(lambda: self._state().get("aliveworkers") == len(ADDRESSES), said)

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        homes = [self.folder / f"worker{each}" for each in range(len(ADDRESSES))]
        for folder in (each / name for each in homes for name in ("work", "tmp", "spare")):
            folder.mkdir(parents=True, exist_ok=True)
        home = homes.pop(number)
        options = [
            "--host",
            ADDRESSES[number],
            "--cores",
            str(self._cores),
            "--memory",
            f"{self._cores}g",
            "--work-dir",
            str(home / "work"),
            "--webui-port",
            "0",
        ]
        return self._run(home.name, [*options, self.url], hide=[ROOT, self.apart, *homes], close=[self.home])

    def _run(self, name: str, options: Sequence[str], hide: Sequence[Path] = (), close: Sequence[Path] = ()) -> subprocess.Popen[bytes]:
        home, kind = self.folder / name, "master.Master" if name == "master" else "worker.Worker"
        home.mkdir(exist_ok=True)
        line = [java(), "-cp", f"{SPARK_HOME}/jars/*", *SMALL, f"org.apache.spark.deploy.{kind}", *options]
        around = {name: value for name, value in os.environ.items() if name in ("PATH", "JAVA_HOME", "LANG")}
        around |= {"HOME": str(home), "TMPDIR": str(home / "tmp"), "SPARK_LOCAL_DIRS": str(home / "tmp"), "SPARK_HOME": str(SPARK_HOME)}
        around |= {"SPARK_LOCAL_IP": ADDRESSES[1 if name == "worker1" else 0], "SPARK_SCALA_VERSION": _scala()}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*(_hiding(hide, close, home / "spare") if hide and can_hide() else ()), *line],
                env={**around, MARK: str(self.folder)},
                cwd=home,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _state(self) -> dict[str, Any]:
        """What the master says of itself; empty where it does not answer."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._web}/json/", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
        return {}

    def _said(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace")[-8000:] if log.exists() else ""

    def executor_of(self, pid: int) -> int:
        """The executor above this Python worker."""
        while pid > 1 and "CoarseGrainedExecutorBackend" not in _line(pid):
            pid = _parent(pid)
        assert pid > 1, "no executor above it"
        return pid

    def kill_executor(self, pid: int) -> None:
        """SIGKILL the executor above this Python worker; its worker starts another one."""
        os.kill(self.executor_of(pid), signal.SIGKILL)

    def kill_worker(self, pid: int) -> None:
        """SIGKILL the worker above this Python worker; its executor ends when it misses it. `mend` starts another one."""
        executor = self.executor_of(pid)
        worker = next(one for one in self._workers.values() if one.pid == _parent(executor))
        worker.kill()
        worker.wait()
        until(lambda: not Path(f"/proc/{executor}").exists(), lambda: "the end of the executor of a killed worker")

    def end(self) -> None:
        """End everything, with what outlives a worker."""
        for process in (*self._workers.values(), self._master):
            if process is not None:
                process.kill()
                process.wait()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.left(), lambda: f"the end of {self.left()}")

    def running(self, word: str) -> list[int]:
        """Processes of the cluster with this word in their command line, which the workers have begun."""
        found = []
        for pid in self.left():
            with contextlib.suppress(OSError):
                found += [pid] if word in _line(pid) else []
        return sorted(found)

    def left(self) -> list[int]:
        """Processes of the cluster: its variable is in their environment."""
        mark, found = f"{MARK}={self.folder}".encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def can_hide() -> bool:
    """Whether this user may give a process another view of the file system."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def _hiding(hide: Sequence[Path], close: Sequence[Path], spare: Path) -> list[str]:
    """The beginning of a command whose process sees these folders empty, but for installed packages; what is closed it cannot fill."""
    lines = [f"mount -t tmpfs none {folder}" for folder in hide] + [f"mount -t tmpfs -o ro none {folder}" for folder in close]
    if any(PREFIX.is_relative_to(folder) for folder in hide):
        lines = [f"mount --bind {PREFIX} {spare}", *lines, f"mkdir -p {PREFIX}", f"mount --bind {spare} {PREFIX}"]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(["set -e", *lines, 'exec "$@"']), "sh"]


def _scala() -> str:
    """Of PySpark's jars; Spark's own scripts know it."""
    (core,) = SPARK_HOME.glob("jars/spark-core_*.jar")
    return core.name.split("_")[1].split("-")[0]


def _line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@contextlib.contextmanager
def running_cluster(cores: int = 1) -> Iterator[Cluster]:
    """A cluster for the length of the block, then removed with all that it has started."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="spark-cluster-")).resolve()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = Cluster(folder, cores)
        stack.callback(cluster.end)
        cluster.start()
        yield cluster
