"""A consumer on object storage in a process of its own, beside a proxy in the process that steers it: delta-rs may hold the GIL of its own
process while it waits for an answer. `Steered` is how it is steered: one step, one word or error back.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from dedup.delta import keys
from kit.orders import batch, consumer, flatten, orders
from kit.paths import environment
from kit.places import ON_DELTA

EVENTS = 5

QUICK = {"max_retries": "0"}
"""Settings with which a request that fails is not tried again."""


class Worker:
    """What the process does. The number of the next batch is kept in a file, as Spark keeps it in its checkpoint."""

    def __init__(self, kind: str, where: str, progress: str, options: dict[str, str]) -> None:
        self.place, self._progress, self._options = ON_DELTA[kind](where), Path(progress), options
        self._consumer: Any = None

    @property
    def next(self) -> int:
        """The number of the next batch."""
        return int(self._progress.read_text()) if self._progress.exists() else 0

    def start(self) -> None:
        """A new store, and a new consumer."""
        store = self.place.store(storage_options=self._options or None)
        self._consumer = consumer(store, takeover_after=60.0)

    def many(self) -> None:
        """From now on as many keys stay in memory as for users: a batch writes no file of keys."""
        keys.FLUSH_ROWS = 1_000_000

    def batch(self) -> None:
        """Five new events into the sink `orders`."""
        number = self.next
        self._consumer(batch(*orders(range(EVENTS * number, EVENTS * (number + 1)))), number)
        self._progress.write_text(str(number + 1))

    def merge(self) -> None:
        """Five new events into the sink `balances`, by a merge."""
        before, self._consumer._handler = self._consumer._handler, _merge
        try:
            self.batch()
        finally:
            self._consumer._handler = before


class Steered:
    """The process, from outside."""

    def __init__(self, kind: str, where: str, progress: Path, settings: dict[str, str], **options: str) -> None:
        line = [sys.executable, "-m", "kit.object_child", kind, where, str(progress), *(f"{k}={v}" for k, v in options.items())]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(**settings))

    def do(self, step: str) -> str:
        """Do a step; returns "ok", or the error's name and text."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(step, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        assert answer, f"the process ended in {step}: {self._process.wait()}"
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def _merge(rows: Any, tx: Any) -> None:
    tx.merge(flatten(rows), "balances", keys="id", newer_by="amount")


def main(kind: str, where: str, progress: str, *options: str) -> None:
    """Do what each line of the standard input says."""
    worker = Worker(kind, where, progress, dict(one.split("=", 1) for one in options))
    for line in sys.stdin:
        try:
            getattr(worker, line.strip())()
            print("ok", flush=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side hears of it
            print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
