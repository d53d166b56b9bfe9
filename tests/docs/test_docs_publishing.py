"""What docs/how-to/publishing.md shows is what runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.errors import KeyConflict
from kit.paths import ROOT
from kit.publish_kit import Broker, consumed, events, kept, publisher

PAGE = (ROOT / "docs/how-to/publishing.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()]

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.postgres


@pytest.mark.eventhubs
def test_the_first_snippet_runs(eventhubs: Any, new_hub: Any, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is shown, but for the name of the hub: 12345 is one event."""
    hub = new_hub(partitions=2)
    monkeypatch.setenv("DATABASE", postgres)
    monkeypatch.setenv("EVENTHUB", eventhubs.connection_string)
    exec(SNIPPETS[0].replace('"orders"', repr(hub)).replace("10_000", "50"), {})
    sent = kept(eventhubs, hub)
    assert sent.count(b'{"order": 12345}') == 1 and len(sent) == 51
    assert len(consumed(postgres, eventhubs, hub)[0]) == 51


def test_service_bus_duplicate_detection_by_message_id_and_partition_key(postgres: str) -> None:
    """A MessageId counts within its PartitionKey: repeated it is one event; under another PartitionKey it is another one."""
    broker = Broker()
    hub, names = broker.new(2), dict[str, Any]()
    exec("from dedup.publishing import OutgoingEvent\n" + SNIPPETS[1], names)
    with publisher(postgres, broker, hub) as one:
        for key, body in (("a", b"1"), ("a", b"1"), ("b", b"2")):
            names["send"](one, SimpleNamespace(message_id="m", partition_key=key, body=body))
        with pytest.raises(KeyConflict):
            names["send"](one, SimpleNamespace(message_id="m", partition_key="a", body=b"other"))
    assert sorted(kept(broker, hub)) == [b"1", b"2"]


@pytest.mark.full
def test_the_commands_run(postgres: str, dedup: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them, as it is shown; those that change something change nothing without --yes."""
    broker = Broker()
    hub = broker.new(2)
    with publisher(postgres, broker, hub, "web-1") as one:
        one.publish(events(0, 10, properties={"a": 1}))
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 7
    for command in COMMANDS:
        line = f"{command.removeprefix('dedup ')} --store {shlex.quote(postgres)}"
        if "--yes" in command:
            code, out, err = dedup(line.replace("--yes", ""))
            assert code == 0 and "Nothing was changed" in out, err
        code, out, err = dedup(line)
        assert (code, err) == (0, ""), command
        assert "Nothing was changed" not in out
        assert json.loads(dedup(line + " --json")[1]) is not None
