"""Whose fault is an error: will it pass, is it this event's own, or everybody's?

No driver is imported: errors are known by the names of their classes, by SQLSTATE, by HTTP status and by errno. What is not known is
PERMANENT, and the budget watches over it; so only what can hardly be the fault of one event is SYSTEMIC. Called by the pipeline for every
error of a handler.
"""

from __future__ import annotations

import builtins
import errno
import logging
import socket
from collections.abc import Callable, Iterator, Sequence

from checkpoint.errors import CommitConflict, CommitUnknown, DedupError, RowsRefused, StoreUnavailable
from deadletter import known
from deadletter.failure import Elsewhere, chain
from deadletter.known import PERMANENT as PERMANENT
from deadletter.known import SYSTEMIC as SYSTEMIC
from deadletter.known import TRANSIENT as TRANSIENT
from deadletter.known import ErrorClass as ErrorClass

log = logging.getLogger("dedup")

_SPARK = ("pyspark", "py4j", "delta")
"""Packages whose errors are Spark's."""

Rule = tuple[type[BaseException] | Callable[[BaseException], bool], ErrorClass]
"""Errors of this type, or for which this is true, are of that class."""


def classify(error: BaseException, rules: Sequence[Rule] = ()) -> ErrorClass:
    """The class of an error: by the first of the user's rules that fits, else by what is known of drivers, else PERMANENT.

    Where nothing is known of the error itself, its cause decides, or else the error that was being handled when it was raised.
    A rule that raises does not fit, and is logged.
    """
    for link in chain(error):
        found = link.found if type(link) is Elsewhere else _by_rules(link, rules)
        if found or (not _was_caught(link, error) and (found := _known(link))):
            return found
    return PERMANENT


def _was_caught(link: BaseException, error: BaseException) -> bool:
    """Whether it is the ImportError of a package that the handler can do without: it caught it, and then something else failed."""
    return issubclass(type(link), ImportError) and not any(link is one for one in chain(error, handled=False))


def outlasted(error: BaseException) -> ErrorClass:
    """What a TRANSIENT error is that retries have not outlasted: PERMANENT where it may be this event's own, else SYSTEMIC.

    A time-out, a lock, an internal error of another service or the death of a Python worker may come of what one event asks for. A
    connection that cannot be made (also where that is a time-out), or a service that refuses everybody, does not.
    """
    if type(error) is Elsewhere:
        return error.outlasted
    for link in chain(error):
        if _never_connected(link):
            return SYSTEMIC
        if _may_be_its_own(link):
            return PERMANENT
    return SYSTEMIC


def killed_a_worker(error: BaseException) -> bool:
    """Whether a Python worker of Spark's died. Whose fault that is only another run can tell: anything may have killed it."""
    return any(known.WORKER.search(_words_of_spark(link)) is not None for link in chain(error))


def is_cancelled(error: BaseException) -> bool:
    """Whether somebody has cancelled the job, as by stopping the query. Not Spark itself, because it ends: of memory, it may be."""
    texts = [_words_of_spark(link) for link in chain(error)]
    return any(known.CANCELLED.search(text) and not known.STOPPED.search(text) for text in texts)


def _never_connected(error: BaseException) -> bool:
    timed_out = isinstance(error, OSError) and _ask_number(error, "errno") == errno.ETIMEDOUT
    return timed_out or any(name in known.NEVER_CONNECTED for name in (*_names(error), *_names_in_worker(error)))


def _may_be_its_own(error: BaseException) -> bool:
    response = _raw(error, "response")
    statuses = (_ask_number(error, "status_code"), _ask_number(error, "status"), _ask_number(response, "status_code"))
    state = _ask(error, "sqlstate") or _ask(error, "pgcode")
    timed_out = any("timeout" in name.rpartition(".")[2].lower() for name in (*_names(error), *_names_in_worker(error)))
    text = _words_of_spark(error)
    killed, vanished = known.WORKER.search(text) is not None, known.VANISHED.search(text) is not None
    return killed or vanished or timed_out or state in known.OWN_STATES or any(status in known.OWN_STATUS for status in statuses)


def _by_rules(error: BaseException, rules: Sequence[Rule]) -> ErrorClass | None:
    return next((found for test, found in rules if _fits(error, test)), None)


def _fits(error: BaseException, test: type[BaseException] | Callable[[BaseException], bool]) -> bool:
    try:
        return isinstance(error, test) if isinstance(test, type) else bool(test(error))
    except Exception:
        log.warning("the rule %r of errors= raised an error and is ignored for this exception", test, exc_info=True)
        return False


def _known(error: BaseException) -> ErrorClass | None:
    tests = (_ours, _by_state, _lacks_a_module, _raised_in_worker, _of_an_ending_process, _by_name, _by_status, _by_errno, _of_spark)
    try:
        return next((found for test in tests if (found := test(error))), None)
    except Exception:
        log.warning("cannot inspect an exception; its class is unknown", exc_info=True)
        return None


def _ours(error: BaseException) -> ErrorClass | None:
    if not isinstance(error, DedupError):
        return None
    if isinstance(error, RowsRefused):
        return PERMANENT
    return TRANSIENT if isinstance(error, StoreUnavailable | CommitConflict | CommitUnknown) else SYSTEMIC


def _by_state(error: BaseException) -> ErrorClass | None:
    state = _ask(error, "sqlstate") or _ask(error, "pgcode")
    if state is None and _is_of(error, "pyspark"):
        state = _ask(error, "getSqlState")
        if not state or not state.startswith(known.SPARK_STATES):
            return None
    lengths = range(5, 1, -1) if state else ()
    return next((known.STATES[state[:length]] for length in lengths if state and state[:length] in known.STATES), None)


def _lacks_a_module(error: BaseException) -> ErrorClass | None:
    """Whether a Python worker of Spark's has raised ImportError, as in a UDF."""
    return SYSTEMIC if "ImportError" in _names_in_worker(error) else None


def _raised_in_worker(error: BaseException) -> ErrorClass | None:
    """TRANSIENT for what is so in a handler, too, where a UDF has raised it: as its network is away."""
    return TRANSIENT if any(known.NAMES.get(name) == TRANSIENT for name in _names_in_worker(error)) else None


def _names_in_worker(error: BaseException) -> Iterator[str]:
    """The class of what a Python worker of Spark's has raised, as `_names`; none where the UDF caught it and something else failed."""
    text = _words_of_spark(error)
    first = known.RAISED.match(text, max(text.find("Traceback (most"), 0))
    if first is None or known.CAUGHT in text[first.end() :]:
        return
    kind = getattr(builtins, first[1], None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        yield from (cls.__name__ for cls in kind.__mro__)
    else:
        yield first[1]


def _of_an_ending_process(error: BaseException) -> ErrorClass | None:
    return SYSTEMIC if isinstance(error, RuntimeError) and known.ENDING.search(_text(error)) else None


def _by_name(error: BaseException) -> ErrorClass | None:
    name, found = next(((name, known.NAMES[name]) for name in _names(error) if name in known.NAMES), ("", None))
    if name == "socket.gaierror" and _ask_number(error, "errno") == socket.EAI_AGAIN:
        return TRANSIENT
    if name in ("psycopg.OperationalError", "psycopg2.OperationalError") and known.LOGIN.search(_text(error)):
        return SYSTEMIC
    if name in ("ConnectionError", "TimeoutError") and _in_py4j(error):
        return SYSTEMIC
    return found


def _in_py4j(error: BaseException) -> bool:
    """Whether this is the socket to the JVM: it was refused or cut inside py4j."""
    trace = error.__traceback__
    modules = []
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__", "")))
        trace = trace.tb_next
    return any(module.split(".")[0] == "py4j" for module in modules[-4:])


def _by_status(error: BaseException) -> ErrorClass | None:
    response = _raw(error, "response")
    status = _ask_number(error, "status_code") or _ask_number(error, "status") or _ask_number(response, "status_code")
    if not _is_of(error, "azure"):
        return known.STATUS.get(status or 0)
    code = _ask(error, "error_code")
    if code in known.AZURE_BUSY:
        return TRANSIENT
    return None if code in known.AZURE_THINGS else known.AZURE_STATUS.get(status or 0)


def _by_errno(error: BaseException) -> ErrorClass | None:
    return known.ERRNOS.get(_ask_number(error, "errno") or 0) if isinstance(error, OSError) else None


def _of_spark(error: BaseException) -> ErrorClass | None:
    """What Spark and Delta say in words only: an error of the JVM that has no class in Python."""
    text = _words_of_spark(error)
    if known.CANCELLED.search(text):
        return SYSTEMIC
    if any(words.search(text) for words in (known.DELTA, known.TASK, known.WORKER, known.AWAY, known.VANISHED)):
        return TRANSIENT
    if known.DATA.search(text):
        return PERMANENT
    everybodys = (known.GONE, known.UNANSWERED, known.UNANSWERED_CONNECT, known.LACKING)
    return SYSTEMIC if any(words.search(text) for words in everybodys) else None


def is_of_spark(error: BaseException) -> bool:
    """Whether Spark, py4j or Delta has raised it by itself, and not for what a user's function has raised in a Python worker."""
    return type(error).__name__ != "PythonException" and any(_is_of(error, package) for package in _SPARK)


def _words_of_spark(error: BaseException) -> str:
    """The text of an error of Spark or Delta; empty for any other."""
    return _text(error) if any(_is_of(error, package) for package in _SPARK) else ""


def _names(error: BaseException) -> Iterator[str]:
    for cls in type(error).__mro__:
        yield cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _is_of(error: BaseException, package: str) -> bool:
    return any(str(cls.__module__).split(".")[0] == package for cls in type(error).__mro__)


def _raw(thing: object, name: str) -> object:
    """An attribute, or what the method of that name answers; None where it fails: some ask a server that is gone."""
    try:
        value = getattr(thing, name, None)
        return value() if callable(value) and name.startswith("get") else value
    except Exception:
        log.debug("cannot read %s of an error", name, exc_info=True)
        return None


def _ask(thing: object, name: str) -> str | None:
    value = _raw(thing, name)
    return str(value) if isinstance(value, str) else None


def _ask_number(thing: object, name: str) -> int | None:
    value = _raw(thing, name)
    return int(value) if isinstance(value, int) else None


def _text(error: BaseException) -> str:
    try:
        return str(error)[:100_000]
    except Exception:
        log.debug("cannot read the text of an error", exc_info=True)
        return ""
