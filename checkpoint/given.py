"""What settings may be, said once for each kind: the value's type, range and unit, and an example. Pure.

Whatever a user gives is checked where it is given, before anything connects: `check(SETTINGS, given)` raises a ConfigError that names the
setting, what it was given and what it takes. `SETTINGS` is a table beside what it belongs to: setting -> `Setting`. It stands in the lowest
package because settings of all packages are checked by it.
"""

from __future__ import annotations

import datetime as dt
import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np

from checkpoint.errors import ConfigError

NO_NUL = "text without NUL"


@dataclass(frozen=True)
class Setting:
    """What one setting takes."""

    expected: str  # "seconds, from 0 on"
    example: str  # as one writes it
    fits: Callable[[Any], bool]
    secret: bool = False  # its value is not shown
    real: bool = False  # a number that may have a fraction, or a duration: kept as a float

    @property
    def or_none(self) -> Setting:
        """The same, and None as well."""
        fits = self.fits
        return replace(self, expected=f"{self.expected}, or None", fits=lambda value: value is None or fits(value))

    @property
    def hidden(self) -> Setting:
        """The same, of a value that may hold a password."""
        return replace(self, secret=True)


Settings = Mapping[str, Setting]


def check(settings: Settings, given: Mapping[str, Any], of: str = "") -> None:
    """Check every setting of the table.

    Args:
        settings: setting -> what it takes.
        given: setting -> its value; others are not looked at.
        of: what they are settings of, where their names do not say it.

    Raises:
        ConfigError: one of them is none of those values; it names the setting, the value and what is expected.
    """
    for name, setting in settings.items():
        if not setting.fits(given[name]):
            refuse(f"{of}.{name}" if of else name, given[name], setting)


def check_fields(settings: Settings, made: object, of: str = "") -> None:
    """Check the settings that an object keeps, and keep its numbers with a fraction and its durations as floats.

    Raises:
        ConfigError: as `check`.
    """
    check(settings, vars(made), of)
    for name, setting in settings.items():
        if setting.real and vars(made)[name] is not None:
            object.__setattr__(made, name, to_seconds(vars(made)[name]))


def refuse(name: str, value: object, setting: Setting) -> None:
    """Raise ConfigError for this value of this setting."""
    shown = f"a {type(value).__name__} (not shown: it may hold a password)" if setting.secret else _shown(value)
    of, _, own = name.rpartition(".")
    example = f"{own}={setting.example}"
    raise ConfigError(f"{name} is {shown}; it takes {setting.expected}. For example: {f'{of}({example})' if of else example}.")


def _shown(value: object) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return f"{short.repr(value)} ({type(value).__name__})"


def whole(what: str, example: str, *, least: int = 0, most: int | None = None) -> Setting:
    """A whole number of something.

    Args:
        what: its unit: "bytes", "events".
        least, most: both ends included.
    """
    until = "on" if most is None else f"to {most:,}"

    def fits(value: Any) -> bool:
        return is_number(value, numbers.Integral) and value >= least and (most is None or value <= most)

    return Setting(f"{what}, a whole number from {least:,} {until}", example, fits)


def number(
    what: str, example: str, *, above: float | None = None, least: float = 0.0, most: float | None = None, endless: bool = False
) -> Setting:
    """A number of something, which may have a fraction: of any class that is a number, Decimal and those of numpy included.

    Args:
        what: its unit: "seconds".
        above: the value is greater than this. Else it is at least `least`.
        most: the value is at most this.
        endless: infinity is allowed.
    """
    bound = f"above {above:g}" if above is not None else f"from {least:g} on"
    if most is not None:
        bound += f", at most {most:,.0f}"

    def fits(value: Any) -> bool:
        if not is_number(value, numbers.Real) and not isinstance(value, Decimal):
            return False
        try:
            found = float(value)
        except (OverflowError, ValueError):  # ValueError: of a signalling NaN
            return False
        if math.isinf(found):
            return endless and found > 0
        return (found > above if above is not None else found >= least) and (most is None or found <= most)

    return Setting(f"{what}, a number {bound}", example, fits, real=True)


Duration: TypeAlias = float | dt.timedelta
"""How long something takes, as users give it: seconds, as a number of any class, or a timedelta."""

LONGEST = 10 * 366 * 86_400
"""Seconds: what waits longer waits for ever, and timers of the operating system end somewhere behind it."""

OLDEST = 100 * LONGEST
"""Seconds: the greatest age; dates begin not far behind it."""


def duration(example: str, *, above: float | None = None, endless: bool = False, most: float = LONGEST) -> Setting:
    """A duration: a timedelta, or a number of seconds.

    Args:
        above: it is longer than this. Else it is not negative.
        endless: infinity is allowed.
        most: the longest one: LONGEST for what is waited for, OLDEST for ages.
    """
    bare = number("seconds", example, above=above, most=most, endless=endless)
    fits = bare.fits
    return replace(
        bare,
        expected=f"a timedelta, or {bare.expected}",
        fits=lambda value: fits(value.total_seconds() if isinstance(value, dt.timedelta) else value),
    )


def durations(example: str) -> Setting:
    """A list of durations, none of which is nothing."""
    one = duration("1.0", above=0.0)

    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(one.fits(each) for each in value)

    return Setting(f"a list of durations, each {one.expected}", example, fits)


def to_seconds(value: Duration) -> float:
    """A duration in seconds."""
    return value.total_seconds() if isinstance(value, dt.timedelta) else float(value)


def to_timedelta(value: Duration) -> dt.timedelta:
    """A duration as a timedelta."""
    return value if isinstance(value, dt.timedelta) else dt.timedelta(seconds=float(value))


def is_number(value: object, kind: type) -> bool:
    """Whether it is a number of this kind. True and False are none, nor are numpy's durations, which have a unit of their own."""
    return isinstance(value, kind) and not isinstance(value, bool | np.timedelta64)


def flag(example: str) -> Setting:
    """True or False."""
    return Setting("True or False", example, lambda value: isinstance(value, bool))


def word(*words: str) -> Setting:
    """One of these words."""
    return Setting(" or ".join(map(repr, words)), repr(words[0]), lambda value: isinstance(value, str) and value in words)


def text(what: str, example: str, *, most: int | None = None) -> Setting:
    """A text that says something: not empty, not blank, without NUL."""

    def fits(value: Any) -> bool:
        return isinstance(value, str) and bool(value.strip()) and "\0" not in value and (most is None or len(value) <= most)

    limit = f"1 to {most} characters, " if most else ""
    return Setting(f"{what}: {limit}text that is not blank, without NUL", example, fits)


def path(what: str, example: str) -> Setting:
    """A path or URL, as text or as an object of `pathlib`."""
    plain = text(what, example)
    return replace(plain, fits=lambda value: plain.fits(os.fspath(value)) if isinstance(value, os.PathLike) else plain.fits(value))


def names(what: str, example: str) -> Setting:
    """One name, or several in a list or tuple; none of them blank."""
    one = text(what, example).fits

    def fits(value: Any) -> bool:
        return one(value) or (isinstance(value, Sequence) and not isinstance(value, str | bytes) and bool(value) and all(map(one, value)))

    return Setting(f"{what}: one, or several in a list", example, fits)


def several(what: str, example: str) -> Setting:
    """Names in a list or tuple, which may be empty."""
    one = text(what, example).fits
    return Setting(
        f"{what}, in a list or tuple",
        example,
        lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(one, value)),
    )


def mapping(what: str, example: str, *, values: Callable[[Any], bool] = lambda value: True) -> Setting:
    """A dict whose keys are text."""

    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(isinstance(name, str) and values(held) for name, held in value.items())

    return Setting(f"{what}, a dict", example, fits)


def function(what: str, example: str, arguments: int | None = None) -> Setting:
    """Something that can be called with so many arguments."""
    return Setting(f"a function {what}", example, lambda value: takes(value, arguments))


def takes(value: Any, arguments: int | None) -> bool:
    """Whether it can be called with so many arguments; True where it does not tell, as what is built in."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*[None] * (arguments or 0)) if arguments is not None else None
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def instance(kinds: type | tuple[type, ...], expected: str, example: str) -> Setting:
    """An object of one of these classes."""
    return Setting(expected, example, lambda value: isinstance(value, kinds))


def having(expected: str, example: str, *methods: str) -> Setting:
    """An object with these methods."""
    return Setting(expected, example, lambda value: not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in methods))
