"""`python -m crash.each_file_call WAY`: a batch whose first file operation fails, then the second ... until it passes; JSON at the end.

Runs under LD_PRELOAD (crash/file_calls.py). After each failure: the same batch again, with a store that remembers nothing, and a count of
everything.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crash import child, file_calls, lane, log
from kit.orders import consumer
from kit.places import DeltaPlace

SEED, BATCHES = 6, 3
"""Of the log; the batch that fails is the last one."""


def run_batches(place: DeltaPlace, numbers: range) -> None:
    """With a store that remembers nothing of earlier ones."""
    run = consumer(place.store(), budget=None)
    run._handler = child.handle_all
    for number in numbers:
        run(log.planned(SEED, number), number)


def last_batch(place: DeltaPlace) -> str:
    """What it ended with."""
    try:
        run_batches(place, range(BATCHES - 1, BATCHES))
    except Exception as error:  # noqa: BLE001 - whatever it is: it is counted by its name
        return type(error).__name__
    return "passed"


def in_this_process(place: DeltaPlace, number: int, way: str, *, reads: bool) -> tuple[str, str]:
    """What the batch ended with, and which operation failed."""
    file_calls.arm(str(place.folder), number, way, reads=reads)
    try:
        return last_batch(place), file_calls.failed()
    finally:
        file_calls.arm("", 0, "passes")


def in_a_process_that_dies(place: DeltaPlace, number: int, way: str, *, reads: bool) -> tuple[str, str]:
    """The same; nothing is told of the operation but that it was reached. Raises RuntimeError where it was reached and nobody died."""
    pid = os.fork()  # nothing has been done with delta-rs in this process: it has no threads yet
    if not pid:
        os._exit(1 if in_this_process(place, number, way, reads=reads) != ("passed", "") else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"operation {number} was to kill the process, which ended with {code}")
    return ("killed", "?") if code else ("passed", "")


def in_a_new_process(work: Callable[[], Any]) -> Any:
    """What it returns, as JSON; delta-rs does not survive a fork, so that the process that forks must not use it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return json.loads(told)


def recovered(place: DeltaPlace) -> Any:
    """What is wrong after the same batch was run again."""
    run_batches(place, range(BATCHES - 1, BATCHES))
    return lane.wrong(place, SEED, BATCHES)


def each(way: str, *, reads: bool, stride: int) -> dict[str, Any]:
    """How many operations failed, what the batch ended with, and what was wrong afterwards."""
    home = Path(tempfile.mkdtemp(prefix="file-calls-"))
    place, kept = DeltaPlace(home / "place"), home / "kept"
    dies = way.startswith("killed")
    prepare(place, kept)
    ended, wrong, number, tried = Counter[str](), [], 1, 0
    while True:
        shutil.rmtree(place.folder)
        shutil.copytree(kept, place.folder)
        how, failed = (in_a_process_that_dies if dies else in_this_process)(place, number, way, reads=reads)
        if not failed:
            break
        tried, ended[how] = tried + 1, ended[how] + 1
        found = in_a_new_process(lambda: recovered(place)) if dies else recovered(place)
        if any(found):
            wrong.append({"call": number, "failed": failed, "ended": how, "wrong": found})
        number += stride
    shutil.rmtree(home)
    return {"way": way, "reads": reads, "calls": number - 1, "tried": tried, "ended": dict(ended), "wrong": wrong}


def prepare(place: DeltaPlace, kept: Path) -> None:
    """All batches but the last one are done."""

    def work() -> None:
        place.folder.mkdir()
        child.create(place)
        run_batches(place, range(BATCHES - 1))

    in_a_new_process(work)
    shutil.copytree(place.folder, kept)


def main() -> None:
    """Exit code 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m crash.each_file_call", description=__doc__)
    parser.add_argument("way", choices=file_calls.WAYS[1:])
    parser.add_argument("--reads", action="store_true", help="let operations that read fail, too")
    parser.add_argument("--stride", type=int, default=1, help="only every so many")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    told = each(asked.way, reads=asked.reads, stride=asked.stride)
    print(json.dumps(told))
    raise SystemExit(bool(told["wrong"]))


if __name__ == "__main__":
    main()
