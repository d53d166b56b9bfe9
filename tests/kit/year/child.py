"""The two processes of the year: `python -m kit.year.child player '{...}'` is the job, `... reader '{...}'` is asked for its metrics.

Both read a line of JSON, do it, and answer with a line of JSON. The player has an ordinary handler: it appends, merges, publishes and
rejects. The log's end, which the reader asks for the lag, is what the story says: the one double here. Turns of the upkeep come more often
than every ten minutes: the hours between two batches are not waited for.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.start import End
from dedup import Consumer, FailurePolicy, Limits, Takeover, decode
from dedup.core.store import Store
from dedup.outbox import Call, Message
from dedup.pipeline import upkeep
from dedup.signals.metrics import Numbers
from kit.orders import batch, event

ORDER = pa.schema([("id", pa.string()), ("account", pa.string()), ("amount", pa.int64())])

RETENTION = dt.timedelta(days=30)

Task = Mapping[str, Any]


def opened(task: Task, on_step: Callable[[str], None] = lambda name: None) -> Store:
    """The store of this task."""
    if "://" in task["url"]:
        from dedup import PostgresStore

        return PostgresStore(task["url"], on_step=on_step)
    from dedup import DeltaStore

    return DeltaStore(task["url"], tables=task["tables"], on_step=on_step)


def delivered(events: Sequence[Task]) -> pa.Table:
    """Events as a source delivers them."""
    return batch(*(event(one["number"], body=_body(one), enqueued_time=dt.datetime.fromtimestamp(one["time"], dt.UTC)) for one in events))


def _body(one: Task) -> bytes:
    return json.dumps({name: one[name] for name in ORDER.names}).encode()


class Player:
    """The job: one process of the consumer `shop`."""

    def __init__(self, task: Task) -> None:
        self._hide: list[str] = []
        self._slow = 0.0
        self._received = Path(task["received"])
        limits = Limits(retention=RETENTION, upkeep=task["upkeep"])
        self._consumer = Consumer(
            "shop",
            opened(task, self._step),
            idempotence_key="data.id",
            decode=decode.json(ORDER),
            query="q",
            failure=FailurePolicy(max_outage=0.0),
            takeover=Takeover(after=1.0, now=task["now"]),
            limits=limits,
        )
        self._consumer.foreach_batch(self._handle)
        if task["sends"]:
            self._consumer.dispatch_to(Call(self._receive))

    def _step(self, name: str) -> None:
        """Before a Delta sink shows what is decided, it is gone for a while."""
        while name == "publish" and self._hide:
            hidden = self._hide.pop()
            os.rename(hidden, hidden + ".hidden")

    def _handle(self, rows: pa.Table, tx: Any) -> None:
        time.sleep(self._slow)
        good = tx.reject(rows, pc.less(pc.struct_field(rows["data"], "amount"), 0), "negative amount")
        flat = pa.Table.from_arrays([pc.struct_field(good["data"], n) for n in ORDER.names], names=ORDER.names)
        tx.write(flat.select(["id", "amount"]), "orders")
        tx.merge(flat.select(["account", "amount"]), "latest", "account")
        mails = flat.filter(pc.match_substring(flat["id"], "-0"))
        tx.publish(pa.table({"body": mails["id"], "key": mails["account"]}), "mails", key="key")

    def _receive(self, messages: Sequence[Message]) -> None:
        """What arrives is written down, in whole lines; a body that ends in `!` cannot be taken by anyone."""
        bodies = [(message.body or b"").decode() for message in messages]
        if any(body.endswith("!") for body in bodies):
            raise ValueError("nobody can take this body")
        with self._received.open("a") as file:
            file.write("".join(body + "\n" for body in bodies))

    def batch(self, line: Task) -> Task:
        """Handle one batch; the seconds it took."""
        self._slow, self._hide = line["slow"], list(line["hide"])
        rows, begun = delivered(line["events"]), time.monotonic()
        self._consumer(rows, line["batch"])
        return {"seconds": time.monotonic() - begun - self._slow}

    def rest(self, line: Task) -> Task:
        """Have one turn of the upkeep, from its begin to its end: in the hours until the next batch there would be many."""
        made = self._consumer._upkeep
        if made is not None and made._thread is not None:
            made._thread.join()
            made._due = 0.0
            made.after_batch()
            made._thread.join()
        return {}


class Reader:
    """What Prometheus reads."""

    def __init__(self, task: Task) -> None:
        self._store = opened(task)
        self._end: End | None = None
        self._numbers = Numbers(self._store, broker=self, tell=lambda error: print(error, file=sys.stderr))

    def ends(self, topics: Sequence[str]) -> Mapping[tuple[str, int], End]:
        """As the story says."""
        assert self._end is not None
        return {(topic, 0): self._end for topic in topics}

    def read(self, line: Task) -> Task:
        """Series -> value, now."""
        self._end = End(line["first"], line["end"], dt.datetime.fromtimestamp(line["time"], dt.UTC))
        found = {}
        for name, values in self._numbers.values().items():
            for labels, value in values:
                found[name + json.dumps(labels, sort_keys=True)] = value
        return found

    def tidy(self, line: Task) -> Task:
        """What people do with their Delta tables: rewrite small files, and remove those that nobody reads."""
        from deltalake import DeltaTable

        for path in line["tables"]:
            table = DeltaTable(path)
            table.optimize.compact()
            table.vacuum(dry_run=False)
            table.cleanup_metadata()
        return {}

    def prove(self, line: Task) -> Task:
        """What the tables contradict."""
        from dedup.verify import verify

        return {"contradictions": [str(one) for one in verify(self._store, "shop").contradictions]}


def main() -> None:
    """Do what the lines say."""
    role, task = sys.argv[1], json.loads(sys.argv[2])
    pace = upkeep.Pace(every=task["turn"], rest=0.5)
    upkeep.Pace = lambda: pace  # type: ignore[assignment, misc]
    does = Player(task) if role == "player" else Reader(task)
    print(json.dumps({}), flush=True)
    for text in sys.stdin:
        line = json.loads(text)
        try:
            answer = getattr(does, line["do"])(line)
        except Exception as error:  # noqa: BLE001 - the story knows whether it has to be
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
