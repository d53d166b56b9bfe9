"""Rows that threads prepare, a block each, are those that are prepared one after the other."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from dedup import arrow, arrow_decode, decode
from dedup.envelope import Prepare
from dedup.keys import KeySettings

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


@pytest.mark.parametrize("chunks", [1, 7])
def test_blocks_are_prepared_as_the_whole_is(chunks: int) -> None:
    """Bodies that decode, that do not, that are empty and that are null, in one chunk or several, of more than one block."""
    odd: list[bytes | None] = [None, b"", b"{", b"\xff\x00"]
    count = 2 * arrow_decode.BLOCK + 11
    bodies = [json.dumps({"id": f"{i}", "amount": i}).encode() if i % 11 else odd[i % 4] for i in range(count)]
    table = pa.concat_tables([frame(bodies).slice(at * count // chunks, count // chunks + 1) for at in range(chunks)])
    wanted = arrow.prepare(table, spec())
    found = arrow.prepare_blocks(table, spec())
    assert set(wanted.column_names) - set(found.column_names) == {"_key_text"}
    assert found.to_pylist() == wanted.select(found.column_names).to_pylist()
    assert {column.num_chunks for column in found.columns} == {1}
    assert len(np.unique(found["_payload_hash"])) > count * 0.9


def test_other_payloads_than_the_body_wait() -> None:
    """Columns of what is decoded are hashed once they are there."""
    table = frame([b'{"id": "a", "amount": 1}'])
    assert "_payload_hash" not in arrow.prepare_blocks(table, spec(payload=("data.amount",))).column_names
    assert "_payload_hash" in arrow.prepare_blocks(table, spec()).column_names


def test_no_rows_have_all_columns() -> None:
    """A batch may be empty."""
    found = arrow.prepare_blocks(frame([]), spec())
    assert found.num_rows == 0 and found.schema == arrow.prepare_blocks(frame([b'{"id": "a", "amount": 1}']), spec()).schema


def test_an_error_in_a_thread_is_the_batchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the thread is raised, not lost."""

    def broken(*_: object) -> pa.Array:
        raise MemoryError("too many bodies")

    monkeypatch.setattr(arrow, "payload_hashes", broken)
    with pytest.raises(MemoryError, match="too many"):
        arrow.prepare_blocks(frame([b"{}"]), spec())
