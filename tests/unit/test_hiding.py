"""What masks and seals do to contents, without a store: what is named is hidden, whatever the event looks like, and nothing else is."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError, Refused, SealUnavailable
from deadletter import hiding
from deadletter.letter import extras_of
from dedup import Contents, Encrypt, LetterPart, Mask
from kit.redacting import LOST, NEW, OLD

PART = LetterPart("a" * 32, "shop", "body")

SECRET = "anna"


def masked(mask: Mask, body: Any) -> Any:
    """The body after the mask; as JSON, where it is JSON."""
    after = mask(Contents(body if isinstance(body, bytes | None) else json.dumps(body).encode())).body
    return after if after is None or after == b"***" else json.loads(after)


@pytest.mark.parametrize(
    ("fields", "body", "after"),
    [
        (["mail"], {"mail": SECRET, "n": 1}, {"mail": "***", "n": 1}),
        (["who.mail"], {"who": {"mail": SECRET, "n": 1}, "mail": 2}, {"who": {"mail": "***", "n": 1}, "mail": 2}),
        (["who"], {"who": {"mail": SECRET}}, {"who": "***"}),
        (["who"], {"who": [SECRET, SECRET]}, {"who": "***"}),
        (["lines.who"], {"lines": [{"who": SECRET}, {"n": 1}, {"who": SECRET}]}, {"lines": [{"who": "***"}, {"n": 1}, {"who": "***"}]}),
        (["who"], [{"who": SECRET}, [{"who": SECRET}]], [{"who": "***"}, [{"who": "***"}]]),
        (["a.b"], {"a.b": SECRET, "a": {"b": SECRET}}, {"a.b": "***", "a": {"b": "***"}}),
        (["a.b.c"], {"a.b": {"c": SECRET}, "a": {"b.c": SECRET}}, {"a.b": {"c": "***"}, "a": {"b.c": "***"}}),
        (["x", "y"], {"x": SECRET, "y": SECRET}, {"x": "***", "y": "***"}),
    ],
)
def test_a_named_field_is_hidden_wherever_it_stands(fields: list[str], body: Any, after: Any) -> None:
    """In objects, in each element of lists, and under names with dots; what has another name stays."""
    assert masked(Mask(*fields), body) == after


@pytest.mark.parametrize(
    "body", [b"anna", b'{"who": "anna"', b'"anna"', b"17", b'{"mail": "anna", "mail": null}', b"\xff\xfeanna", b"[" * 100_000, b""]
)
def test_a_body_that_the_mask_cannot_read_is_hidden_as_a_whole(body: bytes) -> None:
    """Nothing is stored because a field was not found in what is no JSON object, or in one that has a name twice."""
    assert masked(Mask("mail"), body) == b"***"


@pytest.mark.parametrize("body", [None, b'{"who":  1}', b'{"mail": null}', b"[]", b"{}"])
def test_a_body_without_the_field_keeps_its_bytes(body: bytes | None) -> None:
    """Such an event can be run from its letter."""
    assert Mask("mail")(Contents(body)) == Contents(body)


def test_headers_and_columns_are_hidden_by_name() -> None:
    """Headers in any case; a mask without any name hides everything but names."""
    contents = Contents(b"{}", (("Mail", b"anna"), ("lang", b"de"), ("mail", None)), {"note": "anna", "n": 1})
    after = Mask(headers=["mAIL"], columns=["note"])(contents)
    assert after == Contents(b"{}", (("Mail", b"***"), ("lang", b"de"), ("mail", None)), {"note": None, "n": 1})
    everything = Contents(b"***", (("Mail", b"***"), ("lang", b"***"), ("mail", None)), {"note": None, "n": None})
    assert Mask()(contents) == everything


def test_what_is_sealed_opens_in_its_place_alone() -> None:
    """Not for another letter, consumer or part, not if one byte differs, and never twice the same bytes."""
    key = Encrypt(OLD)
    sealed = key.seal(b"anna", PART)
    assert key.open(sealed, PART) == b"anna" and b"anna" not in sealed and key.seal(b"anna", PART) != sealed
    others = [LetterPart("b" * 32, "shop", "body"), LetterPart("a" * 32, "other", "body"), LetterPart("a" * 32, "shop", "rest")]
    for part in others:
        with pytest.raises(Refused, match="another letter"):
            key.open(sealed, part)
    for at in range(len(sealed)):
        with pytest.raises(Refused):
            key.open(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :], PART)
    for short in (b"", sealed[:10], b"\x01", b"anna"):
        with pytest.raises(Refused):
            key.open(short, PART)


def test_the_first_key_seals_and_each_opens() -> None:
    """A new key in front; taken out, what it sealed does not open, and the error names the key by its digest."""
    old, both = Encrypt(OLD), Encrypt([NEW, OLD])
    sealed = both.seal(b"anna", PART)
    assert (both.open(old.seal(b"a", PART), PART), Encrypt([LOST, NEW]).open(sealed, PART)) == (b"a", b"anna")
    with pytest.raises(Refused, match=sealed[1:5].hex()):
        old.open(sealed, PART)


def test_a_key_is_shown_nowhere_and_one_by_a_function_does_not_travel() -> None:
    """Neither repr nor errors show it; a pickle has what the function needs, not the key, also after the first use."""
    for wrong in ("short", OLD[:-4], "é" * 44, [OLD, "MTIz"]):
        with pytest.raises(ConfigError, match="openssl rand") as caught:
            Encrypt(wrong)
        assert OLD[:-4] not in str(caught.value)
    assert OLD not in repr(Encrypt(OLD)) and pickle.loads(pickle.dumps(Encrypt(OLD))) == Encrypt(OLD)
    key = Encrypt(keys)
    sealed = key.seal(b"anna", PART)
    raw = pickle.dumps(key)
    assert OLD.encode() not in raw and base64.b64decode(OLD) not in raw and pickle.loads(raw).open(sealed, PART) == b"anna"
    assert ASKED == [1, 1]  # once in each copy


ASKED: list[int] = []


def keys() -> str:
    """A vault."""
    ASKED.append(1)
    return OLD


class Odd:
    """A seal that gives back what it likes."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def seal(self, data: bytes, of: LetterPart) -> Any:
        """What was given, or the bytes themselves."""
        return data if self.given is None else self.given

    def open(self, sealed: bytes, of: LetterPart) -> Any:
        """The same."""
        return self.given


@pytest.mark.parametrize("given", [None, "text", 5])
def test_a_seal_that_returns_no_sealed_bytes_is_refused(given: Any) -> None:
    """Its argument would be stored for all to read."""
    with pytest.raises(SealUnavailable, match="not sealed bytes"):
        hiding.seal_body({"id": "a", "consumer": "shop", "source": "s", "topic": "t"}, b"anna", Odd(given))
    with pytest.raises(Refused, match="in place of bytes"):
        hiding.unseal(b"x", PART, Odd(given))


@pytest.mark.parametrize(
    "wrong", [lambda c: None, lambda c: Contents("text"), lambda c: Contents(b"", ((1, b""),)), lambda c: Contents(b"", (), 5)]
)
def test_what_a_function_returns_that_is_no_contents_hides_everything(wrong: Any) -> None:
    """As where it raises."""
    row = {
        "id": "a",
        "consumer": "shop",
        "body": b"anna",
        "body_sha256": None,
        "properties": [{"key": "k", "value": b"anna"}],
        "extras": None,
    }
    kept = hiding._mask_row(row, wrong)
    assert (kept["body"], kept["properties"]) == (b"***", [{"key": "k", "value": b"***"}])


def test_a_column_of_any_type_can_be_beside_a_masked_one() -> None:
    """Times in nanoseconds and maps neither fail the mask nor change."""
    columns = {
        "at": pa.array([1], pa.timestamp("ns")),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "who": pa.array(["anna"]),
    }
    row = {"id": "a", "consumer": "shop", "body": None, "body_sha256": None, "properties": None, "extras": extras_of(pa.table(columns))}
    mark = hiding.mark_of(hiding._mask_row(row, Mask(columns=["who"]))["extras"])
    assert mark is not None and mark.masked == ("columns.who",)
    assert [mark.others[name].chunk(0) for name in ("at", "map")] == [columns["at"], columns["map"]]
    assert mark.others["who"].to_pylist() == [None]
