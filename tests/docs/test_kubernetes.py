"""What examples/kubernetes holds: manifests that fit their schemas, and name commands, settings and versions that there are."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer.main
import yaml

from dedup.cli.app import app
from dedup.postgres import PostgresStore
from dedup.verify import verify
from kit import kafka_server, maven
from kit.hub_orders import until
from kit.kafka_kit import Topic
from kit.paths import ROOT, TESTS, environment
from kit.pg_run import run

FOLDER = ROOT / "examples/kubernetes"
KUBERNETES = "1.37"
"""The newest version that kubernetes-validate has."""

SPARK_APPLICATION = json.loads((TESTS / "data/sparkapplication-v1beta2.json").read_text(encoding="utf-8"))
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
README = (ROOT / "examples/README.md").read_text(encoding="utf-8")


def manifests() -> list[dict[str, Any]]:
    """All of them, from all files."""
    return [one for file in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def named(kind: str, name: str) -> dict[str, Any]:
    """One of them, for a test to change."""
    return next(one for one in manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name))


def check(manifest: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError for what the server would refuse, fields that it does not know included."""
    if manifest["apiVersion"].startswith("sparkoperator.k8s.io/"):
        jsonschema.Draft202012Validator(SPARK_APPLICATION).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def parts(node: Any) -> Iterator[dict[str, Any]]:
    """Every object in a manifest."""
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from parts(value)
    if isinstance(node, dict):
        yield node


@pytest.mark.parametrize("manifest", manifests(), ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_a_manifest_fits_its_schema(manifest: dict[str, Any]) -> None:
    """Kubernetes, and the Spark operator for its own kind, know each field of a manifest, and its type; all are in one namespace."""
    check(manifest)
    assert manifest["metadata"]["namespace"] == "shop"


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("SparkApplication", "orders", "spec/restartPolicy/type", "always"),
        ("SparkApplication", "orders", "spec/restartPolicy/onFailureRetryInterval", "30s"),
        ("SparkApplication", "orders", "spec/driver/serviceAccountName", "orders-driver"),
        ("SparkApplication", "orders", "spec/driver/cores", "1"),
        ("SparkApplication", "orders", "spec/driver/env/1/valueFrom/secretKeyRef/keys", "orders_app"),
        ("SparkApplication", "orders", "spec/sparkVersion", None),
        ("Deployment", "orders", "spec/strategy/kind", "Recreate"),
        ("Deployment", "orders", "spec/template/spec/containers/0/readinessProbes", {}),
        ("Deployment", "orders-runner", "spec/replicas", "two"),
        ("CronJob", "dedup-upkeep", "spec/schedule", None),
        ("CronJob", "dedup-status", "spec/jobTemplate/spec/backOffLimit", 0),
    ],
)
def test_a_wrong_field_is_refused(kind: str, name: str, path: str, value: Any) -> None:
    """A field that is mistyped, of another type, or missing where it has to be, fails the check of the manifest."""
    wrong = named(kind, name)
    *above, last = path.split("/")
    place: Any = wrong
    for step in above:
        place = place[int(step) if isinstance(place, list) else step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        check(wrong)


def test_the_commands_of_the_manifests_exist() -> None:
    """Each `dedup ...` of a container, a job or a probe is a command with these options, which take these values."""
    commands = [one["command"] for manifest in manifests() for one in parts(manifest) if one.get("command", [""])[0] == "dedup"]
    assert {words[1] for words in commands} == {"status", "upkeep", "verify"}
    program: Any = typer.main.get_command(app)
    for _, name, *words in commands:
        program.commands[name].make_context(name, list(words))


def settings(manifest: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """The environment of each container."""
    return [{each["name"]: each for each in one["env"]} for one in parts(manifest) if "env" in one]


@pytest.mark.parametrize(
    ("kind", "name", "program"),
    [
        ("SparkApplication", "orders", "kubernetes/job.py"),
        ("Deployment", "orders", "kubernetes/job.py"),
        ("Deployment", "orders-runner", "plain_runner.py"),
    ],
)
def test_a_program_gets_the_settings_that_it_reads(kind: str, name: str, program: str) -> None:
    """The environment of a container has what its program reads, the image has the program, and its docstring tells of each setting."""
    text = (ROOT / "examples" / program).read_text(encoding="utf-8")
    read = set(re.findall(r"os\.environ(?:\.get\(|\[)[\"'](\w+)", text))
    manifest = named(kind, name)
    assert f"/app/{Path(program).name}" in json.dumps(manifest) and f"examples/{program}" in DOCKERFILE
    assert read and all(read <= given.keys() for given in settings(manifest))
    assert not [setting for setting in read if setting not in text.split('"""')[1]]


def test_secrets_come_from_one_secret_that_the_page_makes() -> None:
    """No password is in a manifest: it is a key of the Secret for which the README has the command."""
    keys = set()
    for given in [each for manifest in manifests() for each in settings(manifest)]:
        assert "@" in given["DEDUP_STORE"]["value"] and ":" not in given["DEDUP_STORE"]["value"].split("@")[0].split("//")[1]
        references = [given[name]["valueFrom"]["secretKeyRef"] for name in ("PGPASSWORD", "EVENTHUBS") if name in given]
        assert "PGPASSWORD" in given and {one["name"] for one in references} == {"orders"}
        keys |= {one["key"] for one in references}
    assert set(re.findall(r"--from-(?:literal|file)=(\w+)", README)) == keys


def test_versions_are_one_and_have_been_run() -> None:
    """The Spark of the image is that of the manifest, and `make matrix` ran it; all containers have the one image, and one user."""
    (spark,) = re.findall(r"^ARG SPARK=(.*)$", DOCKERFILE, re.MULTILINE)
    assert named("SparkApplication", "orders")["spec"]["sparkVersion"] == spark
    assert f"| PySpark {spark} |" in (ROOT / "docs/reference/platforms.md").read_text(encoding="utf-8")
    (image,) = {one["image"] for manifest in manifests() for one in parts(manifest) if "image" in one}
    assert f"--tag {image} " in DOCKERFILE and f"--tag {image} " in README
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert {one["runAsUser"] for manifest in manifests() for one in parts(manifest) if "runAsUser" in one} == {int(user)}


def test_the_image_copies_what_there_is() -> None:
    """Each file and folder that the Dockerfile copies from the checkout is there."""
    lines = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from" not in line]
    copied = [name for names in lines for name in names]
    assert {"checkpoint", "deadletter", "dedup", "sql", "setup.cfg"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_only_runners_overlap() -> None:
    """A deployment of a Spark job has one replica, and the old pod ends before the new one begins; runners share their work."""
    strategies = {one["metadata"]["name"]: one["spec"] for one in manifests() if one["kind"] == "Deployment"}
    assert (strategies["orders"]["replicas"], strategies["orders"]["strategy"]) == (1, {"type": "Recreate"})
    assert strategies["orders-runner"]["strategy"] == {"type": "RollingUpdate"}


ORDERS = [
    ("m-1", {"order_id": "o-1", "customer": "ann", "amount": 5}),
    ("m-1", {"order_id": "o-1", "customer": "ann", "amount": 5}),
    ("m-2", {"order_id": "o-2", "customer": "bob", "amount": -2}),
]


@pytest.mark.full
def test_the_job_runs_until_sigterm(kafka: kafka_server.Broker, topic: Topic, postgres: str, tmp_path: Path) -> None:
    """Two pods, one after the other, each with a folder of its own: each order is in the table once, and SIGTERM ends a pod in between."""
    run(postgres, "create table orders (order_id text, customer text, amount bigint)")
    spark = f"--master local[2] --jars {maven.spark_kafka()} --conf spark.ui.enabled=false pyspark-shell"
    given = {"DEDUP_STORE": postgres, "BROKER": kafka.servers, "TOPIC": topic.name, "PYSPARK_SUBMIT_ARGS": spark}
    for pod, sent in enumerate((ORDERS, [*ORDERS[:1], ("m-3", {"order_id": "o-3", "customer": "eve", "amount": 9})])):
        topic.send_messages(*((number, json.dumps(body)) for number, body in sent))
        _pod(tmp_path / str(pod), given, lambda: _decided(postgres) == topic.ends()[1])
    assert sorted(run(postgres, "select * from orders")) == [("o-1", "ann", 5), ("o-3", "eve", 9)]
    report = verify(PostgresStore(postgres), "orders")
    assert report.ok and report.counts["dead_lettered"] == 1


def _pod(shared: Path, given: dict[str, str], done: Callable[[], bool]) -> None:
    """Run the job until this is true, then end it as Kubernetes does."""
    shared.mkdir()
    variables = environment(**given, SHARED=str(shared), PYSPARK_PYTHON=sys.executable)
    log = shared / "log"
    with log.open("w") as errors:
        process = subprocess.Popen([sys.executable, str(FOLDER / "job.py")], env=variables, stdout=errors, stderr=errors)
    try:
        until(done, lambda: _require_running(process, log))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM, log.read_text()
    finally:
        process.kill()
        process.wait()


def _decided(dsn: str) -> int:
    found = run(dsn, "select coalesce(max(sequence_number), -1) + 1 from dedup.checkpoint")
    return int(found[0][0])


def _require_running(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.poll() is None, log.read_text()
