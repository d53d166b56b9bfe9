"""Which servers the fixtures use: a container engine's where one answers, else local ones. The `docker` here only pretends."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from pytest_docker.plugin import DockerComposeExecutor, Services

from fixtures import fix_azurite, fix_kafka
from fixtures.fix_eventhubs import emulator
from kit import azurite_server, engine, kafka_server
from kit.paths import TESTS

COMPOSE = TESTS / "docker-compose.yml"
Docker = Callable[[int], Path]
"""Puts a `docker` on PATH whose `info` ends with this code; gives the file with what it was called with."""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    """A `docker` that writes down its arguments and names one port, at which something listens."""
    listening = socket.create_server(("127.0.0.1", 0))

    def put(code: int) -> Path:
        log, program = tmp_path / "log", tmp_path / "docker"
        port = listening.getsockname()[1]
        named = f'case "$*" in *" port "*) echo 0.0.0.0:{port};; esac'
        program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = info ] && exit {code}\n{named}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return log

    engine.answers.cache_clear()
    yield put
    engine.answers.cache_clear()
    listening.close()


class Request:
    """A fixture request that knows pytest-docker's fixtures."""

    def getfixturevalue(self, name: str) -> Any:
        """As pytest's."""
        return "127.0.0.1" if name == "docker_ip" else Services(DockerComposeExecutor("docker compose", str(COMPOSE), "pretended"))


def test_an_engine_counts_only_where_it_answers(docker: Docker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A `docker` without its daemon is none, and no `docker` is none."""
    docker(0)
    assert engine.answers() and engine.runs_kafka() == (sys.platform == "linux")
    engine.answers.cache_clear()
    docker(1)
    assert not engine.answers() and not engine.runs_kafka() and not engine.emulates()
    engine.answers.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert not engine.answers()


def test_nothing_is_started_that_nobody_asked_for(request: pytest.FixtureRequest) -> None:
    """pytest-docker itself starts no service: PostgreSQL alone must not fetch a broker's image."""
    assert request.getfixturevalue("docker_setup") == []


def test_blobs_come_from_a_container_where_an_engine_answers(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that service is started, under a key of the run's own; where no engine answers, Azurite comes from npm."""
    monkeypatch.delenv("DEDUP_TEST_BLOB", raising=False)
    monkeypatch.setenv("DEDUP_TEST_AZURITE_KEY", "")
    log, fixture = docker(0), inspect.unwrap(fix_azurite.azurite)
    given = next(fixture(Request()))
    assert f"AccountKey={os.environ['DEDUP_TEST_AZURITE_KEY']};BlobEndpoint=http://127.0.0.1:" in given
    assert [line.split(" -p pretended ")[1] for line in log.read_text().splitlines()[1:]] == ["up --detach azurite", "port azurite 10000"]
    engine.answers.cache_clear()
    docker(1)
    monkeypatch.setattr(azurite_server, "running_azurite", lambda: _Local())
    assert next(fixture(Request())) == "local"


class _Local:
    def __enter__(self) -> str:
        return "local"

    def __exit__(self, *_: object) -> None:
        pass


def test_the_broker_comes_from_a_container_where_an_engine_answers(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formatted first, started, killed and started again on the same folder; where no engine answers, it comes from jars."""
    for name in ("DEDUP_TEST_KAFKA_HOME", "DEDUP_TEST_KAFKA_OPTS", "DEDUP_TEST_KAFKA_USER"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(kafka_server.Broker, "_answers", lambda self: True)
    log, fixture = docker(0), inspect.unwrap(fix_kafka.kafka)
    using = fixture(Request())
    broker = next(using)
    home = broker.home
    assert f"log.dirs={home}/data" in (home / "server.properties").read_text()
    broker.kill()
    broker.start()
    assert home.exists() and os.environ["DEDUP_TEST_KAFKA_HOME"] == str(home)
    next(using, None)
    told = [line.split(" -p pretended ")[1] for line in log.read_text().splitlines()[1:]]
    assert re.fullmatch(rf"run --rm kafka /opt/kafka/bin/kafka-storage.sh format -t \S{{22}} -c {home}/server.properties", told[0])
    assert told[1:] == ["up --detach kafka", "kill --signal SIGKILL kafka", "up --detach kafka", "kill --signal SIGKILL kafka"]
    assert not home.exists()
    engine.answers.cache_clear()
    docker(1)
    monkeypatch.setattr(kafka_server, "running_broker", lambda: _Local())
    assert next(fixture(Request())) == "local"


def test_the_emulator_waits_for_a_consent(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its licence is agreed to by whoever runs the tests; then its hub is one that its settings make."""
    docker(0)
    monkeypatch.delenv("ACCEPT_EULA", raising=False)
    with pytest.raises(pytest.skip.Exception, match="ACCEPT_EULA=Y"):
        emulator(Request())  # type: ignore[arg-type]
    monkeypatch.setenv("ACCEPT_EULA", "Y")
    given = emulator(Request())  # type: ignore[arg-type]
    assert re.match(r"Endpoint=sb://127\.0\.0\.1:\d+;.*UseDevelopmentEmulator=true;EntityPath=dedup$", given)
    (space,) = json.loads(COMPOSE.with_name("eventhubs-emulator.json").read_text())["UserConfig"]["NamespaceConfig"]
    assert [entity["Name"] for entity in space["Entities"]] == ["dedup"] and space["Entities"][0]["PartitionCount"] == "2"


def test_the_compose_file_is_what_the_fixtures_ask_for() -> None:
    """It reads as YAML, has every service with its port, and each variable in it has a value where nobody set one."""
    text = COMPOSE.read_text()
    services = yaml.safe_load(text)["services"]
    assert set(services) == {"postgres", "kafka", "azurite", "eventhubs", "eventhubs-storage"}
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert ports == {"postgres": ["127.0.0.1::5432"], "azurite": ["127.0.0.1::10000"], "eventhubs": ["127.0.0.1::5672"]}
    assert all(":-" in variable for variable in re.findall(r"\$\{[^}]*\}", text))
    assert set(services["eventhubs"]["depends_on"]) < set(services) and services["eventhubs"]["environment"]["ACCEPT_EULA"].endswith("N}")
