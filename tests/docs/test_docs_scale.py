"""docs/explanation/scale.md: its tables are what the model computes from the committed constants, each of which a benchmark measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from kit.paths import ROOT
from kit.places import usual_keys

pytestmark = pytest.mark.usefixtures("benchmarks")

PAGE = ROOT / "docs/explanation/scale.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def usual_files(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files of keys are as large as they are in use, whatever other tests of this process have made of that."""
    from benchmarks import scale_model
    from dedup.delta import keys

    for name, value in usual_keys().items():
        monkeypatch.setattr(keys, name, value)
    monkeypatch.setattr(scale_model, "FLUSH_ROWS", keys.FLUSH_ROWS)
    scale_model.key_files.cache_clear()
    yield
    scale_model.key_files.cache_clear()


def test_the_tables_are_those_of_the_model() -> None:
    """`python -m benchmarks.scale --write` would change nothing: whoever changes a constant, a rule or a table's text runs it."""
    from benchmarks import scale_page

    assert scale_page.filled(TEXT) == TEXT
    assert sorted(re.findall(r"<!-- scale: (\w+) -->", TEXT)) == sorted(scale_page.BLOCKS)


def test_each_table_has_all_sizes_of_both_stores() -> None:
    """A million, 100 million and a billion keys, with 1, 10 and 100 partitions, on both stores, for a million events and for a restart."""
    cases = {f"{keys} | {partitions}" for keys in ("1 million", "100 million", "1 billion") for partitions in (1, 10, 100)}
    for title, stores in (
        ("A million events", ("PostgreSQL", "Delta")),
        ("A restart", ("PostgreSQL", "Delta", "Delta, copies", "Delta, no files")),
    ):
        section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
        for store in stores:
            assert set(re.findall(rf"^\| {store} \| (\d+ \w+ \| \d+) \|", section, re.MULTILINE)) == cases, (title, store)


def test_each_constant_names_the_benchmark_that_measured_it() -> None:
    """A part of `benchmarks.scale` for those of scale.json, a measure of latest.json for the others."""
    from benchmarks import scale, scale_model

    constants = scale_model.known()
    assert {one.benchmark for one in constants.values()} == {f"scale/{part}" for part in scale.PARTS}
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", one.date) for one in constants.values())
    latest = {line["measure"] for line in json.loads(scale_model.LATEST.read_text(encoding="utf-8"))}
    modules = "".join((ROOT / "benchmarks" / f"scale_{name}.py").read_text(encoding="utf-8") for name in ("model", "page"))
    for name in re.findall(r'\bof\("([\w/]+)(?:, other)?"\)', modules):
        assert name in constants or name in latest, name
    in_text = {name for prose in re.findall(r"## Constants\n\n(.*?)<!--", TEXT, re.DOTALL) for name in re.findall(r"`([a-z]+/\w+)`", prose)}
    assert {name for name in in_text if not name.startswith("scale/")} <= latest


def test_what_was_not_measured_is_in_italics() -> None:
    """Arithmetic with measured numbers gives computed ones; only what was measured as it stands is upright: nothing of a billion."""
    from benchmarks import scale_page
    from benchmarks.scale_model import Measured

    measured = Measured(2e9)
    assert (scale_page.size(measured), scale_page.size(measured + measured), scale_page.size(3 * measured)) == ("2 GB", "*4 GB*", "*6 GB*")
    assert (scale_page.number(Measured(12345)), scale_page.number(12345.0), scale_page.dollars(1234.5)) == (
        "12,300",
        "*12,300*",
        "*1,234.50*",
    )
    sized = TEXT.split("## Known keys")[1].split("## Does the model fit")[0]
    of_a_billion = [line for line in sized.splitlines() if "| 1 billion |" in line]
    assert len(of_a_billion) > 15
    for line in of_a_billion:
        cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
        numbers = [cell for cell in cells if cell not in ("1", "10", "100", "-", "does not fit", "nearly none")]
        assert not [cell for cell in numbers if not re.fullmatch(r"\*[^*]+\*(?: \+ \*[^*]+\*)?", cell)], line


def test_the_sentences_in_short_say_what_the_model_says() -> None:
    """The limit of the filter, the filters of a billion keys, what a start without files reads, cents, and a call for each partition."""
    from benchmarks import scale_model, scale_page

    short = " ".join(TEXT.split("## In short")[1].split("\n## ")[0].split())
    (millions,) = re.findall(r"up to some (\d+) million keys", short)
    assert not any(scale_model.halved(int(millions) * 10**6)) and any(scale_model.halved((int(millions) + 10) * 10**6))
    asked = [f"{float(f'{scale_model.look_ups(10**9, most):.3g}'):,.0f} look-ups" for most in (scale_model.FILTER_MEMORY, 2**31)]
    assert asked[0] in short and f"needs {asked[1].split()[0]} (" in short
    assert "two gigabytes of filters" in short and 1.9e9 < scale_model.key_files(10**9).opened < 2.3e9
    read = scale_page.size(scale_model.delta_restart(10**9, 1, scale_model.COPIES).moved)
    assert f"Beside a billion keys that is {float(read.strip('*').split()[0]):.0f} GB" in short
    cases = [make(keys, 100) for make in (scale_model.postgres_events, scale_model.delta_events) for keys in scale_model.KEYS]
    assert "a few cents" in short and all(0.001 < case.usd < 0.05 for case in cases)
    assert "one call more for each partition" in short
    assert scale_model.of("postgres/calls_100p") - scale_model.of("postgres/calls_1p") == pytest.approx(99, abs=1)
