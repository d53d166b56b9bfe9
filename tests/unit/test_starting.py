"""Where a stream without its own checkpoint goes on: right behind ours, and never past what nobody has seen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from checkpoint.errors import ConfigError, IncarnationChanged, PositionGap
from checkpoint.head import Checkpoint, Head
from checkpoint.position import Partition
from checkpoint.start import New, Place, positions, spark_json

HEAD = Head("shop", checkpoints={Partition("kafka", "orders", 0): Checkpoint(9), Partition("other", "orders", 1): Checkpoint(5)})


@dataclass
class Log:
    """A topic with these ends."""

    ends: Mapping[Place, tuple[int, int]]

    def spans(self, topics: Sequence[str]) -> Mapping[Place, tuple[int, int]]:
        """Those of these topics."""
        return {place: span for place, span in self.ends.items() if place[0] in topics}


@pytest.mark.parametrize(("new", "start"), [("earliest", -2), ("latest", -1)])
def test_each_partition_goes_on_behind_its_checkpoint(new: New, start: int) -> None:
    """Every partition is named, as Spark asks for; those without a checkpoint of this source begin where the caller says."""
    log = Log({("orders", 0): (0, 20), ("orders", 1): (0, 20), ("orders", 10): (0, 0), ("more", 0): (3, 4), ("unasked", 0): (0, 9)})
    text = spark_json(positions(HEAD, "kafka", log, ["orders", "more"], new))
    assert json.loads(text) == {"orders": {"0": 10, "1": start, "10": start}, "more": {"0": start}}


def test_a_checkpoint_at_the_very_end_waits_there() -> None:
    """The position after the last one is where the next event will be."""
    assert positions(HEAD, "kafka", Log({("orders", 0): (10, 10)}), ["orders"]) == {("orders", 0): 10}


def test_retention_that_passed_the_checkpoint_is_a_gap_to_be_accepted() -> None:
    """Lost positions are named; once a person has accepted them the stream begins at what is left."""
    log = Log({("orders", 0): (15, 20)})
    with pytest.raises(PositionGap, match=r"kafka/orders/0 10-14.*accept-gap shop"):
        positions(HEAD, "kafka", log, ["orders"])
    assert positions(replace(HEAD, gap_accepted=True), "kafka", log, ["orders"]) == {("orders", 0): 15}


def test_a_log_that_ends_below_the_checkpoint_is_refused() -> None:
    """Beginning at its end would skip everything up to the old checkpoint: the topic is another one, or lost events."""
    with pytest.raises(IncarnationChanged, match="accept-incarnation shop --source kafka --topic orders"):
        positions(HEAD, "kafka", Log({("orders", 0): (0, 9)}), ["orders"])


def test_no_topics_are_a_mistake() -> None:
    """A stream that begins nowhere is not what anybody meant."""
    with pytest.raises(ConfigError):
        positions(HEAD, "kafka", Log({}), [])
