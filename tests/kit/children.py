"""Processes to be killed, made quickly: one server that has imported everything, and forks for each task.

`python -m kit.children` reads a line of JSON and answers with a number. A task names its `module`, whose `main(task)` the new process runs.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.paths import environment

RUNNING = 1_000
"""No exit code."""


class Nursery:
    """The server, seen from the test."""

    def __init__(self, folder: Path) -> None:
        self._server = _server()
        self._folder, self._children = folder, 0

    def _ask(self, **line: Any) -> int:
        """The server's answer. Whoever is interrupted here (by the time limit of a test) leaves a new server to the next test."""
        assert self._server.stdin and self._server.stdout
        try:
            self._server.stdin.write(json.dumps(line) + "\n")
            self._server.stdin.flush()
            return int(self._server.stdout.readline())
        except BaseException:
            self._replace()
            raise

    def _replace(self) -> None:
        """Kill the server and all its children, start another one."""
        os.killpg(self._server.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self._server:  # closes its pipes, of which one may hold what nobody reads, and waits for its end
            pass
        self._server = _server()

    def start(self, task: dict[str, Any]) -> Child:
        """A new process with this task, and what this one's environment says now of object storage."""
        self._children += 1
        errors = self._folder / f"errors{self._children}"
        around = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_"))}
        return Child(self._ask(task={"environ": around, **task}, errors=str(errors)), errors, self._ask)

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin and self._server.stdout
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kit.children"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Child:
    """A process with a task."""

    def __init__(self, pid: int, errors: Path, ask: Callable[..., int]) -> None:
        self.pid, self._errors, self._ask = pid, errors, ask
        self._code: int | None = None

    def wait(self) -> tuple[int, str]:
        """Its exit code (negative: the signal that ended it) and what it said on stderr."""
        if self._code is None:
            self._code = self._ask(pid=self.pid, flags=0)
        return self._code, self.said

    @property
    def ended(self) -> bool:
        """Whether it has."""
        if self._code is None and (code := self._ask(pid=self.pid, flags=os.WNOHANG)) != RUNNING:
            self._code = code
        return self._code is not None

    @property
    def said(self) -> str:
        """Its stderr so far."""
        return self._errors.read_text(errors="replace") if self._errors.exists() else ""

    def require_running(self) -> None:
        """It has not ended yet."""
        assert not self.ended, f"ended with {self._code}: {self.said}"

    def finish(self) -> None:
        """It must end well."""
        code, errors = self.wait()
        assert code == 0, errors

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        os.kill(self.pid, number)


def _serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            pid, status = os.waitpid(asked["pid"], asked["flags"])
            print(os.waitstatus_to_exitcode(status) if pid else RUNNING, flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            _be_child(asked["task"], asked["errors"])


def _be_child(task: dict[str, Any], errors: str) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = 1
    os.environ.update(task["environ"])
    try:
        importlib.import_module(task["module"]).main(task)
        code = 0
    except BaseException:  # noqa: BLE001 - it must not go on as the server
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for name in (
        "kit.child",
        "kit.child_letters",
        "kit.outbox_child",
        "kit.runner_child",
        "kit.slice_child",
        "dedup.delta",
        "dedup.postgres",
        "dedup.eventhub",
    ):
        importlib.import_module(name)
    _serve()
