"""`python -m benchmarks`: every measure, one after another; a table, and latest.json beside this file."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.run import PARTS, run
from benchmarks.stream import Sizes

LATEST = Path(__file__).with_name("latest.json")


def main() -> None:
    """Run what was asked for; latest.json is written where that was everything. What `benchmarks.growth` put there stays."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default: all, and latest.json is written")
    parser.add_argument("--warm", type=int, default=Sizes.warm, help="how many of them come first and do not count (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=Sizes.batches, help="batches of each contest (default: %(default)s)")
    parser.add_argument(
        "--duplicates", type=float, default=Sizes.duplicates, help="share of duplicates among events (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="put what single parts measure into latest.json, beside what is there")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    measures, seconds = run(Sizes(batches=asked.batches, warm=asked.warm, duplicates=asked.duplicates), asked.parts or list(PARTS))
    report.show(measures, seconds, Console())
    if asked.keep or not asked.parts:
        report.merge(measures, LATEST)


if __name__ == "__main__":
    main()
