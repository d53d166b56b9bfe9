"""`dedup metrics`, and the alarms and the dashboard that use it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from checkpoint.errors import SchemaOutdated, StoreUnavailable
from dedup.cli.prometheus import Collector
from dedup.delta import DeltaStore
from dedup.signals.metrics import METRICS
from fixtures.fix_places import BOTH, new_place
from kit.orders import batch, consumer, event, orders
from kit.paths import ROOT, environment
from kit.places import DeltaPlace, Place
from kit.year import alarms

Run = Callable[..., tuple[int, str, str]]

FOLDER = ROOT / "examples/prometheus"
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
PLACE = 'consumer="shop",source="kafka",topic="orders",partition="0"'

USUAL = {
    "dedup_up": "1x240",
    'dedup_last_commit_timestamp_seconds{consumer="shop"}': "0+60x240",
    'dedup_epoch{consumer="shop"}': "3x240",
    f"dedup_checkpoint{{{PLACE}}}": "0+500x240",
    f"dedup_lag_events{{{PLACE}}}": "700 300 500 900 200x236",
    'dedup_open_letters{consumer="shop",kind="REJECTED"}': "4x240",
    'dedup_blocked_letters{consumer="shop",kind="REJECTED"}': "2x240",
    'dedup_oldest_letter_timestamp_seconds{consumer="shop"}': "0x240",
    'dedup_outbox_messages{consumer="shop",state="dead"}': "0x240",
    'dedup_oldest_message_timestamp_seconds{consumer="shop"}': "0+60x240",
    'dedup_oldest_unpublished_timestamp_seconds{consumer="shop"}': "0+60x200 _x40",
    'dedup_oldest_reservation_timestamp_seconds{consumer="shop"}': "-2600000x240",
    'dedup_damage{consumer="shop"}': "0x240",
}
"""Four hours of a usual day, a value a minute, as promtool writes series."""

FAULTS: dict[str, tuple[str, str]] = {
    "DedupUnreadable": ("dedup_up", "0x240"),
    "DedupSilent": ('dedup_last_commit_timestamp_seconds{consumer="shop"}', "0x240"),
    "DedupLagDoesNotFall": (f"dedup_lag_events{{{PLACE}}}", "0+1000x240"),
    "DedupLettersGrow": ('dedup_open_letters{consumer="shop",kind="REJECTED"}', "4x200 4+20x40"),
    "DedupLetterIsOld": ('dedup_oldest_letter_timestamp_seconds{consumer="shop"}', "-700000x240"),
    "DedupMessagesDead": ('dedup_outbox_messages{consumer="shop",state="dead"}', "0x200 2x40"),
    "DedupMessagesLate": ('dedup_oldest_message_timestamp_seconds{consumer="shop"}', "0x240"),
    "DedupPublicationLate": ('dedup_oldest_unpublished_timestamp_seconds{consumer="shop"}', "_x200 12000x40"),
    "DedupPurgeBehind": ('dedup_oldest_reservation_timestamp_seconds{consumer="shop"}', "-3100000x240"),
    "DedupCheckpointWentBack": (f"dedup_checkpoint{{{PLACE}}}", "0+500x234 1000+500x5"),
    "DedupInstancesFight": ('dedup_epoch{consumer="shop"}', "3x230 4+1x9"),
    "DedupDamaged": ('dedup_damage{consumer="shop"}', "0x220 1x20"),
}
"""Alarm -> the one series that differs from a usual day."""

BEHIND_OTHERS = ('dedup_blocked_letters{consumer="shop",kind="REJECTED"}', "2x200 2+20x40")
"""The same for a flood of letters of which all but the first wait behind it."""


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place where `shop` has decided three orders, and parked one."""
    made = new_place(request, tmp_path)
    store = made.store()
    consumer(store)(batch(*orders(range(3)), event(3, "bad", -1)), 0)
    store.close()
    return made


def test_metrics_are_printed_as_prometheus_reads_them(place: Place, dedup: Run) -> None:
    """One number per series, with the consumer's name; --json has the same."""
    code, out, err = dedup("metrics", place)
    assert (code, err) == (0, "")
    assert "dedup_up 1.0\n" in out
    assert 'dedup_open_letters{consumer="shop",kind="REJECTED"} 1.0\n' in out
    assert 'dedup_checkpoint{consumer="shop",partition="0",source="broker",topic="orders"} 3.0\n' in out
    told = json.loads(dedup("metrics --json", place)[1])
    assert set(told) == {"dedup_up", *METRICS}
    assert told["dedup_epoch"] == [{"labels": {"consumer": "shop"}, "value": 1.0}]


def text(url: str) -> str:
    """What Prometheus reads."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.full
def test_metrics_are_served_until_the_process_is_stopped(tmp_path: Path) -> None:
    """Each request reads the store anew; SIGTERM ends the process with code 0."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    consumer(place.store())(batch(*orders(range(3))), 0)
    line = [sys.executable, "-m", "dedup", "metrics", "--listen", "127.0.0.1:0", "--store", place.url]
    with subprocess.Popen(line, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        (url,) = re.findall(r"http://\S+/metrics", process.stderr.readline())
        try:
            assert 'dedup_checkpoint{consumer="shop",partition="0",source="broker",topic="orders"} 2.0' in text(url)
            consumer(place.store())(batch(*orders(range(3, 6))), 1)
            assert 'dedup_checkpoint{consumer="shop",partition="0",source="broker",topic="orders"} 5.0' in text(url)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("name", ["", "shop"])
@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), SchemaOutdated("run migrate")])
def test_a_store_that_cannot_be_read_is_a_number_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str) -> None:
    """`dedup_up` is 0, and the server goes on."""
    store = DeltaStore(str(tmp_path / "state"))

    def unreadable() -> list[str]:
        raise error

    monkeypatch.setattr(store, "consumers", unreadable)
    assert Collector(store, name).values() == {"dedup_up": [({}, 0.0)]}


@pytest.mark.parametrize("name", ["", "shop"])
def test_a_store_that_is_gone_is_a_number_too(tmp_path: Path, name: str) -> None:
    """`dedup_up` is 0 where a folder was mounted and is not any more: an empty folder has no consumer that an alarm could be about."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    consumer(place.store())(batch(*orders(range(3))), 0)
    numbers = Collector(DeltaStore(place.url), name)
    assert numbers.values()["dedup_up"] == Collector(DeltaStore(str(tmp_path / "new"))).values()["dedup_up"] == [({}, 1.0)]
    Path(place.url).rename(tmp_path / "elsewhere")
    assert numbers.values() == {"dedup_up": [({}, 0.0)]}
    Path(place.url).mkdir()
    assert numbers.values() == {"dedup_up": [({}, 0.0)]}
    Path(place.url).rmdir()
    (tmp_path / "elsewhere").rename(place.url)
    assert numbers.values()["dedup_up"] == [({}, 1.0)]


def test_a_consumer_that_cannot_be_read_is_a_number_too(tmp_path: Path) -> None:
    """`dedup_damage` is 1 where nothing else can be told of a consumer; the others have their numbers."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    for name in ("shop", "office"):
        consumer(place.store(), name=name)(batch(*orders(range(3))), 0)
    numbers = Collector(DeltaStore(place.url))
    assert [value for _, value in numbers.values()["dedup_damage"]] == [0.0, 0.0]
    ledger = tmp_path / "state/ledger/shop"
    shutil.rmtree(ledger)
    ledger.mkdir()
    told = numbers.values()
    assert told["dedup_damage"] == [({"consumer": "office"}, 0.0), ({"consumer": "shop"}, 1.0)]
    assert [labels for labels, _ in told["dedup_epoch"]] == [{"consumer": "office"}]


def test_alarms_and_dashboard_use_only_metrics_that_there_are() -> None:
    """Each name in their expressions is served; each alarm has a section in the runbook, and a fault below."""
    expressions = [rule["expr"] for rule in RULES]
    expressions += [t["expr"] for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] for t in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"\bdedup_\w+", expression)}
    assert used <= {"dedup_up", *METRICS}
    runbook = (ROOT / "docs/how-to/runbook.md").read_text()
    assert [rule["alert"] for rule in RULES] == re.findall(r"^## (Dedup\w+)$", runbook, re.MULTILINE) == list(FAULTS)


def test_the_runbook_finds_an_old_letter_that_failed_again_lately(place: Place, dedup: Run) -> None:
    """The alarm goes by the first failure, and so does what is typed first: the letter's last failure was a moment ago."""
    section = (ROOT / "docs/how-to/runbook.md").read_text().partition("## DedupLetterIsOld")[2]
    (command,) = re.findall(r"`dedup (.*?)`", section)[:1]
    code, out, _ = dedup(command.replace("NAME", "shop"), place)
    assert code == 0 and "REJECTED" in out and "first failed at" in out


def day(fault: str | None, told: tuple[str, str] | None = None) -> dict[str, Any]:
    """A test of promtool's: four hours, at whose end the alarm of this fault is raised, and no other one."""
    series = {**USUAL, **dict([told or FAULTS[fault]] if fault else [])}
    return {
        "name": fault or "a usual day",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": "count by (alertname) (ALERTS{alertstate='firing'})",
                "eval_time": "4h",
                "exp_samples": [{"labels": f'{{alertname="{fault}"}}', "value": 1}] if fault else [],
            }
        ],
    }


def test_each_alarm_is_raised_by_its_own_fault_and_by_nothing_else(tmp_path: Path) -> None:
    """promtool plays a usual day, and a day with each fault."""
    program = alarms.promtool()
    if program is None:
        pytest.skip("promtool is not installed (Debian: prometheus), and DEDUP_TEST_PROMTOOL names none")
    days = [*(day(fault) for fault in (None, *FAULTS)), day("DedupLettersGrow", BEHIND_OTHERS)]
    assert alarms.evaluated(days, tmp_path, program) == ""
