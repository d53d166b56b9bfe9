"""A dispatcher in a process of its own, to be killed: started by children.py. What it sends it appends to a file, a line a message."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dedup.outbox import Call, Dispatcher, Message


class File:
    """The receiver: a file, with a lock for each message, and a moment's work."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, messages: Sequence[Message]) -> None:
        for message in messages:
            with open(self._path, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(b"%s %s %s\n" % (message.key or b"-", message.body or b"-", message.id.encode()))


def main(task: dict[str, Any]) -> None:
    """Send what waits, or die right before the n-th of a step."""
    from kit.places import place_of

    place = place_of(task["kind"], task["place"])
    left = {"n": task.get("nth", 1)}

    def on_step(name: str) -> None:
        if name == task.get("die_at"):
            left["n"] -= 1
            if left["n"] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    dispatcher = Dispatcher(place.store().outbox("shop"), Call(File(task["file"])), limit=task.get("limit", 64), on_step=on_step)
    if "until" not in task:
        dispatcher.once()
        return
    stop = threading.Event()
    threading.Thread(target=_wait, args=(task["until"], stop), daemon=True).start()
    dispatcher.run(stop, every=0.02)


def _wait(file: str, stop: threading.Event) -> None:
    while not Path(file).exists():
        time.sleep(0.02)
    stop.set()
