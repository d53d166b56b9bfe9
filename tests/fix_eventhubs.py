"""Event Hubs for tests: `eventhubs`, the double in a process of its own, and `hub`, a fresh hub in it.

The double is ours (tests/eventhubs). With DEDUP_TEST_EVENTHUBS (a connection string), `any_hub` is the hub it names, too; and a hub of
Microsoft's emulator where a container engine answers and ACCEPT_EULA=Y agrees to its licence (engine.py).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import engine
import pytest
from eventhubs import clients
from eventhubs.control import Double, running_double

MakeHub = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the double as `eventhubs`."""
    for item in items:
        if {"eventhubs", "any_hub"} & set(getattr(item, "fixturenames", ())):
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


@dataclass(frozen=True)
class AnyHub:
    """A hub of the double or of the real service; on that, tests find events of others and no faults on command."""

    connection: str
    name: str
    begin: dict[int, int]  # partition -> sequence number of the first event that this test sends

    def send(self, partition: int, bodies: Sequence[bytes]) -> None:
        """One batch, by the client."""
        clients.send(self.connection, self.name, bodies, str(partition))


def emulator(request: pytest.FixtureRequest) -> str:
    """The connection string of a hub in Microsoft's emulator. Skips where it must not, or cannot, be started."""
    if not engine.emulates():
        pytest.skip("Microsoft's emulator needs a container engine, and ACCEPT_EULA=Y from whoever runs the tests")
    there = engine.address(request, "eventhubs", 5672)
    login = f"SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey={engine.EMULATOR_KEY}"
    return f"Endpoint=sb://{there};{login};UseDevelopmentEmulator=true;EntityPath=dedup"


@pytest.fixture(params=["double", "emulator", "service"])
def any_hub(request: pytest.FixtureRequest) -> AnyHub:
    """One after the other: the emulator where it may run, the service where DEDUP_TEST_EVENTHUBS holds the connection string of a hub."""
    from dedup.eventhub import Connection, Namespace

    if request.param == "double":
        connection = (
            f"{request.getfixturevalue('eventhubs').connection_string};EntityPath={request.getfixturevalue('new_hub')(partitions=2)}"
        )
    elif request.param == "emulator":
        connection = emulator(request)
    else:
        connection = os.environ.get("DEDUP_TEST_EVENTHUBS") or pytest.skip("DEDUP_TEST_EVENTHUBS names no real hub")
    hub = Connection.of(connection)
    return AnyHub(connection, hub.hub, {number: span.end for number, span in Namespace(hub).look().spans.items()})
