"""`python -m benchmarks.scale`: constants of docs/explanation/scale.md that no other benchmark measures, and the tables of that page.

Constants go to scale.json, each with the part that has measured it and the day. The tables are computed from them and from latest.json.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import scale_delta, scale_page, scale_postgres
from benchmarks.growth import LARGE
from benchmarks.run import server
from benchmarks.scale_delta import Amounts, Values
from benchmarks.scale_model import CONSTANTS, Constant, known

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "scale.md"

SERVER = {**LARGE, "checkpoint_timeout": "1h"}
"""No checkpoint but those that are asked for."""

Part = Callable[[Path, Amounts], Values]


def _on_server(measure: Callable[[str, Amounts], Values]) -> Part:
    def part(folder: Path, amounts: Amounts) -> Values:
        """Measure on a server of its own."""
        with server(SERVER) as dsn:
            return measure(dsn, amounts)

    return part


PARTS: dict[str, Part] = {
    "delta_requests": scale_delta.requests,
    "delta_size": scale_delta.size,
    "delta_start": scale_delta.start,
    "delta_ledger": scale_delta.ledger,
    "delta_filter": lambda folder, amounts: scale_delta.filtered(amounts),
    "postgres_filter": lambda folder, amounts: scale_postgres.filtered(amounts),
    "postgres_process": _on_server(scale_postgres.process),
    "postgres_calls": _on_server(scale_postgres.calls),
    "postgres_log": _on_server(scale_postgres.log),
    "postgres_large_index": _on_server(scale_postgres.log_of_large_index),
}


def measured(names: list[str], amounts: Amounts) -> list[Constant]:
    """What these parts measure, as of today. Raises AssertionError where something was not written as it has to be."""
    today, found = dt.datetime.now(dt.UTC).date().isoformat(), list[Constant]()
    for name in names:
        print(f"{time.strftime('%H:%M')} {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="dedup-scale-") as home:
            values = PARTS[name](Path(home), amounts)
        found += [Constant(constant, value, unit, f"scale/{name}", today) for constant, (value, unit) in values.items()]
    return found


def keep(new: list[Constant], path: Path) -> None:
    """Put these into scale.json, in place of those of their names. Crash: the old file is there or the new one."""
    old = known(path) if path.exists() else {}
    kept = {**old, **{one.constant: one for one in new}}
    text = json.dumps([kept[name]._asdict() for name in sorted(kept)], indent=1)
    path.with_suffix(".new").write_text(text + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)


def write(page: Path) -> None:
    """Put the tables into the page, as the constants give them now. Crash: the old page is there or the new one."""
    text = scale_page.filled(page.read_text(encoding="utf-8"))
    page.with_suffix(".new").write_text(text, encoding="utf-8")
    page.with_suffix(".new").replace(page)


def main() -> None:
    """Measure what was asked for, or only write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--keep", action="store_true", help="put the constants into scale.json")
    parser.add_argument("--write", action="store_true", help="measure nothing; put the tables into the page")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    if asked.write:
        return write(PAGE)
    found = measured(asked.parts or list(PARTS), Amounts())
    print("\n".join(f"{one.constant:40} {one.value:>12,} {one.unit}" for one in found))
    if asked.keep:
        keep(found, CONSTANTS)


if __name__ == "__main__":
    main()
