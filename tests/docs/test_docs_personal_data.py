"""What docs/how-to/personal-data.md shows is what runs."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from dedup import DeadLetters, DeltaStore, Encrypt, Selection
from kit.orders import ORDER, batch, event
from kit.outgoing import Receiver
from kit.paths import ROOT
from kit.redacting import NEW, OLD

PAGE = (ROOT / "docs/how-to/personal-data.md").read_text()
MODULE, RECEIVER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(line, comments=True)[1:] for line in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()]

pytestmark = pytest.mark.delta


def order(id: str, amount: int) -> bytes:
    """A body."""
    return json.dumps({"message_id": id, "customer": "ann", "amount": amount}).encode()


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the page, and a batch in which one order is negative."""
    monkeypatch.setenv("LETTER_KEYS", f"{NEW} {OLD}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    (tmp_path / "shop.py").write_text(MODULE.replace("/tmp/shop", str(tmp_path)))
    made = importlib.import_module("shop")
    DeltaTable.create(str(tmp_path / "orders"), schema=made.ORDER)
    made.consumer.process(batch(event(0, body=order("m-1", 1)), event(1, body=order("m-2", -1))))
    return made


def test_the_module_and_the_commands_run_as_they_are_shown(shop: Any, tmp_path: Path, dedup: Callable[..., Any]) -> None:
    """The letter is shown sealed and then opened, gets a new body, and is run; no file of the state names the customer."""
    store = DeltaStore(str(tmp_path / "dedup"))
    (letter,) = DeadLetters(store).select(Selection()).to_pylist()
    assert b"ann" not in letter["body"] and ORDER is not None
    said = []
    for words in COMMANDS:
        line = shlex.join(letter["id"][:12] if word == "ID" else word for word in words)
        code, out, err = dedup(line if "shop:consumer" in line and "reprocess" in line else f"{line} --store {tmp_path / 'dedup'}")
        assert code == 0, (line, out, err)
        said.append(out)
    assert "ann" not in said[0] and "sealed" in said[0]
    assert '"customer": "ann"' in said[1] and "negative amount" in said[1]
    rows: pa.Table = DeltaTable(str(tmp_path / "orders")).to_pyarrow_table()
    assert sorted((row["message_id"], row["amount"]) for row in rows.to_pylist()) == [("m-1", 1), ("m-2", 1)]


def test_a_receiver_opens_what_it_gets(tmp_path: Path) -> None:
    """With the headers of the message, as the page shows it."""
    from dedup import Consumer, FailurePolicy, decode
    from dedup.outbox import Call

    names: dict[str, Any] = {}
    exec(RECEIVER, names)
    failure, receiver = FailurePolicy(redact=Encrypt(OLD), letters_to="dead"), Receiver()
    made = Consumer("shop", DeltaStore(str(tmp_path / "state")), idempotence_key="data.id", decode=decode.json(ORDER), failure=failure)

    @made.foreach_batch
    def refuse(rows: pa.Table, tx: Any) -> None:
        tx.reject(rows, pa.array([True] * len(rows)), "no")

    made.dispatch_to(Call(receiver))
    made.process(batch(event(0, "a", 7)))
    (message,) = receiver.got
    assert names["body_of"](message, OLD) == event(0, "a", 7)["body"]
