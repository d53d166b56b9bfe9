"""What the tutorial tells to do is what works, in its order: the program as it is, real broker, real database, the commands as shown."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit import kafka_server, maven
from kit.kafka_kit import Topic
from kit.paths import ROOT
from kit.pg_run import run

PAGE = (ROOT / "docs/tutorial/start.md").read_text()
ROWS = [("m-1", "ann", 5), ("m-2", "bob", 7)]


def blocks(language: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands() -> list[list[str]]:
    """The words of each line of the console blocks that this machine can run as it is: ours, and psql's statements."""
    lines = "".join(blocks("console")).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("dedup ", "psql "))]


class Shell:
    """The folder and the variables of somebody who follows the page."""

    def __init__(self, folder: Path, dsn: str, servers: str) -> None:
        self._folder, self._dsn = folder, dsn
        self._variables = {"DEDUP_STORE": dsn, "BROKER": servers, "PYSPARK_PYTHON": sys.executable}

    def python(self, file: str) -> str:
        """Run a program; what it and its commands print."""
        return self._run([sys.executable, file])

    def command(self, words: list[str]) -> str:
        """Run one line of the page."""
        if words[0] == "psql":
            return str(run(self._dsn, words[-1]))
        words = [self._variables.get(word.removeprefix("$"), word) for word in words]
        return self._run([str(Path(sys.executable).with_name("dedup")), *words[1:]])

    def _run(self, words: list[str]) -> str:
        done = subprocess.run(words, cwd=self._folder, env={**os.environ, **self._variables}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout


@pytest.mark.postgres
@pytest.mark.full
def test_the_page_leads_from_nothing_to_a_repaired_letter(
    kafka: kafka_server.Broker, topic: Topic, empty_postgres: str, tmp_path: Path
) -> None:
    """Each order once, also after the loss of Spark's checkpoint; the letters as told; the refund is in after the repair."""
    shell, (program,) = Shell(tmp_path, empty_postgres, kafka.servers), blocks("python")
    assert "spark.jars.packages" in program and '"orders")' in program
    for before in ('"subscribe", "', 'broker, "'):
        program = program.replace(f'{before}orders"', f'{before}{topic.name}"')
    program = re.sub(r'"spark.jars.packages", "[^"]*"', f'"spark.jars", "{maven.spark_kafka()}"', program)
    (tmp_path / "shop.py").write_text(program)
    create, migrate, *asked = commands()
    assert (create[0], migrate[1]) == ("psql", "migrate")
    shell.command(create)
    shell.command(migrate)
    topic.send(blocks("json")[0].splitlines())
    for _ in range(2):
        shell.python("shop.py")
        assert sorted(run(empty_postgres, "select * from orders")) == ROWS
        shutil.rmtree(tmp_path / "spark-checkpoint")
    said = ["".join(shell.command(words)) for words in asked[:5]]
    assert "negative amount" in said[2] and "UNDECODABLE" in said[2]
    repaired = re.sub(r"    good = tx.reject.*\n", "", program).replace("good.select", "orders.select")
    assert repaired.count("\n") == program.count("\n") - 1
    (tmp_path / "shop.py").write_text(repaired)
    for words in asked[5:]:
        shell.command(words)
    assert sorted(run(empty_postgres, "select * from orders")) == [*ROWS, ("m-3", "ann", -2)]
