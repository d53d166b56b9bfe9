"""A batch that memory is not enough for ends with an error that names the settings, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import BatchTooLarge
from kit.orders import batch, consumer, letters, orders
from kit.places import DeltaPlace

CHILD = """
import json, resource, sys
from pathlib import Path
from kit.orders import batch, consumer, event
from kit.places import DeltaPlace
import dedup.delta, pyarrow.dataset
from checkpoint.errors import BatchTooLarge

place, count, spare = DeltaPlace(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
place.create_sink()
pad = "x" * 100_000
rows = batch(*(event(n, body=json.dumps({"id": f"k{n}", "amount": n, "pad": pad}).encode()) for n in range(count)))
consumer(place.store(), name="warm")(batch(event(0, "a")), 0)
before = len(place.read())
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
size = int(status["VmSize"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + spare, resource.RLIM_INFINITY))
try:
    consumer(place.store())(rows, 0)
    said = ""
except BatchTooLarge as error:
    said = str(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
left = len(place.read()) - before
again = consumer(place.store())(rows, 0)
print(json.dumps({"said": said, "left": left, "again": again.processed, "bytes": rows.nbytes}))
"""


def run_out(tmp_path: Path, count: int, spare: int) -> dict[str, object]:
    """What became of so many events of 100 kB, with so many bytes to spare."""
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(count), str(spare)]
    done = subprocess.run(command, env={"PYTHONPATH": os.environ["PYTHONPATH"]}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.delta
def test_a_handler_that_runs_out_of_memory_names_the_settings(tmp_path: Path) -> None:
    """Nothing is committed or parked, the error says which settings to change, and it still is a MemoryError."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    run, inner = consumer(place.store()), consumer(place.store())._handler

    def hungry(rows: Any, tx: Any) -> None:
        raise MemoryError("malloc of size 819607424 failed")

    run._handler = hungry
    with pytest.raises(BatchTooLarge, match=r"maxOffsetsPerTrigger.*max_events_per_transaction.*maxResultSize") as told:
        run(batch(*orders(range(3))), 0)
    assert isinstance(told.value, MemoryError) and "819607424" in str(told.value)
    assert place.read() == [] and letters(place.store()) == []
    run._handler = inner
    assert run(batch(*orders(range(3))), 0).processed == 3


@pytest.mark.delta
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux", reason="Linux limits memory by RLIMIT_AS")
def test_a_gigabyte_that_does_not_fit_names_the_settings(tmp_path: Path) -> None:
    """Memory really runs out: the same words, nothing is committed, and with memory the same batch passes."""
    count = 10_500
    told = run_out(tmp_path, count, spare=100_000 * count // 4)
    assert "maxOffsetsPerTrigger" in str(told["said"]) and "max_events_per_transaction" in str(told["said"]), told
    assert (told["left"], told["again"]) == (0, count) and int(str(told["bytes"])) > 100_000 * count
