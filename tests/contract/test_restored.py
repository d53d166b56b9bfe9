"""Tables that were taken back: what a query may do of which they know nothing."""

from __future__ import annotations

import pytest

from checkpoint import changes
from checkpoint.errors import StoreRestored
from kit.orders import assert_proven, batch, consumer, ids, orders
from kit.places import Place


@pytest.mark.parametrize("accepted", [False, True])
def test_one_harmless_batch_makes_no_query_known(place: Place, accepted: bool) -> None:
    """A query of which the restored state has nothing is refused at a batch that leaves nothing out, and at the next one, which would."""
    consumer(place.store(), query="before")(batch(*orders(range(3))), 0)
    if accepted:
        place.store().amend("shop", changes.accept_restore, by="test", reason="restored from a backup")
    harmless, next_one, elsewhere = batch(*orders([2, 3])), batch(*orders([9])), batch(*orders([9], partition=1))
    for number, rows in ((1, harmless), (2, next_one), (1, elsewhere), (2, next_one)):
        with pytest.raises(StoreRestored, match="knows nothing of it"):
            consumer(place.store(), query="of the lost time")(rows, number)
    assert ids(place.read()) == ["p0-0", "p0-1", "p0-2"]
    consumer(place.store(), query="at the checkpoint")(batch(*orders(range(3, 10)), *orders(range(10), partition=1)), 0)
    assert len(place.read()) == 20
    assert_proven(place.store())
