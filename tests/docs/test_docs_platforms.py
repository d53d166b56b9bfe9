"""What the pages of managed platforms show fits the code: nobody runs it on the platforms, so it is run here, beside doubles of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer.main
from obstore.store import from_url

from dedup import ConfigError, Consumer, DeltaStore, PostgresStore, kafka
from dedup.cli.app import app
from kit.paths import ROOT

PAGES = ("databricks", "fabric", "emr", "synapse", "kubernetes")
HOW_TO = ROOT / "docs/how-to"


def page(name: str) -> str:
    """The page of one platform."""
    return (HOW_TO / f"{name}.md").read_text(encoding="utf-8")


def blocks(language: str, name: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page(name), re.DOTALL)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_what_was_not_run(name: str) -> None:
    """Who opens a page reads in its first paragraphs that dedup was not run there, and what was; a table says what is not tried."""
    first = page(name).split("\n\n")[2]
    assert first.startswith("> **dedup was not run on ") and "What was run: " in first
    assert re.search(r"^## Known not to work, or not tried$", page(name), re.MULTILINE)
    lines = page(name).splitlines()
    assert 40 <= len(lines) <= 110 and max(map(len, lines)) <= 150


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a program finds on these platforms: Spark, secrets and a broker, none of them real. `calls` has the commands it starts."""
    calls = list[list[str]]()
    utils: Any = types.ModuleType("notebookutils")
    utils.credentials = MagicMock(getSecret=_secret)
    utils.mssparkutils = MagicMock(credentials=MagicMock(getSecretWithLS=_secret))
    monkeypatch.setitem(sys.modules, "notebookutils", utils)
    boto: Any = types.ModuleType("boto3")
    boto.client = lambda service, region_name: MagicMock(
        generate_db_auth_token=lambda DBHostname, Port, DBUsername: f"{DBHostname}:{Port}/token"
    )
    monkeypatch.setitem(sys.modules, "boto3", boto)
    monkeypatch.setattr(kafka.Broker, "cluster_id", lambda broker: "cluster")
    monkeypatch.setattr(Consumer, "starting_offsets", lambda consumer, log, *topics: "earliest")
    monkeypatch.setattr(Consumer, "run", lambda consumer, writer: consumer.job())
    monkeypatch.setattr(subprocess, "run", lambda line, check, env=os.environ: calls.append([*line]))
    for variable in ("BROKER", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "given")
    for part in ("TENANT_ID", "CLIENT_ID", "CLIENT_SECRET"):
        monkeypatch.setenv(f"AZURE_STORAGE_{part}", "given")
    spark = MagicMock()
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", MagicMock(getOrCreate=lambda: spark))
    return {"spark": spark, "calls": calls}


def _secret(place: str, name: str) -> str:
    return "Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=all;SharedAccessKey=given" if name == "hub" else "given"


@pytest.mark.parametrize("name", PAGES)
def test_the_program_of_a_page_is_one_that_dedup_takes(name: str, platform: dict[str, Any]) -> None:
    """Each name, setting and argument of the page exists: its blocks make the consumer, its store and its handler, and start the stream."""
    for block in blocks("python", name):
        exec(compile(block, name, "exec"), platform)
    store = platform["consumer"].store
    if isinstance(store, PostgresStore):
        assert platform["token"]().endswith("/token")
    else:
        assert isinstance(store, DeltaStore)
        options = platform["options"]()
        assert dict(store.storage_options or {}) == options
        assert from_url(store.path, config={key.lower(): value for key, value in options.items()}), "settings that object storage knows"


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_exist(name: str, platform: dict[str, Any]) -> None:
    """Each `dedup ...` of a page, in a console or begun by its program, is a command that takes these options."""
    for block in blocks("python", name):
        exec(compile(block, name, "exec"), platform)
    lines = [shlex.split(line) for block in blocks("console", name) for line in block.splitlines() if re.search(r"(^| -- )dedup ", line)]
    begun = [line[line.index("dedup") + 1 :] for line in [*lines, *platform["calls"]]]
    program: Any = typer.main.get_command(app)
    for command, *words in begun:
        program.commands[command].make_context(command, list(words))
    assert {command for command, *_ in begun} >= ({"status"} if name == "kubernetes" else {"status", "upkeep", "verify"})


def test_each_page_is_found() -> None:
    """The navigation, the list of guides and the page of what was tested lead to each platform."""
    for place in ("mkdocs.yml", "docs/how-to/index.md", "docs/reference/platforms.md"):
        text = (ROOT / place).read_text(encoding="utf-8")
        assert [name for name in PAGES if f"{name}.md" not in text] == [], place


@pytest.mark.parametrize(
    "path", ["/Volumes/main/shop/state", "/lakehouse/default/Files/dedup", "/synfs/1/state", "/dbfs/state", "dbfs:/state"]
)
def test_mounts_are_refused_as_the_pages_say(path: str) -> None:
    """A mount of object storage cannot create a file only if it is absent, and looks like a disk."""
    with pytest.raises(ConfigError):
        DeltaStore(path)
