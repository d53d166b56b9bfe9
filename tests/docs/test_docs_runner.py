"""What docs/how-to/runner.md shows is what runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.variants import of_which
from kit.hub_orders import until
from kit.paths import ROOT
from kit.pg_run import run

PAGE = (ROOT / "docs/how-to/runner.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.eventhubs

TIRED = """
async def until_tired(stop):
    import signal
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
"""


def test_the_first_code_stands_within_fifteen_lines() -> None:
    """A reader sees code at once."""
    assert PAGE.splitlines().index("```python") < 15


@pytest.mark.full
@pytest.mark.parametrize("own_loop", of_which(1, [True, False]))
def test_the_snippets_run(eventhubs: Any, new_hub: Any, postgres: str, tmp_path: Path, own_loop: bool) -> None:
    """The program as it is shown writes the orders of the hub, each once, and ends well on SIGTERM; so does that with a loop of its own."""
    hub = new_hub(partitions=2)
    run(postgres, "create table orders (order_id text, amount bigint)")
    for n in range(10):
        eventhubs.put(hub, 0, [json.dumps({"order_id": f"o{n % 8}", "amount": n % 8}).encode()], {"message-id": f"m{n % 8}"})
    first, second = (snippet.replace('["EVENTHUB"], "orders"', f'["EVENTHUB"], "{hub}"') for snippet in SNIPPETS)
    program = tmp_path / "billing.py"
    program.write_text(first.split("\nrun(")[0] + TIRED.replace("async", "import asyncio\n\n\nasync", 1) + second if own_loop else first)
    environment = {**os.environ, "DATABASE": postgres, "EVENTHUB": eventhubs.connection_string}
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen([sys.executable, str(program)], env=environment, stderr=errors)
    try:
        until(lambda: _rows(postgres) == 8, lambda: _require_running(process, tmp_path))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (tmp_path / "errors").read_text()
    finally:
        process.kill()
        process.wait()
    assert _rows(postgres) == 8


def _rows(dsn: str) -> int:
    return int(run(dsn, "select count(*) from orders")[0][0])


def _require_running(process: subprocess.Popen[bytes], folder: Path) -> None:
    assert process.poll() is None, (folder / "errors").read_text()
