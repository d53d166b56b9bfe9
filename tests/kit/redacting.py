"""What the tests of `redact=` share: events that name a person everywhere, and a handler whose errors quote them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa

from checkpoint.errors import SealUnavailable
from dedup import Contents, Encrypt, LetterPart, Mask, Retry
from dedup.core.store import Store
from kit.orders import ORDER, batch, consumer, event, reader_of

SECRET = "anna.schmidt"
"""Stands in bodies, headers, other columns and errors, and in no key."""

OLD, NEW, LOST = (base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2, 3))
"""Keys."""


class Quoted(Exception):
    """What the handler raises."""


class Brief(TimeoutError):
    """What may pass."""


def said(number: int, id: str, amount: int = 1, **columns: Any) -> dict[str, Any]:
    """An event that names the person in its body and its headers."""
    body = json.dumps({"id": id, "amount": amount, "mail": f"{SECRET}@example.org"}).encode()
    headers = [{"key": "mail", "value": SECRET.encode()}, {"key": "lang", "value": b"de"}]
    return event(number, body=body, **{"properties": headers, **columns})


def noted(*events: dict[str, Any]) -> pa.Table:
    """A batch with other columns, of which one names the person."""
    rows = batch(*events)
    return rows.append_column("note", pa.array([f"call {SECRET}"] * len(events))).append_column("shard", pa.array([7] * len(events)))


def handler(seen: list[dict[str, Any]], bad: set[str]) -> Any:
    """Writes orders that are not bad; the error of a bad one quotes it: `x` fails, `t` after several tries, `r` is rejected."""

    def handle(rows: pa.Table, tx: Any) -> None:
        found = rows.to_pylist()
        for row in found:
            kind = row["data"]["id"][:1]
            if row["data"]["id"] in bad and kind in "xt":
                raise (Quoted if kind == "x" else Brief)(f"no {SECRET} in {row['body']!r}")
        rejected = pa.array([row["data"]["id"] in bad for row in found], pa.bool_())
        good = tx.reject(rows, rejected, f"not {SECRET}").to_pylist()
        seen.extend(good)
        tx.write(pa.Table.from_pylist([{n: row["data"][n] for n in ORDER.names} for row in good], ORDER), "orders")

    return handle


BAD = {"x1", "t1", "r1"}


def job(store: Store, redact: Any, *, bad: set[str] | None = None, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The consumer, and the rows that its handler has passed."""
    seen: list[dict[str, Any]] = []
    quick = Retry(attempts=3, first=0.001, longest=0.001)
    run = consumer(store, **{"budget": None, "redact": redact, "retry": quick, **settings})
    run._handler = handler(seen, BAD if bad is None else bad)
    return run, seen


def parked(store: Store, redact: Any, **settings: Any) -> Any:
    """After one batch: one order is written; four events are letters, each for another reason, one of them after several tries."""
    run, _ = job(store, redact, **settings)
    torn = event(4, body=b'{"id": "u1", "amount": "' + SECRET.encode() + b'"}')
    run(noted(said(0, "a"), said(1, "x1"), said(2, "t1"), said(3, "r1"), torn), 0)
    return run


def recorded(*events: dict[str, Any]) -> Any:
    """A log that has these events, with the other columns."""
    return reader_of(noted(*events))


def shouting(contents: Contents) -> Contents:
    """A mask of a user's own."""
    return Contents(b"{}", tuple((name, b"-") for name, _ in contents.headers), dict.fromkeys(contents.columns))


def broken(contents: Contents) -> Contents:
    """A mask that does not understand any event."""
    raise KeyError(contents.body)


class Vault:
    """A seal that can be away."""

    def __init__(self) -> None:
        self.away = False

    def seal(self, data: bytes, of: LetterPart) -> bytes:
        """Reversed, with its place."""
        if self.away:
            raise ConnectionError("no vault")
        return of.bound + data[::-1]

    def open(self, sealed: bytes, of: LetterPart) -> bytes:
        """Only in its place."""
        if not sealed.startswith(of.bound):
            raise ValueError("of another place")
        return sealed.removeprefix(of.bound)[::-1]


WAYS: dict[str, Any] = {
    "mask": Mask(),
    "fields": Mask("mail", "amount", headers=["MAIL"], columns=["note"]),
    "function": shouting,
    "broken": broken,
    "encrypt": Encrypt(OLD),
    "vault": Vault(),
}
"""Every kind of `redact=`."""

SEALS = [name for name in WAYS if name in ("encrypt", "vault")]
MASKS = [name for name in WAYS if name not in SEALS]

__all__ = ["BAD", "LOST", "MASKS", "NEW", "OLD", "SEALS", "SECRET", "WAYS", "SealUnavailable", "Vault", "job", "parked", "recorded", "said"]
