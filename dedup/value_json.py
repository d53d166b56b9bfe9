"""A Python value of any shape as JSON text: for columns of type json and jsonb. Pure.

Text is JSON already and stays as it is. Inside a dict or a list: dates, times, decimals and UUIDs become text (ISO 8601, all digits).
"""

from __future__ import annotations

import datetime as dt
import json
import math
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from dedup.value_plain import Wrong, plainly


def json_text(value: Any) -> str:
    """The value as JSON text. Raises Wrong for what JSON cannot hold: NaN, infinities, bytes, sets, keys that are no text, NUL."""
    if isinstance(value, str):
        return str.__str__(value)
    try:
        return json.dumps(_shaped(value), ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise Wrong("it is nested too deeply, or holds itself") from error


def _shaped(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is int or kind is bool:
        return value
    if kind is str:
        return _without_nul(value)
    if kind is float:
        return _finite(value)
    if kind is dict:
        return _object(value)
    if kind is list or kind is tuple:
        return [_shaped(inner) for inner in value]
    return _shaped_other(value)


def _shaped_other(value: Any) -> Any:
    """What is of another class: by what it stands for."""
    plain = plainly(value)
    if plain is not value:
        return _shaped(plain)
    if isinstance(value, Mapping):
        return _shaped(dict(value))
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Decimal | uuid.UUID):
        return str(value)
    kinds: tuple[type[Any], ...] = (str, int, float, list, tuple)
    for known in kinds:
        if isinstance(value, known):
            return _shaped(known(value))
    raise Wrong(f"JSON has no {type(value).__name__}")


def _object(value: dict[Any, Any]) -> dict[str, Any]:
    found = {name if type(name) is str and "\0" not in name else _key(name): _shaped(inner) for name, inner in value.items()}
    if len(found) < len(value):
        raise Wrong("two keys are one text")
    return found


def _key(name: Any) -> str:
    plain = plainly(name)
    if not isinstance(plain, str):
        raise Wrong(f"a key of JSON is a text, not {type(name).__name__}")
    return _without_nul(str(plain))


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise Wrong("JSON in PostgreSQL cannot hold a NUL character")
    return text


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise Wrong(f"JSON has no {number}")
    return number
