"""A container engine for tests, where one answers: services of docker-compose.yml, each started when it is first asked for.

The choosing is tested with a `docker` that only pretends (test_engine.py). All this was written where no engine exists: that the images
themselves do what the fixtures ask of them has not been seen yet.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit import kafka_server

SECONDS = 5

EMULATOR_KEY = "SAS_KEY_VALUE"
"""The one that Microsoft's emulator knows."""


@functools.cache
def answers() -> bool:
    """Whether there is an engine, and it answers."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    try:
        return subprocess.run([docker, "info"], capture_output=True, timeout=SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def started(request: pytest.FixtureRequest, service: str) -> Any:
    """pytest-docker's services, with this one started; all are removed at the end of the run."""
    services = request.getfixturevalue("docker_services")
    services._docker_compose.execute(f"up --detach {service}")
    return services


def address(request: pytest.FixtureRequest, service: str, port: int, seconds: float = 120.0) -> str:
    """host:port at which this port of a service answers, once it does."""
    services = started(request, service)
    host, mapped = request.getfixturevalue("docker_ip"), services.port_for(service, port)
    services.wait_until_responsive(timeout=seconds, pause=0.2, check=lambda: _open(host, mapped))
    return f"{host}:{mapped}"


def _open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def runs_kafka() -> bool:
    """Its listeners are on the host's network, which only engines on Linux have."""
    return answers() and sys.platform == "linux" and not os.environ.get("DOCKER_HOST", "").startswith("tcp")


def emulates() -> bool:
    """Whether Microsoft's emulator may be started: somebody has to agree to its licence."""
    return answers() and os.environ.get("ACCEPT_EULA") == "Y"


class ContainerBroker(kafka_server.Broker):
    """The broker of kafka_server.py in a container: same folder, same properties, same ports; killed and started again as that one is."""

    compose: Any = None

    @classmethod
    def made(cls, compose: Any) -> ContainerBroker:
        """Format a log folder, start a broker on it."""
        broker = cls(*kafka_server.prepared())
        broker.compose = compose
        broker.home.chmod(0o777)
        (broker.home / "data").mkdir(mode=0o777)
        os.environ["DEDUP_TEST_KAFKA_HOME"] = str(broker.home)
        os.environ["DEDUP_TEST_KAFKA_OPTS"] = f"-D{kafka_server.ALLOWED}={kafka_server.keys_url(broker.home)}"
        os.environ["DEDUP_TEST_KAFKA_USER"] = f"{os.getuid()}:{os.getgid()}"
        properties: Path = broker.home / "server.properties"
        compose.execute(f"run --rm kafka /opt/kafka/bin/kafka-storage.sh format -t {kafka_server.cluster_id()} -c {properties}")
        broker.start()
        return broker

    def launch(self) -> None:
        """In its container, a new one or that of before."""
        self.compose.execute("up --detach kafka")

    def gone(self) -> bool:
        """Only the port tells."""
        return False

    def kill(self) -> None:
        """SIGKILL for the container."""
        self.compose.execute("kill --signal SIGKILL kafka", success_codes=(0, 1))

    def stop(self) -> None:
        """Shut down in order; data stays."""
        self.compose.execute("stop kafka")
