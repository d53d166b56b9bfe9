"""`make test-full`: all tests, in parts that can be run alone.

`python -m kit.parts list` names the parts; `... brokers docs` runs two of them, without a name all are run. `--left` leaves out
what `make test` has run already. `--until SECONDS` stops at that moment of the system's clock: no part is begun then, and one that runs is
ended. `--turn N` begins with the Nth part and comes to those before it last. The last lines say what was run and what was not; the exit
code is 1 where a test failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kit.cheap import LASTS
from kit.paths import ROOT, environment

OK, FAILED, STOPPED, EMPTY = 0, 1, 2, 5
"""pytest's exit codes: STOPPED where it was interrupted and no test had failed (tests/fixtures/rooms.py), EMPTY where none was selected."""

CORES = len(os.sched_getaffinity(0))

GRACE = 300.0
"""Seconds for a run that is stopped to end its servers."""


@dataclass(frozen=True)
class Part:
    """Some rooms, or the tests of them that a marker selects."""

    name: str
    rooms: tuple[str, ...]
    marked: str = ""
    about: str = ""
    lasts: bool = False
    """Hours in Spark's JVM: it compiles well, and there is none beyond one for each core."""


PARTS = (
    Part("crash", ("crash",), "not spark and not objects", "each way in which each call, file operation and step may fail, and the loops"),
    Part("brokers", ("brokers",), "", "Kafka and Event Hubs: streams that are killed, pipelines of messages"),
    Part("delta-spark", ("contract",), "spark and not again", 'the contract on DeltaStore(engine="spark")', lasts=True),
    Part("postgres", ("stores/postgres",), "", "the contract under the least-privilege role"),
    Part("contract", ("contract",), "not spark and not objects", "on PostgreSQL and Delta"),
    Part("objects", ("contract", "crash"), "objects and not again", "the contract on Azure Blob storage and on S3, requests that fail"),
    Part("values", ("contract",), "again", "the contract on slow stores, with values left out by `delta-spark` and `objects`", lasts=True),
    Part("delta", ("stores/delta",)),
    Part("spark", ("spark",)),
    Part("others", ("unit", "cli", "docs", "packaging"), "", "all rooms that need minutes only"),
    Part("full", ("full",), "", "Spark Connect, a cluster, real inputs, limits of memory, Microsoft's own tests, tests of the benchmarks"),
    Part("simulation", ("simulation",), "", "100,000 schedules"),
    Part("crash-spark", ("crash",), "spark", "drivers, executors and brokers that die; processes that commit by Spark"),
)


def command(part: Part, *, left: bool, jobs: int = CORES, options: Sequence[str] = ()) -> list[str]:
    """The line that runs it."""
    marked = " and ".join(filter(None, [part.marked, "full" if left else ""]))
    spread = ["-n", str(min(jobs, CORES) if part.lasts else jobs), "--dist", "loadgroup", "--no-loadscope-reorder"]
    rooms = [str(ROOT / "tests" / room) for room in part.rooms]
    return [sys.executable, "-m", "pytest", "-m", marked, *spread, *options, *rooms]


def run_contract(marked: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The contract suite, with these variables of the environment, in one process beside the one that asks."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, str(ROOT / "tests" / "contract")]
    return subprocess.run(line, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, check=False)


def run(line: Sequence[str], is_over: Callable[[], bool], **variables: str) -> int:
    """pytest's exit code. Once it is over the run is interrupted as by Control-C: it says what has failed, and ends its servers."""
    process = subprocess.Popen(line, cwd=ROOT, env=environment(**variables), preexec_fn=_heeds_interrupts)
    while process.poll() is None and not is_over():
        time.sleep(0.2)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return FAILED  # nobody knows


def _heeds_interrupts() -> None:
    """A shell that starts something in its background has it ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def play(parts: Sequence[Part], *, left: bool, until: float, jobs: int = CORES, options: Sequence[str] = ()) -> dict[str, int | None]:
    """Part -> its exit code, None where it was not begun."""
    ended: dict[str, int | None] = dict.fromkeys(part.name for part in parts)
    for part in parts:
        if time.time() < until:
            print(f"== {part.name}: {part.about or 'all of it'}", flush=True)
            line = command(part, left=left, jobs=jobs, options=options)
            ended[part.name] = run(line, lambda: time.time() >= until, **({LASTS: "1"} if part.lasts else {}))
    return ended


def told(ended: dict[str, int | None]) -> list[str]:
    """A line for each kind of end."""
    kinds = {"passed": {OK, EMPTY}, "stopped without a failure, since time was over": {STOPPED}, "not begun, since time was over": {None}}
    lines = {kind: [name for name, code in ended.items() if code in codes] for kind, codes in kinds.items()}
    lines["FAILED"] = [name for name, code in ended.items() if code not in (OK, EMPTY, STOPPED, None)]
    return [f"parts of the full run {kind}: {', '.join(names)}" for kind, names in lines.items() if names]


def in_turn(parts: Sequence[Part], turn: int) -> list[Part]:
    """All of them, another one first at each turn."""
    first = turn % len(parts)
    return [*parts[first:], *parts[:first]]


def _chosen(names: Sequence[str]) -> list[Part]:
    known = {part.name: part for part in PARTS}
    wrong = [name for name in names if name not in known]
    if wrong:
        sys.exit(f"There is no part {', '.join(wrong)}. `make test-full PART=list` names them.")
    return [known[name] for name in names] or list(PARTS)


def main() -> int:
    """Run parts, or name them."""
    parser = argparse.ArgumentParser(prog="python -m kit.parts", description=__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--left", action="store_true")
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--turn", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=CORES)
    given, options = parser.parse_known_args()
    if given.parts == ["list"]:
        print(*(f"{part.name:12} {part.about or ', '.join(part.rooms)}" for part in PARTS), sep="\n")
        return OK
    ended = play(in_turn(_chosen(given.parts), given.turn), left=given.left, until=given.until, jobs=given.jobs, options=options)
    print(*told(ended), sep="\n")
    return OK if set(ended.values()) <= {OK, EMPTY, STOPPED, None} else FAILED


if __name__ == "__main__":
    sys.exit(main())
