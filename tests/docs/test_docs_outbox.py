"""What docs/how-to/outbox.md shows is what runs, on a real broker."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pyarrow as pa
import pytest

from dedup import PostgresStore, Takeover
from dedup.cli.exits import ExitCode
from dedup.core.envelope import ENVELOPE
from dedup.core.messages import Chosen
from kit.kafka_kit import Topic, received
from kit.paths import ROOT
from kit.pg_run import run

TEXT = (ROOT / "docs/how-to/outbox.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def events(*numbers: int) -> pa.Table:
    """Orders as a source delivers them."""
    rows = [
        {"source": "s", "topic": "orders", "partition": 0, "sequence_number": n, "part": 0, "key": b"k",
         "properties": [("message-id", b"%d" % n)],
         "body": b'{"order_id": "o%d", "customer": "ann", "amount": 1}' % n}
        for n in numbers
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=ENVELOPE)


def test_the_snippets_and_the_commands_run(postgres: str, topic: Topic, dedup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both handlers publish as shown, each command answers, and the messages are at the broker."""
    monkeypatch.setenv("DATABASE", postgres)
    monkeypatch.setenv("DEDUP_STORE", postgres)
    run(postgres, "create table orders (order_id text, customer text, amount bigint)")
    for number, snippet in enumerate(("", blocks("python")[1])):
        names: dict[str, Any] = {}
        code = blocks("python")[0].replace('"mails"', f'"{topic.name}"')
        setup = code.partition("@consumer")[0] if snippet else code
        exec(setup + snippet.replace('"copies"', f'"{topic.name}"'), names)
        names["consumer"].query = "q"
        names["consumer"].takeover = Takeover(now=True)
        names["consumer"](events(2 * number, 2 * number + 1), number)
    outbox = PostgresStore(postgres).outbox("orders")
    numbers = [e.number for e in outbox.entries(Chosen())]
    assert len(numbers) == 4
    for line in "".join(blocks("console")).splitlines():
        words = line.split("#")[0].strip().replace("localhost:9092", topic.servers).replace("4711", str(numbers[0]))
        words = words + " --once" if " dispatch " in words else words
        code, out, err = dedup(" ".join(shlex.split(words)[1:]))
        if line.startswith(("dedup outbox retry", "dedup outbox discard")):
            assert code == ExitCode.REFUSED and f"{numbers[0]} is SENT" in err, (line, err)
        else:
            assert code == 0 and out, (line, err)
    got = received(topic)
    assert sorted(m.value() for m in got)[:2] == [b"booked o0", b"booked o1"] and len(got) == 4
    assert all(m.headers()[0][0] == "message-id" for m in got)
