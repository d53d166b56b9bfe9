"""`python -m benchmarks.restart`: what a start of a consumer on Delta takes beside many reservations, with its files of keys and without.

The ledger is filled by the store's own transactions. Each start is a process of its own. Its time ends with the first answer: which of
50,000 new keys are known. Its memory is the most that the process has had when all keys are open. Then the process has to know keys that
were reserved.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from benchmarks import report
from benchmarks.reserved import NAME, keys, reserve
from benchmarks.stream import Seconds, middle
from dedup.delta import DeltaStore

STEP, ASKED = 1_000_000, 50_000
STARTS = 5


def start(folder: str, step: int) -> dict[str, float]:
    """One start in this process: seconds and MB."""
    new, old = keys(ASKED, 0)["key"], keys(step, 1)["key"][:ASKED]
    began = time.perf_counter()
    with closing(DeltaStore(folder)) as store, store._states.caught_up(NAME) as state:
        assert state.reserved()  # opens them all
        memory, found = most_memory(), state.probe(new)[0].sum()
        taken = {"seconds": time.perf_counter() - began, "mb": memory}
        assert not found and state.probe(old)[0].all(), "the answers are wrong"
        return {**taken, "reserved": state.reserved(), "used": _memory_in_use()}


def most_memory() -> float:
    """MB of this process until now; `ru_maxrss` would be that of its parent, if that had more."""
    return _status("VmHWM")


def _memory_in_use() -> float:
    """MB of this process once allocators have given back what they keep."""
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> float:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024


def started(folder: Path, step: int) -> dict[str, float]:
    """One start in a process of its own."""
    line = [sys.executable, "-m", "benchmarks.restart", "--start", str(folder), "--step", str(step)]
    return dict(json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout))


def measured(folder: Path, count: int, step: int = STEP, starts: int = STARTS) -> tuple[list[report.Measure], Seconds]:
    """Starts that open files, beside one that has to read the ledger. In `ratio` is the value itself. Verified."""
    with closing(DeltaStore(str(folder))) as store:
        reserve(store, count, step=step)
    ours = [started(folder, step) for _ in range(starts)]
    shutil.rmtree(folder / "keys", ignore_errors=True)
    other = started(folder, step)
    assert {told["reserved"] for told in (*ours, other)} == {count}, "keys are missing"
    name, found = f"delta/restart_{count // 1_000_000}m", []
    for unit, key in (("s", "seconds"), ("MB", "mb")):
        mine = middle([told[key] for told in ours])
        found.append(report.Measure(f"{name}_{unit.lower()}", round(mine, 2), round(other[key], 2), unit, round(mine, 2), "lower"))
    return found, {"opens files": [told["seconds"] for told in ours], "reads the ledger": [other["seconds"]]}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.add_argument("--reservations", type=int, default=100_000_000, help="default: %(default)s")
    parser.add_argument("--step", type=int, default=STEP, help="keys of a transaction (default: %(default)s)")
    parser.add_argument("--start", metavar="FOLDER", help="start there, and print what it took")
    parser.add_argument("--keep", action="store_true", help="put the numbers into latest.json")
    asked = parser.parse_args()
    if asked.start:
        print(json.dumps(start(asked.start, asked.step)))
        return
    with tempfile.TemporaryDirectory(prefix="dedup-restart-") as home:
        told, spread = measured(Path(home), asked.reservations, asked.step)
    report.show(told, spread, Console())
    if asked.keep:
        report.merge(told, Path(__file__).parent / "latest.json")


if __name__ == "__main__":
    main()
