"""Event Hubs for tests: `eventhubs`, the double in a process of its own, and `hub`, a fresh hub in it.

The double is ours (tests/eventhubs). With DEDUP_TEST_EVENTHUBS (a connection string), `any_hub` is the hub it names.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from eventhubs.control import Double, running_double

MakeHub = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the double as `eventhubs`."""
    for item in items:
        if "eventhubs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.eventhubs)


@pytest.fixture(scope="session")
def _double() -> Iterator[Double]:
    with running_double() as double:
        yield double


@pytest.fixture
def eventhubs(_double: Double) -> Iterator[Double]:
    """The double, without faults from the test before."""
    _double.order("calm")
    yield _double
    _double.order("calm")


@pytest.fixture
def new_hub(eventhubs: Double) -> MakeHub:
    """Makes a hub of the test's own: `new_hub(partitions=2)` gives its name."""

    def make(partitions: int = 1, groups: tuple[str, ...] = ()) -> str:
        name = f"hub-{uuid.uuid4().hex[:10]}"
        eventhubs.create(name, partitions, groups)
        return name

    return make
