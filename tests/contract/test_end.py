"""An instance ends right before each step of the protocol, in this process: test_kill.py kills whole processes, which takes longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.orders import assert_proven, batch, consumer, event, ids, letters
from kit.places import Place


def ends_before(step: int, told: list[str]) -> Callable[[str], None]:
    """Ends the process as Ctrl-C does right before its n-th step, and adds the step's name to what it has told."""
    left = [step]

    def on_step(name: str) -> None:
        if not left[0]:
            told.append(name)
            raise KeyboardInterrupt
        left[0] -= 1

    return on_step


def rows_of(number: int) -> Any:
    """A batch with a duplicate of the first event, a duplicate of the first letter, a new event and a new letter."""
    duplicates = [event(4 * number, "k0"), event(4 * number + 1, "bad0", -1)]
    return batch(*duplicates, event(4 * number + 2, f"k{number}"), event(4 * number + 3, f"bad{number}", -1))


@pytest.mark.fast_on("postgres")
def test_an_end_before_any_step_loses_and_doubles_nothing(place: Place) -> None:
    """A new instance after each end: what was not decided comes again, what was decided is there once, duplicates are counted once."""
    consumer(place.store())(batch(event(2, "k0"), event(3, "bad0", -1)), 0)
    ended: list[str] = []
    number, ends = 1, 0  # of this batch
    while True:
        try:
            # three ends with one batch in hand would be an event that kills: after two of them it passes
            consumer(place.store(on_step=ends_before(len(ended) if ends < 2 else 10**6, ended)))(rows_of(number), number)
            if ends < 2:
                break  # there is no such step any more
        except KeyboardInterrupt:
            ends += 1
            if place.store().head("shop").batch_id != number:
                continue
            assert consumer(place.store())(rows_of(number), number).redelivered == 4  # decided: Spark comes with it again
        number, ends = number + 1, 0
    assert {"redeliveries", "reserve", "handler", "park", "note", "record", "commit"} <= set(ended)
    assert sorted(ids(place.read())) == sorted(f"k{n}" for n in range(number + 1))
    found = {x["idempotence_key"]: x["duplicates"] for x in letters(place.store())}
    assert found == {f"bad{n}": number * (n == 0) for n in range(number + 1)}
    assert_proven(place.store())
