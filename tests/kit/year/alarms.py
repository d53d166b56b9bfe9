"""The alarms of examples/prometheus, evaluated by promtool over what the reader saw on each day."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kit.paths import ROOT

RULES = ROOT / "examples/prometheus/alerts.yml"


def promtool() -> str | None:
    """The program; Debian's package `prometheus` has it."""
    return os.environ.get("DEDUP_TEST_PROMTOOL") or shutil.which("promtool")


@dataclass
class Day:
    """Samples of one day: minute since its begin -> series -> value."""

    number: int
    begin: float
    samples: dict[int, Mapping[str, float]] = field(default_factory=dict)
    alarm: str = ""  # that its fault raises, if it has one

    def test(self) -> dict[str, object]:
        """A test of promtool's: the alarm of this day's fault was raised, and no other one."""
        last = max(self.samples)
        names = sorted({name for sample in self.samples.values() for name in sample})
        return {
            "name": f"day {self.number}",
            "interval": "1m",
            "input_series": [{"series": _series(name), "values": self._values(name, last)} for name in names],
            "promql_expr_test": [
                {
                    "expr": f'count by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[1d])) # day {self.number}',
                    "eval_time": f"{last}m",
                    "exp_samples": [{"labels": f'{{alertname="{self.alarm}"}}', "value": 1}] if self.alarm else [],
                }
            ],
        }

    def _values(self, name: str, last: int) -> str:
        """One a minute: as long as nobody asks again, what was read last. promtool's days begin at the time 0."""
        told, known = [], None
        for minute in range(last + 1):
            if minute in self.samples:
                known = self.samples[minute].get(name)
            told.append("_" if known is None else repr(known - self.begin if "_timestamp_seconds" in name else known))
        return " ".join(told)


def _series(name: str) -> str:
    metric, _, labels = name.partition("{")
    return metric + "{" + ",".join(f'{label}="{value}"' for label, value in json.loads("{" + labels).items()) + "}"


def contradictions(days: Sequence[Day], folder: Path, program: str) -> list[str]:
    """Days on which other alarms were raised than that of their fault."""
    said = evaluated([day.test() for day in days], folder, program)
    return re.findall(r"# day \d+|got:.*|exp:.*", said) or [said] if said else []


def evaluated(tests: Sequence[Mapping[str, object]], folder: Path, program: str) -> str:
    """What promtool finds wrong in tests of the rules; empty where nothing is."""
    file = folder / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([program, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}exit code {done.returncode}"
