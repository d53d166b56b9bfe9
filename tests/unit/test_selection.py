"""Which dead letters are meant: what makes no sense is told before a store is asked."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from checkpoint.errors import ConfigError
from deadletter import Kind, Status
from dedup import ReprocessOptions, Selection


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"first": 2**63}, "first=9223372036854775808"),
        ({"last": -(2**63)}, "last="),
        ({"partition": 2**64}, "partition="),
        ({"limit": 2**63}, "limit="),
        ({"limit": -1}, "limit=-1"),
        ({"since": dt.datetime(2026, 1, 1)}, "2026-01-01T00:00:00 has no time zone"),
        ({"until": dt.datetime(2026, 1, 1)}, "no time zone"),
        ({"text": ""}, "The text to search for is empty"),
        ({"id": ""}, "an id, or its first digits"),
        ({"kind": "typo"}, "'HANDLER_ERROR' or 'REJECTED' or .* or 'UNSENT'"),
        ({"kind": "rejected"}, "Selection.kind is 'rejected'"),
        ({"status": "open"}, "'OPEN' or 'BLOCKED' or "),
        ({"statuses": ("OPEN", "typo")}, "some of OPEN, BLOCKED, "),
        ({"statuses": "OPEN"}, "in a tuple"),
        ({"ids": "5f3a"}, "whole ids, in a tuple"),
        ({"sequences": b"s"}, "in a tuple"),
        ({"partition": "0"}, "Selection.partition is '0'"),
        ({"limit": True}, "a whole number"),
        ({"consumer": 7}, "Selection.consumer is 7"),
        ({"since": dt.date(2026, 1, 1)}, "a datetime with a time zone"),
        ({"until": "2026-01-01"}, "a datetime with a time zone"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(asked: dict[str, Any], words: str) -> None:
    """A store would find nothing for it, or everything, or the two stores would answer differently."""
    with pytest.raises(ConfigError, match=words):
        Selection(**asked)


def test_the_ends_of_what_there_can_be_are_taken() -> None:
    """Each is a position, or a number of letters."""
    assert Selection(first=-1, last=2**63 - 1, partition=-1, limit=0, text=" ").limit == 0
    assert Selection(kind=Kind.REJECTED, status=Status.OPEN, statuses=(Status.OPEN,)) == Selection(
        kind="REJECTED", status="OPEN", statuses=("OPEN",)
    )


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"rate": -1.0}, {"rate": float("nan")}, {"limit": -1}])
def test_a_pace_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    """A rate of nothing would not be looked at, and all letters run at once."""
    with pytest.raises(ConfigError, match=r"rate|limit"):
        ReprocessOptions(**wrong)
