"""What docs/how-to/registries.md shows is what runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dedup.decode.prepare import Prepare, prepare_events
from kit.paths import ROOT
from kit.registry_kit import avro, confluent, content_type, events, record
from kit.registry_server import RegistryServer

PAGE = (ROOT / "docs/how-to/registries.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ORDER = record(("order_id", "string"), ("amount", "long"))
OLD = record(("order_id", "string"), ("amount", "int"))

pytestmark = pytest.mark.delta


def test_the_first_code_stands_at_the_top() -> None:
    """A reader sees code at once."""
    assert PAGE.splitlines().index("```python") < 5


def test_the_first_snippet_runs(registry: RegistryServer, tmp_path: Path) -> None:
    """The consumer as it is shown writes events of two schemas into one sink."""
    from deltalake import DeltaTable

    old, new = registry.register("orders-value", OLD), registry.register("orders-value", ORDER)
    registry.login = "Basic c2hvcDpz"
    sink = DeltaTable.create(str(tmp_path / "orders"), schema=pa.schema([("order_id", pa.string()), ("amount", pa.int64())]))
    shown = SNIPPETS[0].replace("https://schemas.example.com", registry.url).replace("/lake", str(tmp_path))
    names: dict[str, Any] = {"password": "s"}
    exec(compile(shown, "docs/how-to/registries.md", "exec", dont_inherit=True), names)
    bodies = [confluent(old, OLD, {"order_id": "a", "amount": 1}), confluent(new, ORDER, {"order_id": "b", "amount": 2**40})]
    names["consumer"](events([*bodies], [[("message-id", b"1")], [("message-id", b"2")]]), 0)
    sink.update_incremental()
    rows = sorted(sink.to_pyarrow_table().to_pylist(), key=lambda row: str(row["order_id"]))
    assert rows == [{"order_id": "a", "amount": 1}, {"order_id": "b", "amount": 2**40}]


def test_the_schema_given_runs(registry: RegistryServer) -> None:
    """Nothing is asked when it is made, and the default is what stands there."""
    names: dict[str, Any] = {}
    shown = SNIPPETS[1].replace("http://schemas.example.com", registry.url)
    exec("from dedup import decode\nmade = " + shown, names)
    assert registry.asked == []
    body = confluent(registry.register("s", OLD), OLD, {"order_id": "a", "amount": 1})
    found = prepare_events(events([body]), Prepare("c", decoder=names["made"]))
    assert found["data"].to_pylist() == [{"order_id": "a", "amount": 1, "shop": "main"}]


def test_the_snippet_for_azure_runs(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With azure-identity's interface in place of the package, the id in the content type is followed."""
    identity = ModuleType("azure.identity")
    vars(identity)["DefaultAzureCredential"] = lambda: SimpleNamespace(get_token=lambda *_: SimpleNamespace(token="t"))
    monkeypatch.setitem(sys.modules, "azure.identity", identity)
    ident = registry.register_azure("shop-group/Order", ORDER)
    names: dict[str, Any] = {}
    shown = SNIPPETS[2].replace("shop.servicebus.windows.net", registry.url).replace("decode.azure_avro", "made = decode.azure_avro")
    exec("from dedup import decode\n" + shown, names)
    table = events([avro(ORDER, {"order_id": "a", "amount": 1})], [content_type(ident)])
    found = prepare_events(table, Prepare("c", decoder=names["made"]))
    assert found["data"].to_pylist() == [{"order_id": "a", "amount": 1}]
