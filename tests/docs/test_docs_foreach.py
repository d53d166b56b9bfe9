"""What docs/how-to/foreach.md shows is what runs."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest

from dedup.core.envelope import ENVELOPE
from kit.paths import ROOT
from kit.pg_run import run

TEXT = (ROOT / "docs/how-to/foreach.md").read_text()
FIRST, *OTHERS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.postgres
@pytest.mark.parametrize("snippet", ["", *OTHERS], ids=range(1 + len(OTHERS)))
def test_each_snippet_bills_the_good_order(postgres: str, monkeypatch: pytest.MonkeyPatch, snippet: str) -> None:
    """Every handler of the page, behind the set-up of the first one, writes the order; those that refuse a negative amount park it."""
    monkeypatch.setenv("DATABASE", postgres)
    run(postgres, "create table orders (order_id text, customer text, amount bigint)")
    names: dict[str, Any] = {}
    exec(FIRST.partition("@consumer")[0] + snippet if snippet else FIRST, names)
    bodies = [b'{"order_id": "o%d", "customer": "ann", "amount": %d}' % (n, amount) for n, amount in enumerate((5, -1))]
    rows = [
        {
            "source": "s",
            "topic": "t",
            "partition": 0,
            "sequence_number": n,
            "part": 0,
            "body": body,
            "properties": [("message-id", b"%d" % n)],
        }
        for n, body in enumerate(bodies)
    ]
    report = names["consumer"](pa.Table.from_pylist(rows, schema=ENVELOPE), 0)
    refuses = "less than nothing" in (snippet or FIRST)
    assert (report.processed, report.dead_lettered) == ((1, 1) if refuses else (2, 0))
