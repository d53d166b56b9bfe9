"""A real Kafka broker for tests: one node in KRaft mode, on free ports, that can be killed and started again on its data.

It goes with its starter, also when that one is killed. Used by fix_kafka.py; plain functions, no pytest.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kit import maven, token_server
from kit.servers import RunsProcess, die_with_parent, free_ports

START_SECONDS = 90.0
ATTEMPTS = 3

KEY = "c2VjcmV0IGtleQ=="
"""The shared access key of `Broker.connection_string`."""

OAUTH, ALLOWED = "org.apache.kafka.common.security.oauthbearer", "org.apache.kafka.sasl.oauthbearer.allowed.urls"
"""Classes of the login by token, and the setting of a JVM without which it asks nobody."""

PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},LOGIN://127.0.0.1:{login},BEHIND://127.0.0.1:{behind},TOKEN://127.0.0.1:{token},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},LOGIN://127.0.0.1:{login},BEHIND://127.0.0.1:{proxy},TOKEN://127.0.0.1:{token}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,LOGIN:SASL_PLAINTEXT,BEHIND:PLAINTEXT,TOKEN:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
listener.name.login.sasl.enabled.mechanisms=PLAIN
listener.name.login.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required {users};
listener.name.token.sasl.enabled.mechanisms=OAUTHBEARER
listener.name.token.oauthbearer.sasl.jaas.config={oauth}.OAuthBearerLoginModule required;
listener.name.token.oauthbearer.sasl.server.callback.handler.class={oauth}.OAuthBearerValidatorCallbackHandler
sasl.oauthbearer.jwks.endpoint.url={keys}
sasl.oauthbearer.expected.issuer={issuer}
sasl.oauthbearer.expected.audience={audience}
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
num.network.threads=2
num.io.threads=2
background.threads=2
broker.session.timeout.ms=1000
broker.heartbeat.interval.ms=200
log.cleaner.backoff.ms=100
log.cleaner.dedupe.buffer.size=8388608
log.initial.task.delay.ms=500
log.retention.check.interval.ms=500
"""


@dataclass
class Broker(RunsProcess):
    """One broker. Its second port asks for a login, as the Kafka endpoint of Event Hubs does; clients of the third are sent to a proxy.

    The last one asks for a token that token_server.py has signed.
    """

    home: Path
    port: int
    login_port: int
    behind_port: int
    proxy_port: int  # where kafka_proxy.py listens
    token_port: int
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def servers(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def connection_string(self) -> str:
        """What logs in at the second port."""
        return connection_string(self.login_port)

    def start(self) -> None:
        """Start on the same data and ports, wait until it answers. Raises RuntimeError with the log's end if it does not."""
        self.launch()
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and not self.gone():
            if self._answers():
                return
            time.sleep(0.1)
        self.kill()
        log = self.home / "log"
        raise RuntimeError("Kafka did not start:\n" + (log.read_text()[-3000:] if log.exists() else ""))

    def launch(self) -> None:
        """Begin to run it, from jars."""
        with (self.home / "log").open("ab") as log:
            command = _java(
                "-Xmx512m", "-Xms128m", f"-D{ALLOWED}={keys_url(self.home)}", "kafka.Kafka", str(self.home / "server.properties")
            )
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.home, preexec_fn=die_with_parent)

    def gone(self) -> bool:
        """Whether it ended by itself."""
        return self.process is None or self.process.poll() is not None

    def _answers(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        quiet = {"bootstrap.servers": self.servers, "log_level": 0, "socket.timeout.ms": 2000}
        with contextlib.suppress(OSError, KafkaException):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return bool(AdminClient(quiet).list_topics(timeout=2).brokers)
        return False

    def kill(self) -> None:
        """SIGKILL, as if the machine had failed; the next start recovers its logs."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut down in order; data stays."""
        self._end(signal.SIGTERM)

    def remove(self) -> None:
        """Kill it and delete its data."""
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)


def _java(*arguments: str) -> list[str]:
    path = os.pathsep.join(map(str, maven.jars("kafka", maven.BROKER, transitive=True)))
    given = os.environ.get("DEDUP_TEST_JVM", "").split()
    options = [*given, *(a for a in arguments if a.startswith(("-X", "-D")))]
    return [maven.java(), *options, "-Dlog4j2.level=ERROR", "-cp", path, *[a for a in arguments if a not in options]]


def connection_string(port: int) -> str:
    """As Microsoft's emulator has one: no TLS, and a port."""
    return f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=listen;SharedAccessKey={KEY};UseDevelopmentEmulator=true"


def start_broker() -> Broker:
    """Format a log folder and start a broker on it; once more with other ports, where somebody took one of them meanwhile."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(RuntimeError):
            return _start_broker()
    return _start_broker()


def prepared() -> tuple[Path, int, int, int, int, int]:
    """A folder with the properties of a broker, and its ports."""
    home = Path(tempfile.mkdtemp(prefix="kafka-"))
    ports = free_ports(6)
    token_server.new_key(home)
    user, password = "$ConnectionString", connection_string(ports[1])
    users = f'username="{user}" password="{password}" user_{user}="{password}"'
    names = dict(zip(("port", "login", "behind", "proxy", "token", "controller"), ports, strict=True))
    told = {"oauth": OAUTH, "keys": keys_url(home), "issuer": token_server.ISSUER, "audience": token_server.AUDIENCE}
    (home / "server.properties").write_text(PROPERTIES.format(**names, **told, data=home / "data", users=users))
    return home, ports[0], ports[1], ports[2], ports[3], ports[4]


def keys_url(home: Path) -> str:
    """Where the broker finds the keys of tokens."""
    return f"file:{home / token_server.KEYS}"


def cluster_id() -> str:
    """A new one."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _start_broker() -> Broker:
    broker = Broker(*prepared())
    format_ = _java("-Xmx128m", "kafka.tools.StorageTool", "format", "-t", cluster_id(), "-c", str(broker.home / "server.properties"))
    done = subprocess.run(format_, capture_output=True, text=True, timeout=START_SECONDS)
    if done.returncode:
        raise RuntimeError("Kafka's folder could not be formatted:\n" + (done.stdout + done.stderr)[-3000:])
    broker.start()
    return broker


@contextlib.contextmanager
def running_broker() -> Iterator[Broker]:
    """A broker for the length of the block, then removed with its data."""
    broker = start_broker()
    try:
        yield broker
    finally:
        broker.remove()
