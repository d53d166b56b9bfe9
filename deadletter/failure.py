"""What is kept of one failed attempt: type, message, stack, fingerprint, time, and the errors that led to it.

Promises to answer for any exception, however hostile: nothing here raises but KeyboardInterrupt, and every text is redacted, valid UTF-8,
free of NUL and cut. Called by the pipeline at each failed attempt.
"""

from __future__ import annotations

import datetime as dt
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from checkpoint.errors import RowsRefused
from deadletter.known import ErrorClass
from deadletter.letter import Kind, fingerprint
from deadletter.redact import redact

MESSAGE_BYTES = 10_000
STACK_BYTES = 50_000
TYPE_BYTES = 500
_MARGIN = 100_000
"""Characters beyond a limit that are redacted with the text, so that no cut separates a secret from the words that give it away."""

_ROOT = Path(__file__).parent.parent
_OURS = tuple(str(_ROOT / package) for package in ("checkpoint", "deadletter", "dedup"))
_STDLIB = str(Path(sysconfig.get_paths()["stdlib"]))
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/]|[\\/]pyspark(?:\.zip)?[\\/]|[\\/]py4j-[^\\/]*[\\/]")
_STANDARD = re.compile(r"[\\/]lib[\\/]python3(?:\.\d+)?[\\/]|^<frozen ", re.IGNORECASE)

T = TypeVar("T")
_trace = vars(BaseException)["__traceback__"].__get__  # a subclass may hide its own

_Frame = tuple[str, str]
"""File and function."""

_WORKER_FRAME = re.compile(r'^ {2}File "([^"\n]{1,1000})", line \d+, in (\S{1,200})', re.MULTILINE)
_WORKER_ERROR = re.compile(r"^([A-Za-z_][\w.]{0,200})(?::[ ]?|$)", re.MULTILINE)
_JAVA_ERROR = re.compile(r"^(?:: |Caused by: )([A-Za-z_][\w.$]{0,200})(?:: (.*))?$", re.MULTILINE)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_WORKER_START = "Traceback (most recent call last):\n"

_LINKS = 50
_cause, _context, _is_final = (
    vars(BaseException)[name].__get__ for name in ("__cause__", "__context__", "__suppress_context__")
)  # a subclass may hide its own


@dataclass(frozen=True)
class Failure:
    """One failed attempt at one event."""

    error_type: str
    """With its module, builtins without."""
    message: str
    """At most 10,000 bytes of UTF-8."""
    stack: str
    """With causes, oldest first; at most 50,000 bytes of UTF-8: what is too long has its middle cut out."""
    fingerprint: str
    """Equal for failures of the same type, place and wording."""
    at: dt.datetime
    """Aware, UTC."""
    kind: Kind = Kind.HANDLER_ERROR
    place: str = ""
    """File and function of the user's own code in which it was raised; empty where none is known."""


class Elsewhere(Exception):
    """An error that another process has met, by what is kept of it: exceptions lose their stacks on the way, and some cannot travel."""

    def __init__(self, failure: Failure, found: ErrorClass, outlasted: ErrorClass) -> None:
        super().__init__(failure, found, outlasted)
        self.failure, self.found, self.outlasted = failure, found, outlasted
        self.add_note(failure.stack)

    def __str__(self) -> str:
        return f"{self.failure.error_type}: {self.failure.message}"


def describe(error: BaseException, at: dt.datetime, kind: Kind = Kind.HANDLER_ERROR) -> Failure:
    """What is kept of an exception. Of one that Spark only passes on, type and message are those of its root: a Python worker's, or Java's.

    Args:
        error: anything that was raised; its own code is run to get its text, and may fail.
        at: when, aware, in UTC.
        kind: what the letter will say.
    """
    if type(error) is Elsewhere:  # isinstance would ask a hostile error for its __class__
        return replace(error.failure, kind=kind)
    text = text_of(error)
    raised = (_type_name(error), text, _frames(error))
    error_type, message, frames = (_of_worker(text) or _of_java(text, raised[2]) or raised) if _is_of_spark(error) else raised
    error_type, message = clean(error_type, TYPE_BYTES), clean(message, MESSAGE_BYTES)
    stack = _asked(lambda: "".join(traceback.format_exception(error)), f"{error_type}: {message}")
    place = clean(_own(frames), TYPE_BYTES)
    brief = _brief(error)
    first_line = next((line for line in message.splitlines() if line.strip()), "")[:500]
    return Failure(
        error_type=error_type,
        message=message,
        stack=clean(stack, STACK_BYTES, tail=0.7),
        fingerprint=fingerprint(error_type, "" if brief else _ADDRESS.sub("?", first_line), f"{place} {brief}" if brief else place),
        at=at,
        kind=kind,
        place=place,
    )


def _brief(error: BaseException) -> str:
    """What rows were refused for, without their values."""
    return clean(_asked(lambda: str(getattr(error, "brief", "")), ""), MESSAGE_BYTES) if issubclass(type(error), RowsRefused) else ""


def text_of(error: BaseException) -> str:
    """What it says, uncleaned."""
    return _asked(lambda: str(error), "(its text cannot be had: __str__ failed)")


def clean(text: str, limit: int, tail: float = 0.0) -> str:
    """The text redacted, NUL-free, encodable, and cut to `limit` bytes; where it is cut, that share of them shows its end."""
    text = str.__str__(text)
    keep = limit + _MARGIN
    parts = [text] if len(text) <= 2 * keep else [text[:keep], text[-keep:]]
    shown = [redact(part).replace("\0", "\\x00").encode("utf-8", "backslashreplace") for part in parts]
    whole, left_out = b"".join(shown), len(text) - sum(map(len, parts))
    if len(whole) <= limit and not left_out:
        return whole.decode()
    mark = b"\n... cut here ...\n" if tail else b" ... (cut)"
    end = int((limit - len(mark)) * tail)
    head = shown[0][: limit - len(mark) - end]
    return (head + mark + (shown[-1][-end:] if end else b"")).decode("utf-8", "ignore")


def _asked(question: Callable[[], T], otherwise: T) -> T:
    """The answer of foreign code, or `otherwise`."""
    try:
        return question()
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - whatever an exception does when it is asked what it is must not lose its event
        return otherwise


def _type_name(error: BaseException) -> str:
    cls = type(error)
    name = _asked(lambda: str(cls.__qualname__), "(a type without a name)")
    module = _asked(lambda: str(cls.__module__), "")
    return name if module in ("", "builtins") else f"{module}.{name}"


def _is_of_spark(error: BaseException) -> bool:
    return _asked(lambda: any(str(cls.__module__).split(".")[0] in ("pyspark", "py4j") for cls in type(error).__mro__), False)


def _frames(error: BaseException) -> list[_Frame]:
    """Files and functions of the error, outermost first; of its causes where it was never raised."""
    for link in chain(error):
        frames = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(_trace(link))]
        if frames:
            return frames
    return []


def _of_worker(text: str) -> tuple[str, str, list[_Frame]] | None:
    """Type, message and frames out of the last traceback in the text that PySpark gives to an error of its Python workers."""
    _, found, trace = text[: 2 * _MARGIN].rpartition(_WORKER_START)
    named = _WORKER_ERROR.search(trace) if found else None
    if named is None:
        return None
    return named[1], trace[named.end() :].split("\n\n", 1)[0].strip(), _WORKER_FRAME.findall(trace[: named.start()])


def _of_java(text: str, frames: list[_Frame]) -> tuple[str, str, list[_Frame]] | None:
    """Type and message of the root in the text that py4j gives to an error of the JVM; its own first line names only what was called."""
    causes = _JAVA_ERROR.findall(text[: 2 * _MARGIN])
    told = [cause for cause in causes if cause[1]] or causes  # "java.io.EOFException" alone says nothing
    return (*told[-1], frames) if told else None


def _own(frames: list[_Frame]) -> str:
    """The innermost frame of the user's own code, as file:function without folders; empty where there is none."""
    foreign = [frame for frame in frames if not frame[0].startswith(_OURS)]
    own = [frame for frame in foreign if not (_INSTALLED.search(frame[0]) or _STANDARD.search(frame[0]) or frame[0].startswith(_STDLIB))]
    if not own:
        return ""
    file, function = own[-1]
    return re.sub(r"\d{3,}", "?", re.split(r"[\\/]", file)[-1]) + f":{function}"


def chain(error: BaseException, *, handled: bool = True) -> Iterator[BaseException]:
    """The error, its cause, the cause's cause ...; where none is given, the error that was being handled, as in a traceback.

    Ends where the chain closes a circle, and after 50 links.

    Args:
        handled: False ends it where no cause is given.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _LINKS:
        yield link
        seen.add(id(link))
        cause = _cause(link)
        link = cause if cause is not None or not handled or _is_final(link) else _context(link)
