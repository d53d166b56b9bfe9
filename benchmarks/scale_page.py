"""The tables of docs/explanation/scale.md, from the model. What was measured as it stands is upright, what is computed is in italics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from benchmarks import scale_model as model
from benchmarks.scale_keys import KeyFiles
from benchmarks.scale_model import KEYS, PARTITIONS, Measured

BLOCK = re.compile(r"(<!-- scale: (\w+) -->\n)(?:(?!<!-- ).*\n)*(<!-- end -->)")

_UNITS = ("bytes", "kB", "MB", "GB", "TB")

Row = list[str]


def filled(text: str) -> str:
    """The page with its blocks as they are computed now. Raises KeyError for a block that nobody computes."""
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


def number(value: float) -> str:
    """Three digits that count, and no more than a whole number."""
    if value and abs(value) < 100:
        return _marked(value, f"{value:.3g}")
    return _marked(value, f"{float(f'{value:.3g}'):,.0f}")


def size(value: float) -> str:
    """Bytes, in units of a thousand."""
    if not value:
        return "-"
    power = max(0, min(len(_UNITS) - 1, (len(f"{int(value)}") - 1) // 3))
    return _marked(value, f"{value / 1000**power:.3g} {_UNITS[power]}" if value < 10**15 else f"{value:.3g} bytes")


def dollars(value: float) -> str:
    """In USD."""
    if not value:
        return "-"
    return _marked(value, "below 0.001" if value < 0.001 else f"{value:.2g}" if value < 1 else f"{value:,.2f}")


def count(keys: int) -> str:
    """1 million, 1 billion."""
    return f"{keys // 10**9} billion" if keys >= 10**9 else f"{keys // 10**6} million"


def _marked(value: float, text: str) -> str:
    return text if isinstance(value, Measured) else f"*{text}*"


def _table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cases(cases: Iterable[model.Case], moved: str, *, kept: bool) -> str:
    head = ["store", "keys", "partitions", "memory", "files", "requests", moved, *(["bytes that stay"] if kept else []), "USD"]
    rows = []
    for c in cases:
        requests = " + ".join(map(number, c.requests))
        tail = [size(c.moved), *([size(c.kept)] if kept else []), dollars(c.usd)]
        rows.append([c.store, count(c.keys), str(c.partitions), size(c.memory), number(c.files), requests, *tail])
    return _table(head, rows)


def events() -> str:
    """A million events."""
    makers = (model.postgres_events, model.delta_events)
    return _cases((make(keys, p) for make in makers for keys in KEYS for p in PARTITIONS), "bytes written", kept=True)


def restart() -> str:
    """A start."""
    return _cases(_starts(), "bytes read", kept=False)


def _starts() -> Iterator[model.Case]:
    for keys in KEYS:
        yield from (model.postgres_restart(keys, p) for p in PARTITIONS)
    for start in (model.FILES, model.COPIES, model.NEITHER):
        for keys in KEYS:
            yield from (model.delta_restart(keys, p, start) for p in PARTITIONS)


def rest() -> str:
    """Keys at rest."""
    head = ["store", "keys", "files", "bytes", "memory of the server", "USD a month"]
    found = [model.postgres_at_rest(keys) for keys in KEYS]
    found += [one for n in range(3) for keys in KEYS for one in [model.delta_at_rest(keys)[n]]]
    return _table(head, ([r.store, count(r.keys), number(r.files), size(r.bytes), size(r.server), dollars(r.usd)] for r in found))


def memory() -> str:
    """What a process needs in order to rule out a key without a look at the store."""
    of_postgres = ["PostgreSQL: filters", "tables", "look-ups in indexes for 50,000 new keys"]
    of_delta = ["Delta: filters of files", "page reads for 50,000 new keys"]
    return _table(["keys", *of_postgres, *of_delta], ([count(keys), *_on_postgres(keys), *_on_delta(keys)] for keys in KEYS))


def _on_postgres(keys: int) -> Row:
    asked = model.look_ups(keys)
    return [size(float(model.known_filter(keys))), number(float(model.tables(keys))), number(asked) if asked else "nearly none"]


def _on_delta(keys: int) -> Row:
    return [size(float(model.key_files(keys).memory)), number(model.page_reads(keys))]


def files() -> str:
    """Files of keys, simulated."""
    head = ["keys", "files", "of them with 16 million keys", "largest", "opened by a start", "keys in no file", "keys written for each key"]
    return _table(head, ([count(keys), *_of_files(keys, model.key_files(keys))] for keys in KEYS))


def _of_files(keys: int, found: KeyFiles) -> Row:
    large = sum(rows >= 2**23 for rows in found.sizes)
    shown = [number(float(len(found.sizes))), number(float(large)), f"*{max(found.sizes, default=0):,}*", size(float(found.opened))]
    return [*shown, number(float(found.rest)), number(found.written / keys)]


def checks() -> str:
    """What the model says where something was measured."""
    base = model.of("delta/process_mb") * model.MIB
    files = base + model.key_files(100_000_000).opened
    there = model.of("postgres/large_index_keys")
    log = model.logged(model.BATCH, there / model.of("postgres/keys_of_index_page"))
    ledger = base + model.key_files(24_000_000).opened + 24e6 * model.kept_by_library()
    rows = [
        ["Delta: memory of a start with files of keys, 100 million keys", size(files), _mib("delta/restart_100m_mb")],
        ["Delta: memory of a start that reads 24 million keys from the ledger", size(ledger), _mib("delta/ledger_start_mb")],
        [
            f"PostgreSQL: log of a batch beside {number(there)} keys in one table",
            size(log),
            size(model.of("postgres/large_index_wal_bytes")),
        ],
    ]
    return _table(["what", "computed", "measured"], rows)


def _mib(name: str) -> str:
    return size(Measured(model.MIB * model.of(name)))


def ledger() -> str:
    """What a start without files of keys took."""
    most, used, all_of_it = (_mib(f"delta/{name}") for name in ("ledger_start_mb", "ledger_start_used_mb", "restart_100m_mb, other"))
    seconds = (model.of("delta/restart_100m_s"), model.of("delta/restart_100m_s, other"))
    return (
        f"Measured with 24 million keys: {most} at most, of which {used} were in use. "
        f"With 100 million keys a start took {seconds[0]:g} s with files, and {seconds[1]:.0f} s and {all_of_it} without."
    )


def constants() -> str:
    """All of them."""
    rows = [[f"`{c.constant}`", number(Measured(c.value)), c.unit, f"`{c.benchmark}`", c.date] for c in model.known().values()]
    return _table(["constant", "value", "unit", "benchmark", "day"], rows)


BLOCKS: dict[str, Callable[[], str]] = {one.__name__: one for one in (events, restart, rest, memory, files, checks, ledger, constants)}
