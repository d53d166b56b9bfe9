"""`python -m crash N`: so many more iterations on each store, then the report of all that the journal has."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from crash import disks, report, run

THROUGH_SPARK = [store + way for way in (run.SPARK, run.KAFKA, run.CLUSTER) for store in ("postgres", "delta")]

STORES = ("postgres", "delta", "delta-az", "delta-s3", *THROUGH_SPARK)


def main() -> None:
    """Exit code 1 where anything was ever lost, doubled or contradictory."""
    parser = argparse.ArgumentParser(prog="python -m crash", description=__doc__)
    parser.add_argument("count", type=int, help="iterations more, of each store")
    parser.add_argument("--store", choices=STORES, action="append", help="default: postgres and delta")
    parser.add_argument("--journal", type=Path, default=Path(".crash/journal.jsonl"), help="goes on where it ends (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="loops at once, each with servers of its own; they mostly wait (default: 1)")
    parser.add_argument("--job", type=int, nargs=2, metavar=("FIRST", "OF"), help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no iteration after so many, for each store")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers stopped, file systems unmounted
    for kind in asked.store or STORES[:2]:
        if asked.job is None and asked.jobs > 1:
            _share(kind, asked)
        else:
            _loop(kind, asked)
    if asked.job is not None:
        return
    entries = run.read(asked.journal)
    totals = report.totals(entries)
    asked.journal.with_suffix(".json").write_text(json.dumps({"totals": totals, "faults": report.summary(entries)}, indent=1) + "\n")
    asked.journal.with_suffix(".md").write_text(report.page(entries))
    print(report.page(entries))
    raise SystemExit(any(store["wrong_seeds"] for store in totals.values()))


def _loop(kind: str, asked: argparse.Namespace) -> None:
    """One loop, in this process."""
    disks.again([sys.executable, "-m", "crash", *sys.argv[1:]])
    first, of = asked.job or (run.next_seed(kind, asked.journal), 1)
    run.run(kind, range(first, first + asked.count * of, of), asked.journal, time.monotonic() + 60 * asked.minutes)


def _share(kind: str, asked: argparse.Namespace) -> None:
    """Processes that take every so many-th seed."""
    first, own = run.next_seed(kind, asked.journal), ["--store", kind, "--journal", asked.journal, "--minutes", asked.minutes]
    counts = [len(range(job, asked.count, asked.jobs)) for job in range(asked.jobs)]
    jobs = [[count, *own, "--job", first + number, asked.jobs] for number, count in enumerate(counts)]
    running = [subprocess.Popen([sys.executable, "-m", "crash", *map(str, job)]) for job in jobs]
    try:
        failed = [process.args for process in running if process.wait()]
    finally:
        for process in running:
            process.terminate()
    assert not failed, f"these ended with an error: {failed}"


if __name__ == "__main__":
    main()
