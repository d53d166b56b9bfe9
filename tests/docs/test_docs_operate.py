"""What docs/how-to/operate.md says of signals is what the code gives."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from dedup import Report
from dedup.logs import FIELDS
from dedup.signals.metrics import METRICS, UP, UP_OTEL
from dedup.signals.opentelemetry import ATTRIBUTES, CONSUMED, DURATION, EVENTS, OUTCOME, PARKED
from kit.paths import ROOT, environment

PAGE = (ROOT / "docs/how-to/operate.md").read_text(encoding="utf-8")

LOGGING = """
try:
    raise ZeroDivisionError("x")
except ZeroDivisionError:
    with logs.about(consumer="shop", batch=1, epoch=2, counts={}, seconds=0.5):
        logging.getLogger("shop").exception("it failed")
"""

AFTER = (
    """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
""",
    """
for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics:
    print(*(metric.name for metric in scope.metrics))
""",
)
"""What a user sets up before the program of the page, and reads after it."""


def section(heading: str) -> str:
    """The text below a heading."""
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_fields_of_a_line_are_those_of_the_page() -> None:
    """The program of the page runs as it stands, and its line has each field of the table and no other."""
    told = section("Logs as JSON")
    (program,) = re.findall(r"```python\n(.*?)```", told, re.DOTALL)
    line = [sys.executable, "-c", program + LOGGING]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True, timeout=60)
    fields = [name for names in re.findall(r"^\| (`.*?`) \|", told, re.MULTILINE) for name in re.findall(r"`(\w+)`", names)]
    assert set(FIELDS) <= set(fields) and sorted(json.loads(done.stderr)) == sorted(fields)


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table with this heading."""
    table = text.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_a_stores_metrics_is_complete() -> None:
    """Each metric has a row with its names and labels, in the order of the code, and no row is of another one."""
    told = [(row[1], row[2], row[3]) for row in rows(section("Signals"), "| what | Prometheus |")]
    known = [(name, metric.otel, ", ".join(("consumer", *metric.labels))) for name, metric in METRICS.items()]
    assert told == [(UP, UP_OTEL, ""), *known]


def test_the_table_of_a_running_consumers_metrics_is_complete() -> None:
    """Each instrument of the recorder has a row, and each attribute is named in the text."""
    told = section("Signals")
    assert [row[1] for row in rows(told, "| what | OpenTelemetry |")] == [CONSUMED, DURATION, EVENTS, PARKED]
    assert all(f"`{name}`" in told for name in (*ATTRIBUTES.values(), OUTCOME))
    outcomes = [name for name in Report().counts if name != "delivered"]
    assert f"{', '.join(outcomes[:-1])} or {outcomes[-1]}" in told


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    """As it stands, and the SDK then has the numbers of the store."""
    (program,) = re.findall(r"```python\n(.*?)```", section("Signals"), re.DOTALL)
    lines = [AFTER[0], program.replace("/lake", str(tmp_path)), AFTER[1]]
    done = subprocess.run([sys.executable, "-c", "".join(lines)], env=environment(), capture_output=True, text=True, check=True, timeout=60)
    assert "dedup.up" in done.stdout.split()
