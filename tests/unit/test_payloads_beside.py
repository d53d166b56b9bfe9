"""Payload hashes that are computed while bodies are decoded are those that are computed afterwards."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from dedup import decode
from dedup.core.keys import KeySettings
from dedup.decode.prepare import Prepare, prepare_events, prepare_keys
from fixtures.variants import of_which

ORDER = decode.json(pa.schema([("id", pa.string()), ("amount", pa.int64())]))


def frame(bodies: list[bytes | None]) -> pa.Table:
    """Rows as Spark's Kafka source has them."""
    count = len(bodies)
    columns = {"key": pa.nulls(count, pa.binary()), "value": pa.array(bodies, pa.binary()), "topic": pa.repeat("orders", count)}
    times = pa.array([0] * count, pa.timestamp("us", "UTC"))
    return pa.table({**columns, "partition": pa.repeat(pa.scalar(0, pa.int32()), count), "offset": range(count), "timestamp": times})


def spec(**settings: object) -> Prepare:
    """What a consumer of these would ask for."""
    return Prepare(consumer="shop", keys=KeySettings(columns=("data.id",), **settings), decoder=ORDER)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", of_which(1, [7, 1]))
def test_payload_hashes_beside_are_those_of_later(chunks: int) -> None:
    """Of bodies that decode, that do not, that are empty and that are null, in one chunk or several, more than are hashed at once."""
    odd: list[bytes | None] = [None, b"", b"{", b"\xff\x00"]
    bodies = [json.dumps({"id": f"{i}", "amount": i}).encode() if i % 11 else odd[i % 4] for i in range(20_011)]
    table = pa.concat_tables([frame(bodies).slice(at * 20_011 // chunks, 20_011 // chunks + 1) for at in range(chunks)])
    wanted = prepare_events(table, spec())
    found = prepare_keys(table, spec(), beside=True)
    assert found["_payload_hash"].to_pylist() == wanted["_payload_hash"].to_pylist()
    assert found["_key"].to_pylist() == wanted["_key"].to_pylist()
    assert len(np.unique(found["_payload_hash"])) > 18_000


def test_other_payloads_than_the_body_wait() -> None:
    """Columns of what is decoded are hashed once they are there."""
    table = frame([b'{"id": "a", "amount": 1}'])
    assert "_payload_hash" not in prepare_keys(table, spec(payload=("data.amount",)), beside=True).column_names
    assert "_payload_hash" not in prepare_keys(table, spec()).column_names


def test_an_error_beside_is_the_batchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the thread is raised, not lost."""

    def broken(*_: object) -> pa.Array:
        raise MemoryError("too many bodies")

    monkeypatch.setattr("dedup.decode.prepare.payload_hashes", broken)
    with pytest.raises(MemoryError, match="too many"):
        prepare_keys(frame([b"{}"]), spec(), beside=True)


def hashes(*bodies: bytes | None, **settings: object) -> list[int]:
    """The payload hash of each body."""
    found: list[int] = prepare_events(frame([*bodies]), spec(**settings))["_payload_hash"].to_pylist()
    return found


@pytest.mark.parametrize("chosen", [("data.amount",), ("data.amount", "key")])
def test_a_body_counts_where_it_does_not_decode(chosen: tuple[str, ...]) -> None:
    """Null is what counts of a decoded event that has nothing else; what does not decode is told apart by its body alone."""
    first, again, other = b'{"id":"a","amount":null,"sent":1}', b'{"id":"a","sent":2}', b'{"id":"a","amount":1}'
    found = hashes(first, again, other, b"{", b"{{", None, payload=chosen)
    assert found[0] == found[1] and len(set(found[:5])) == 4
    assert found[3:5] == hashes(b"{", b"{{")


def test_a_body_counts_where_nobody_decodes_it() -> None:
    """Without decode= null may stand for what another decoder could not read: then bodies are compared rather than events lost."""
    table = frame([b"x", b"y", b"y"]).append_column("amount", pa.nulls(3, pa.int64()))
    one, two, three = prepare_events(table, Prepare("shop", KeySettings(payload=("amount",))))["_payload_hash"].to_pylist()
    assert one != two == three
