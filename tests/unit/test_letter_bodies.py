"""What a letter shows of how its body is decoded."""

from __future__ import annotations

import pytest

from dedup.reprocessing.dead_letters import is_json


@pytest.mark.parametrize(
    ("body", "size", "reason", "json"),
    [
        (b' {"a": 1}', 9, "negative", True),
        (b"[1]", 3, "negative", True),
        (b"5", 1, "negative", False),
        (b'{"a": ', 6, "the body does not decode", False),
        (b'{"a": ', 6, "the body is not JSON: Expecting value, at character 6 of 6", True),
        (b'{"a": ', 100_000, "the body has 100,000 bytes, the limit is 64,000: negative", True),
        (b"\x00\x00", 100_000, "negative", False),
        (None, None, "negative", False),
    ],
)
def test_a_letter_shows_whether_its_body_is_decoded_as_json(body: bytes | None, size: int | None, reason: str, json: bool) -> None:
    """An object, a list, the beginning of one that is kept in part, or what the decoder of JSON has refused."""
    assert is_json({"body": body, "body_size": size, "reason": reason}) == json
