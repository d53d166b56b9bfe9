"""What a letter says of a body that does not decode or is too large to keep, on every store."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import BudgetExceeded
from deadletter.failure import Failure
from deadletter.plans import reason_of
from deadletter.selection import Selection
from dedup import Consumer, decode
from dedup.reprocessing.letters import reprocess
from kit.orders import assert_proven, batch, consumer, event, letters, orders
from kit.places import Place

ORDER = decode.json("id STRING NOT NULL, amount BIGINT, price DECIMAL(10, 2)")

BODIES = (
    b'{"id":"a","price":1.555}',
    b'{"id":"b","price":"2.999"}',
    b'{"id":"c","amount":"7"}',
    b'{"amount":7}',
    b"<order/>",
)

REASONS = [
    "$.price is 1.555; it must have at most 2 digits behind the decimal point",
    '$.price is "2.999"; it must have at most 2 digits behind the decimal point',
    '$.amount is "7"; it must be a whole number from -9223372036854775808 to 9223372036854775807',
    "$.id is missing; the schema requires it",
    "the body is not JSON: Expecting value, at character 0 of 8",
]


def of(place: Place, **settings: object) -> Consumer:
    """The consumer of these tests."""
    return consumer(place.store(), decode=ORDER, **settings)


def test_a_letter_says_which_field_does_not_decode_and_why(place: Place) -> None:
    """The reason names the field, the value and what it must be; letters that fail alike are one group, others are others."""
    run = of(place)
    run(batch(*(event(n, body=body) for n, body in enumerate(BODIES)), event(9, "good", 1)), 0)
    found = sorted(letters(place.store()), key=lambda letter: letter["sequence_number"])
    assert [(letter["kind"], letter["reason"]) for letter in found] == [("UNDECODABLE", reason) for reason in REASONS]
    assert found[0]["fingerprint"] == found[1]["fingerprint"] and len({letter["fingerprint"] for letter in found}) == 4
    assert_proven(place.store())


def test_a_reprocess_keeps_the_reason_of_what_still_does_not_decode(place: Place) -> None:
    """A letter that fails again says as much as before, under the same fingerprint; with another schema it says what that lacks."""
    run = of(place)
    run(batch(event(0, body=BODIES[0]), event(1, body=BODIES[3])), 0)
    before = {letter["id"]: (letter["reason"], letter["fingerprint"]) for letter in letters(place.store())}
    assert reprocess(Selection(), of(place)).failed == 2
    assert {letter["id"]: (letter["reason"], letter["fingerprint"]) for letter in letters(place.store())} == before
    assert reprocess(Selection(), consumer(place.store(), decode=decode.json("id STRING, amount BIGINT NOT NULL"))).failed == 2
    after = {letter["sequence_number"]: letter["reason"] for letter in letters(place.store())}
    no_key = "every part of the idempotence key is null: the event lacks it, or idempotence_key= names the wrong column"
    assert after == {0: "$.amount is missing; the schema requires it", 1: no_key}
    assert_proven(place.store())


def test_a_flood_of_bodies_says_what_is_wrong_with_one_of_them(place: Place) -> None:
    """Nothing is parked, so that the error itself has to say what does not fit. It goes to logs: without the value."""
    said = r"broker/orders/0 0: the body does not decode: \$\.amount must be a whole number from"
    with pytest.raises(BudgetExceeded, match=said) as stopped:
        of(place)(batch(*(event(n, body=b'{"id":"a","amount":"secret"}') for n in range(120))), 0)
    assert "secret" not in str(stopped.value) and not letters(place.store())


def test_a_letter_whose_body_is_too_large_says_how_large_and_why_it_was_parked(place: Place) -> None:
    """Size and limit stand in the reason, and behind them what happened; letters of one cause are one group, whatever their sizes."""
    run = of(place, max_body=1_000)
    sizes = (2_000, 40_000)
    rejected = [event(n, body=b'{"id":"%d","amount":-1,"x":"%s"}' % (n, b"x" * size)) for n, size in enumerate(sizes)]
    run(batch(*rejected, event(5, body=b"<order>" + b"x" * 3_000)), 0)
    found = sorted(letters(place.store()), key=lambda letter: letter["sequence_number"])
    assert {letter["kind"] for letter in found} == {"TOO_LARGE"}
    expected = [
        f"the body has {len(rejected[0]['body']):,} bytes, more than max_body=1,000; parked because: negative amount",
        f"the body has {len(rejected[1]['body']):,} bytes, more than max_body=1,000; parked because: negative amount",
        "the body has 3,007 bytes, more than max_body=1,000; parked because: the body is not JSON: Expecting value, at character 0 of 3007",
    ]
    assert [letter["reason"] for letter in found] == expected
    assert found[0]["fingerprint"] == found[1]["fingerprint"] != found[2]["fingerprint"]
    run.register_log_reader(lambda source, topic, partition, first, last: batch(*rejected))
    assert reprocess(Selection(kind="TOO_LARGE", last=1), run).failed == 2
    assert [letter["reason"] for letter in letters(place.store(), last=1)] == expected[:2]
    assert_proven(place.store())


def test_secrets_in_a_body_do_not_come_into_the_reason(place: Place) -> None:
    """What looks like a password is hidden, as in the messages of handlers."""
    run = of(place)
    run(batch(event(0, body=b'{"id":"a","amount":"postgresql://bob:hunter2hunter2@db/orders"}')), 0)
    (letter,) = letters(place.store())
    assert "hunter2" not in letter["reason"] and re.match(r'\$\.amount is "postgresql://bob', letter["reason"])


def test_no_value_of_a_body_can_break_the_letter(place: Place) -> None:
    """Half of a surrogate pair, NUL and line breaks in the value that is shown: no store refuses the letter for it."""
    values = (rb"\ud800", rb"\u0000", rb"\n\t\u001b[2J", b"x" * 5_000)
    of(place)(batch(*(event(n, body=b'{"id":"a","amount":"%s"}' % value) for n, value in enumerate(values))), 0)
    found = sorted(letters(place.store()), key=lambda letter: letter["sequence_number"])
    assert len({letter["fingerprint"] for letter in found}) == 1
    assert all(letter["reason"].isprintable() and len(letter["reason"]) < 200 for letter in found)
    assert found[0]["reason"].startswith('$.amount is "\\ud800"; it must be')
    assert_proven(place.store())


def test_a_decoder_that_is_a_function_gives_no_reason(place: Place) -> None:
    """Only the user's own code knows why: the letter says that the body does not decode."""
    run = of(place)
    policy = run.job().policy
    assert policy.decoder == ORDER
    run.decode = lambda column: column
    assert run.job().policy.decoder is None
    assert pa.types.is_struct(ORDER.type)


def test_a_reason_that_is_cut_says_so() -> None:
    """Nobody takes the first half of an advice for all of it; a reason that fits stays as it is."""
    at = dt.datetime.now(dt.UTC)
    assert reason_of(Failure("ValueError", "too\nbad", "", "f", at)) == "ValueError: too bad"
    assert reason_of(Failure("ValueError", "x" * 1000, "", "f", at)) == f"ValueError: {'x' * 299}…"


REASONS_OF_ALL_KINDS = {"half": "half \ud83d", "nul": "NUL \0", "long": "long " * 10_000, "error": ValueError("half \udcff")}


@pytest.mark.parametrize("kind", REASONS_OF_ALL_KINDS)
def test_any_text_may_be_the_reason(place: Place, kind: str) -> None:
    """A text that a handler made of a body, which no store or file takes as it is: the event is parked, and the stream goes on."""
    run, reason = consumer(place.store(), budget=None), REASONS_OF_ALL_KINDS[kind]

    def handler(events: pa.Table, tx: Any) -> None:
        tx.reject(events, pa.array([n == 1 for n in events["sequence_number"].to_pylist()]), reason)

    run._handler = handler
    assert run(batch(*orders(range(3))), 0).dead_lettered == 1
    (letter,) = letters(place.store())
    assert letter["kind"] == "REJECTED" and len(letter["reason"].encode()) <= 10_000
    assert str(reason)[:4] in letter["reason"] and run(batch(*orders([3])), 1).processed == 1
    assert_proven(place.store())
