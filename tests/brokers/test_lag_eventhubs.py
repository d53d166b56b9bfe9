"""`dedup consumer lag` behind Event Hubs: the same table, over AMQP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.orders import batch, consumer, event
from kit.places import DeltaPlace

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.delta
def test_lag_behind_event_hubs(eventhubs: Any, new_hub: Any, dedup: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection string comes from the variable that is named, and is not shown."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    hub = new_hub(partitions=2)
    eventhubs.fill(hub, 0, 7)
    consumer(place.store())(batch(event(2, "a", source="localhost", topic=hub)), 0)
    monkeypatch.setenv("HUBS", eventhubs.connection_string)
    code, out, err = dedup("consumer lag shop --eventhubs HUBS --json", place)
    assert (code, err) == (0, "")
    assert [(r["partition"], r["checkpoint"], r["end"], r["events"]) for r in json.loads(out)] == [(0, 2, 7, 4), (1, None, 0, 0)]
    assert "SharedAccessKey" not in out
