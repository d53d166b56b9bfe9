"""`python -m crash N`: so many more iterations on each store, then the report of all that the journal has."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from crash import disks, report, run

STORES = ("postgres", "delta", "postgres+spark", "delta+spark", "postgres+kafka", "delta+kafka")


def main() -> None:
    """Exit code 1 where anything was ever lost, doubled or contradictory."""
    parser = argparse.ArgumentParser(prog="python -m crash", description=__doc__)
    parser.add_argument("count", type=int, help="iterations more, of each store")
    parser.add_argument("--store", choices=STORES, action="append", help="default: postgres and delta")
    parser.add_argument("--journal", type=Path, default=Path(".crash/journal.jsonl"), help="goes on where it ends (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no iteration after so many, for each store")
    asked = parser.parse_args()
    disks.again([sys.executable, "-m", "crash", *sys.argv[1:]])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers stopped, file systems unmounted
    for kind in asked.store or STORES[:2]:
        run.run(kind, asked.count, asked.journal, time.monotonic() + 60 * asked.minutes)
    entries = run.read(asked.journal)
    totals = report.totals(entries)
    asked.journal.with_suffix(".json").write_text(json.dumps({"totals": totals, "faults": report.summary(entries)}, indent=1) + "\n")
    asked.journal.with_suffix(".md").write_text(report.page(entries))
    print(report.page(entries))
    raise SystemExit(any(store["wrong_seeds"] for store in totals.values()))


if __name__ == "__main__":
    main()
