"""Settings of a consumer in one flat dict, as children get them as JSON and tests change one at a time, put into their groups."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dedup import FailurePolicy, Limits, Takeover

_TAKEOVER = {"takeover_after": "after", "takeover": "now"}
_GROUPS: dict[str, tuple[type, dict[str, str]]] = {
    "failure": (FailurePolicy, {one.name: one.name for one in fields(FailurePolicy)}),
    "takeover": (Takeover, _TAKEOVER),
    "limits": (Limits, {one.name: one.name for one in fields(Limits)}),
}


def grouped(**settings: Any) -> dict[str, Any]:
    """Keywords of `Consumer`; `takeover_after` and `takeover` are `after` and `now` of Takeover."""
    taken = {flat for _, names in _GROUPS.values() for flat in names}
    made = {name: value for name, value in settings.items() if name not in taken}
    for group, (kind, names) in _GROUPS.items():
        given = {names[flat]: value for flat, value in settings.items() if flat in names}
        if given:
            made[group] = kind(**given)
    return made
