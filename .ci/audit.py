"""Part of `make lint`: no secret is committed, and no pinned package has a known hole.

Where the service that knows the holes cannot be reached, that is said, and nothing fails: no network is no hole.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

PATIENCE = 120
"""Seconds for all packages: each is asked for alone, and a network that swallows requests costs 10 s for each of them."""

MADE_UP = ["Base64HighEntropyString", "HexHighEntropyString", "KeywordDetector", "BasicAuthDetector"]
"""What the tests are full of, on purpose: there only the forms of real credentials are looked for."""


def secrets(root: Path, folders: list[str], *, without: list[str]) -> list[str]:
    """file:line of everything that looks like a secret. Lines that are none say `pragma: allowlist secret`."""
    plugins = [argument for name in without for argument in ("--disable-plugin", name)]
    command = [sys.executable, "-m", "detect_secrets", "scan", "--all-files", "--exclude-files", "__pycache__", *plugins, *folders]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["results"]
    return [f"{file}:{hit['line_number']} looks like a secret ({hit['type']})" for file, hits in found.items() for hit in hits]


def holes(answer: dict[str, Any]) -> tuple[list[str], int]:
    """Known holes, in words, and how many packages could not be asked about; of what pip-audit writes as JSON."""
    packages = answer["dependencies"]
    known = [f"{p['name']} {p['version']}: {v['id']}, fixed in {v['fix_versions']}" for p in packages for v in p.get("vulns", [])]
    return known, sum("skip_reason" in p for p in packages)


def ask_for_holes() -> tuple[list[str], str]:
    """(holes, what could not be told)."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "-r",
        "constraints.txt",
        "--no-deps",
        "--disable-pip",
        "--format",
        "json",
        "--timeout",
        "10",
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return [], f"The pinned packages were not audited: no answer within {PATIENCE} s."
    try:
        known, silent = holes(json.loads(done.stdout))
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return [], f"The pinned packages were not audited: {last[:200]}"
    return known, f"{silent} pinned packages were not audited: the service does not know them, or is not reached." if silent else ""


def main() -> int:
    """0 unless a secret or a known hole is found."""
    shipped = [
        str(f.relative_to(ROOT)) for f in sorted(ROOT.iterdir()) if f.suffix in (".md", ".cfg", ".toml", ".txt") or f.name == "Makefile"
    ]
    found = secrets(ROOT, ["checkpoint", "deadletter", "dedup", "sql", "docs", "examples", "benchmarks", ".ci", *shipped], without=[])
    found += secrets(ROOT, ["tests"], without=MADE_UP)
    known, untold = ask_for_holes()
    print(*found, *known, *([untold] if untold else []), sep="\n")
    return 1 if found or known else 0


if __name__ == "__main__":
    sys.exit(main())
