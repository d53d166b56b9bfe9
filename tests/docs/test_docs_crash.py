"""The pages about crashes: what they name is there, and what they report is what the loops do."""

from __future__ import annotations

import re

import pytest

from crash import faults, report, run, spark_lane
from crash.__main__ import STORES
from kit.paths import ROOT

PAGE, REPORT = ROOT / "docs" / "explanation" / "crash.md", ROOT / "docs" / "explanation" / "crash-report.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="an installed package has no docs")


def kinds() -> set[str]:
    """Of fault, on any store."""
    plain = {*faults.FAULTS, *faults.ServerFaults(None).all(), run.DISK_FULL}  # type: ignore[arg-type]
    return {*plain, *spark_lane.FAULTS, *spark_lane.KAFKA_FAULTS}


def test_the_tests_that_the_page_names_are_there() -> None:
    """Each file and each target of make that docs/explanation/crash.md sends its reader to exists."""
    text = PAGE.read_text()
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert len(files) > 5 and not [name for name in files if not (ROOT / name).is_file()]
    targets = set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets >= {"crash", "simulate"} and not [name for name in targets if f"\n{name}:" not in makefile]


def test_the_committed_report_has_every_kind_of_fault_and_nothing_lost() -> None:
    """crash-report.md is of loops with the same kinds of fault as the code, and says 0 lost, 0 doubled, 0 contradictions of each."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in REPORT.read_text().splitlines() if line.startswith("| ")]
    head = next(row for row in rows if row[0] == "store")
    assert head == list(report.COLUMNS)
    told = [dict(zip(head, row, strict=True)) for row in rows if row[0] in STORES and len(row) == len(head)]
    assert {row["fault"] for row in told} == kinds()
    assert {row[name] for row in told for name in ("lost", "doubled", "contradictions")} == {"0"}


def test_a_report_counts_what_the_journal_has() -> None:
    """Iterations, processes by their end, faults that came too late, skipped ones with their number, and the seeds that were wrong."""
    good = {"lost": [], "doubled": [], "contradictions": [], "seconds": 1800}
    entries = [
        {"seed": 0, "store": "delta", "fault": "x", "missed": False, "ended": ["signal 9", "finished"], **good},
        {"seed": 1, "store": "delta", "fault": "x", "missed": True, "ended": ["a.b.Fenced"], **good, "lost": [1, 2]},
        {"seed": 2, "store": "delta", "fault": "x", "skipped": "no disk"},
    ]
    assert report.summary(entries) == [
        {
            **dict.fromkeys(("killed", "finished", "failed", "skipped", "too late"), 1),
            **{"store": "delta", "fault": "x", "iterations": 2, "lost": 2, "doubled": 0, "contradictions": 0},
        }
    ]
    totals = report.totals(entries)["delta"]
    assert (totals["wrong_seeds"], totals["seeds"], totals["hours"], totals["errors"]) == ([1], "0-2", 1.0, {"a.b.Fenced": 1})
    assert "2 iterations, seeds 0-2, 1.0 hours: **2 lost, 0 doubled" in report.page(entries)
