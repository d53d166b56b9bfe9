"""What the tests of people's commands share: a consumer with dead letters, and what is asked of them."""

from __future__ import annotations

from typing import Any

from dedup import DeadLetters, Selection
from dedup.core.store import Store
from kit.orders import batch, consumer, event, flatten, letters

ALL = Selection(consumer="shop", limit=None)
ANN = {"by": "ann", "reason": "a test"}
BODY = b'\x00{"id": "\xff'


def failing(store: Store, **settings: Any) -> Any:
    """The consumer of most tests after one batch: order p0-0 written, p0-1 and p0-2 rejected, and a body that does not decode."""
    run = consumer(store, **settings)
    run(batch(event(0, "a"), event(1, "b", -1), event(2, "c", -2), event(3, body=BODY, properties=[{"key": "h", "value": b"\xfe"}])), 0)
    return run


def statuses(store: Store, **selection: Any) -> list[str]:
    """In position order."""
    return [row["status"] for row in letters(store, **selection)]


def actions(store: Store, letter: str) -> list[tuple[str, str | None, int]]:
    """(action, by, reserved) of a letter's history as it is shown."""
    return [(h["action"], h["by"], h["reserved"]) for h in DeadLetters(store).show(letter).history.to_pylist()]


def fixed(store: Store, **settings: Any) -> Any:
    """The consumer with a handler that rejects nothing."""
    made = consumer(store, **settings)
    made._handler = None
    made.foreach_batch(lambda rows, tx: tx.write(flatten(rows), "orders"))
    return made
