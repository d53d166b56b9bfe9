"""The journal as a table for people and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from crash.run import Entry

COLUMNS = ("store", "fault", "iterations", "too late", "killed", "failed", "finished", "lost", "doubled", "contradictions", "skipped")
"""`too late`: iterations whose process had finished before the fault came. `killed`, `failed`, `finished`: processes that ended by a
signal, with an error, at the end of the log, before the restart."""


def summary(entries: list[Entry]) -> list[dict[str, Any]]:
    """One row per store and kind of fault, with the first and the last seed of the store in the last one."""
    kinds = sorted({(e["store"], e["fault"]) for e in entries})
    return [_row(kind, [e for e in entries if (e["store"], e["fault"]) == kind]) for kind in kinds]


def _row(kind: tuple[str, str], mine: list[Entry]) -> dict[str, Any]:
    ran = [e for e in mine if "skipped" not in e]
    ended = Counter("killed" if how.startswith("signal") else how if how == "finished" else "failed" for e in ran for how in e["ended"])
    wrong = {name: sum(len(e[name]) for e in ran) for name in ("lost", "doubled", "contradictions")}
    counts = {name: ended[name] for name in ("killed", "failed", "finished")}
    late = sum(e["missed"] for e in ran)
    return {
        "store": kind[0],
        "fault": kind[1],
        "iterations": len(ran),
        "too late": late,
        **counts,
        **wrong,
        "skipped": len(mine) - len(ran),
    }


def totals(entries: list[Entry]) -> dict[str, Any]:
    """Of each store: iterations, seeds, what was wrong, and how processes that failed had failed."""
    found = {}
    for store in sorted({e["store"] for e in entries}):
        mine = [e for e in entries if e["store"] == store]
        row = _row((store, ""), mine)
        errors = Counter(how for e in mine for how in e.get("ended", ()) if how != "finished" and not how.startswith("signal"))
        seeds = sorted(e["seed"] for e in mine)
        found[store] = {
            **{name: row[name] for name in ("iterations", "too late", "skipped", "lost", "doubled", "contradictions")},
            "seeds": f"{min(seeds)}-{max(seeds)}",
            "wrong_seeds": [e["seed"] for e in mine if e.get("lost") or e.get("doubled") or e.get("contradictions")],
            "errors": dict(sorted(errors.items())),
            "hours": round(sum(e.get("seconds", 0) for e in mine) / 3600, 2),
        }
    return found


def markdown(entries: list[Entry]) -> str:
    """The table of `summary`."""
    rows = [[str(row[c]) for c in COLUMNS] for row in summary(entries)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [list(COLUMNS), ["---"] * len(COLUMNS), *rows])


def page(entries: list[Entry]) -> str:
    """Everything as a page."""
    lines = [
        "# What the crash loops found",
        "",
        "Written by `make crash`; [crash.md](crash.md) says what is done and what the words mean.",
        "",
    ]
    for store, told in totals(entries).items():
        wrong = f"{told['lost']} lost, {told['doubled']} doubled, {told['contradictions']} contradictions"
        ran = f"{told['iterations']} iterations, seeds {told['seeds']}, {told['hours']} hours"
        late = f"{told['too late']} faults came too late, {told['skipped']} were skipped"
        lines += [f"* **{store}**: {ran}: **{wrong}**; {late}. Processes that ended with an error: {_counts(told['errors'])}."]
    return "\n".join([*lines, "", markdown(entries), ""])


def _counts(errors: dict[str, int]) -> str:
    return (
        ", ".join(
            f"{name.rsplit('.', 1)[-1].strip() if name.replace('.', '').isidentifier() else 'another'} {count}"
            for name, count in errors.items()
        )
        or "none"
    )
