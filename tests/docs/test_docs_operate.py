"""What docs/how-to/operate.md says of signals is what the code gives."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from dedup.logs import FIELDS
from kit.paths import ROOT, environment

PAGE = (ROOT / "docs/how-to/operate.md").read_text(encoding="utf-8")

LOGGING = """
try:
    raise ZeroDivisionError("x")
except ZeroDivisionError:
    with logs.about(consumer="shop", batch=1, epoch=2, counts={}, seconds=0.5):
        logging.getLogger("shop").exception("it failed")
"""


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
