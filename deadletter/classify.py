"""Whose fault is an error: will it pass, is it this event's own, or everybody's?

No driver is imported: errors are known by the names of their classes, by SQLSTATE, by HTTP status and by errno. What is not known is
PERMANENT, and the budget watches over it; so only what can hardly be the fault of one event is SYSTEMIC. Called by the flow for every error
of a handler.
"""

from __future__ import annotations

import errno
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

from checkpoint.errors import CommitConflict, CommitUnknown, DedupError, RowsRefused, StoreUnavailable
from deadletter.chain import chain

log = logging.getLogger("dedup")


class ErrorClass(StrEnum):
    """What to do about an error."""

    TRANSIENT = "TRANSIENT"  # will pass: try again
    PERMANENT = "PERMANENT"  # this event's own fault: park it
    SYSTEMIC = "SYSTEMIC"  # everybody's fault: park nothing


TRANSIENT, PERMANENT, SYSTEMIC = ErrorClass.TRANSIENT, ErrorClass.PERMANENT, ErrorClass.SYSTEMIC

Rule = tuple[type[BaseException] | Callable[[BaseException], bool], ErrorClass]
"""Errors of this type, or for which this is true, are of that class."""


def classify(error: BaseException, rules: Sequence[Rule] = ()) -> ErrorClass:
    """The class of an error: by the first of the user's rules that fits, else by what is known of drivers, else PERMANENT.

    Where nothing is known of the error itself, its cause decides, or else the error that was being handled when it was raised.
    A rule that raises does not fit, and is logged.
    """
    for link in chain(error):
        found = _by_rules(link, rules) or _known(link)
        if found:
            return found
    return PERMANENT


def _by_rules(error: BaseException, rules: Sequence[Rule]) -> ErrorClass | None:
    return next((found for test, found in rules if _fits(error, test)), None)


def _fits(error: BaseException, test: type[BaseException] | Callable[[BaseException], bool]) -> bool:
    if isinstance(test, type):
        return isinstance(error, test)
    try:
        return bool(test(error))
    except Exception:
        log.warning("the rule %r for errors failed on a %s and is taken as not fitting", test, type(error).__name__, exc_info=True)
        return False


def _known(error: BaseException) -> ErrorClass | None:
    tests = (_ours, _by_state, _by_name, _by_status, _by_errno, _of_spark)
    return next((found for test in tests if (found := test(error))), None)


def _ours(error: BaseException) -> ErrorClass | None:
    if not isinstance(error, DedupError):
        return None
    if isinstance(error, RowsRefused):
        return PERMANENT
    return TRANSIENT if isinstance(error, StoreUnavailable | CommitConflict | CommitUnknown) else SYSTEMIC


_STATES: dict[str, ErrorClass] = {
    "08": TRANSIENT,  # connection
    "21": PERMANENT,  # cardinality
    "22": PERMANENT,  # data
    "23": PERMANENT,  # integrity constraint
    "25006": SYSTEMIC,  # read only: a standby
    "25P03": TRANSIENT,  # idle in transaction for too long: the session ended
    "25P04": TRANSIENT,  # transaction time-out
    "26": SYSTEMIC,  # prepared statement unknown: a pooler in between
    "28": SYSTEMIC,  # authorization
    "2D521": TRANSIENT,  # Delta: a concurrent commit
    "3D": SYSTEMIC,  # no such database
    "3F": SYSTEMIC,  # no such schema
    "40": TRANSIENT,  # serialization failure, deadlock
    "42": SYSTEMIC,  # table, column, privilege, syntax
    "42725": PERMANENT,  # ambiguous function, and the next four: may depend on the type of one event's value
    "42804": PERMANENT,
    "42846": PERMANENT,
    "42883": PERMANENT,
    "42P18": PERMANENT,
    "44": PERMANENT,  # WITH CHECK OPTION
    "53": SYSTEMIC,  # disk, memory, limits
    "53300": TRANSIENT,  # too many connections
    "55006": TRANSIENT,  # object in use
    "55P03": TRANSIENT,  # lock not available
    "57014": TRANSIENT,  # statement time-out
    "57P": TRANSIENT,  # shutdown, crash, starting up
    "57P04": SYSTEMIC,  # database dropped
    "58": SYSTEMIC,  # input and output
    "72": TRANSIENT,  # snapshot too old
    "F0": SYSTEMIC,  # configuration file
    "P0001": PERMANENT,  # RAISE in a trigger
    "XX": SYSTEMIC,  # internal error, corruption
}
"""SQLSTATE, or how it begins. Source: PostgreSQL 16 manual, appendix A; 2D521: error-conditions.json of Delta Lake."""

_SPARK_STATES = ("21", "22", "23", "2D521", "39", "42")
"""Of Spark's states, those that mean what they mean in PostgreSQL; and 39, raised in a UDF. Source: error-conditions.json of Spark 4."""


def _by_state(error: BaseException) -> ErrorClass | None:
    state = _ask(error, "sqlstate") or _ask(error, "pgcode")
    if state is None and _is_of(error, "pyspark"):
        state = _ask(error, "getSqlState")
        if not state or not state.startswith(_SPARK_STATES):
            return None
        if state.startswith("39"):
            return PERMANENT
    lengths = range(5, 1, -1) if state else ()
    return next((_STATES[state[:length]] for length in lengths if state and state[:length] in _STATES), None)


_NAMES: dict[str, ErrorClass] = {
    "MemoryError": SYSTEMIC,
    "socket.gaierror": SYSTEMIC,  # no such host; that the name service does not answer is told apart below
    "ssl.SSLCertVerificationError": SYSTEMIC,
    "ssl.SSLError": TRANSIENT,
    "ConnectionError": TRANSIENT,
    "TimeoutError": TRANSIENT,
    "BlockingIOError": TRANSIENT,
    "InterruptedError": TRANSIENT,
    "http.client.IncompleteRead": TRANSIENT,
    "requests.exceptions.ConnectionError": TRANSIENT,
    "requests.exceptions.Timeout": TRANSIENT,
    "requests.exceptions.ChunkedEncodingError": TRANSIENT,
    "httpx.TransportError": TRANSIENT,
    "aiohttp.client_exceptions.ClientConnectionError": TRANSIENT,
    "urllib3.exceptions.TimeoutError": TRANSIENT,
    "urllib3.exceptions.ProtocolError": TRANSIENT,
    "azure.core.exceptions.ClientAuthenticationError": SYSTEMIC,
    "azure.core.exceptions.ServiceRequestError": TRANSIENT,
    "azure.core.exceptions.ServiceResponseError": TRANSIENT,
    "azure.core.exceptions.IncompleteReadError": TRANSIENT,
    "azure.eventhub.exceptions.AuthenticationError": SYSTEMIC,
    "azure.eventhub.exceptions.ConnectError": TRANSIENT,
    "azure.eventhub.exceptions.ConnectionLostError": TRANSIENT,
    "azure.eventhub.exceptions.OperationTimeoutError": TRANSIENT,
    "azure.servicebus.exceptions.ServiceBusAuthenticationError": SYSTEMIC,
    "azure.servicebus.exceptions.ServiceBusAuthorizationError": SYSTEMIC,
    "azure.servicebus.exceptions.ServiceBusConnectionError": TRANSIENT,
    "azure.servicebus.exceptions.ServiceBusCommunicationError": TRANSIENT,
    "azure.servicebus.exceptions.ServiceBusServerBusyError": TRANSIENT,
    "azure.servicebus.exceptions.ServiceBusQuotaExceededError": SYSTEMIC,
    "azure.servicebus.exceptions.OperationTimeoutError": TRANSIENT,
    "azure.servicebus.exceptions.MessagingEntityNotFoundError": SYSTEMIC,
    "azure.servicebus.exceptions.MessagingEntityDisabledError": SYSTEMIC,
    "psycopg.OperationalError": TRANSIENT,  # without SQLSTATE: no connection, or it was lost
    "psycopg.InterfaceError": TRANSIENT,
    "psycopg2.OperationalError": TRANSIENT,
    "psycopg2.InterfaceError": TRANSIENT,
    "_internal.CommitFailedError": TRANSIENT,  # deltalake, whose classes name no other module
    "_internal.TableNotFoundError": SYSTEMIC,
    "py4j.protocol.Py4JNetworkError": SYSTEMIC,  # the JVM is gone, and stays so
    "pyspark.errors.exceptions.base.PythonException": PERMANENT,  # raised in a UDF
    "pyspark.errors.exceptions.base.ArithmeticException": PERMANENT,
    "pyspark.errors.exceptions.base.ArrayIndexOutOfBoundsException": PERMANENT,
    "pyspark.errors.exceptions.base.DateTimeException": PERMANENT,
    "pyspark.errors.exceptions.base.NumberFormatException": PERMANENT,
    "pyspark.errors.exceptions.base.AnalysisException": SYSTEMIC,
    "delta.exceptions.base.DeltaConcurrentModificationException": TRANSIENT,
}
"""Class, with its module unless it is built in. The first one in the order of inheritance decides, so a subclass may differ from its base.

Source: the packages themselves: psycopg 3.3, deltalake 1.6, azure-core 1.41, azure-eventhub 5.15, azure-servicebus 7.15, pyspark 4.2.
"""


def _by_name(error: BaseException) -> ErrorClass | None:
    name, found = next(((name, _NAMES[name]) for name in _names(error) if name in _NAMES), ("", None))
    if name == "socket.gaierror" and _ask_number(error, "errno") == socket.EAI_AGAIN:
        return TRANSIENT
    if name in ("psycopg.OperationalError", "psycopg2.OperationalError") and _LOGIN.search(_text(error)):
        return SYSTEMIC
    if name in ("ConnectionError", "TimeoutError") and _in_py4j(error):
        return SYSTEMIC
    return found


_LOGIN = re.compile(r"FATAL: .{0,200}(?:authentication failed|pg_hba\.conf|does not exist|not permitted|permission denied)")
"""Where no connection came to be there is no SQLSTATE, only libpq's text."""


def _in_py4j(error: BaseException) -> bool:
    """Whether this is the socket to the JVM: it was refused or cut inside py4j."""
    trace = error.__traceback__
    modules = []
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__", "")))
        trace = trace.tb_next
    return any(module.split(".")[0] == "py4j" for module in modules[-4:])


_STATUS: dict[int, ErrorClass] = {
    401: SYSTEMIC,
    407: SYSTEMIC,
    408: TRANSIENT,
    425: TRANSIENT,
    429: TRANSIENT,
    500: TRANSIENT,
    502: TRANSIENT,
    503: TRANSIENT,
    504: TRANSIENT,
}
"""Of any HTTP service. 403 and 404 may be about what one event names. Source: RFC 9110, section 15; RFC 6585."""

_AZURE_STATUS = _STATUS | {403: SYSTEMIC, 404: SYSTEMIC, 409: None, 412: None}
_AZURE_BUSY = ("ServerBusy", "OperationTimedOut", "InternalError")
_AZURE_THINGS = ("BlobNotFound", "PathNotFound", "ResourceNotFound", "EntityNotFound", "MessageNotFound")
"""Error codes of a 404 about one thing, which an event may have named, and not about the container, hub or account."""


def _by_status(error: BaseException) -> ErrorClass | None:
    response = _raw(error, "response")
    status = _ask_number(error, "status_code") or _ask_number(error, "status") or _ask_number(response, "status_code")
    if _is_of(error, "urllib"):
        status = _ask_number(error, "code")
    if not _is_of(error, "azure"):
        return _STATUS.get(status or 0)
    code = _ask(error, "error_code")
    if code in _AZURE_BUSY:
        return TRANSIENT
    return None if code in _AZURE_THINGS else _AZURE_STATUS.get(status or 0)


_ERRNOS: dict[int, ErrorClass] = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EIO), SYSTEMIC
) | dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EAGAIN), TRANSIENT)


def _by_errno(error: BaseException) -> ErrorClass | None:
    return _ERRNOS.get(_ask_number(error, "errno") or 0) if isinstance(error, OSError) else None


_TASK = re.compile(
    r"(?:Lost task|Job aborted).{0,2000}?(?:ExecutorLostFailure|FetchFailed|MetadataFetchFailed|Executor heartbeat timed out)", re.DOTALL
)
_DELTA = re.compile(r"io\.delta\.exceptions\.(?:Concurrent|MetadataChanged|ProtocolChanged)\w*Exception|\[DELTA_CONCURRENT_")
_GONE = re.compile(
    r"SparkContext was shut down|stopped SparkContext|Answer from Java side is empty|No space left on device|java\.lang\.OutOfMemoryError"
)
_DATA = re.compile(
    r"\[(?:CAST_|DIVIDE_BY_ZERO|ARITHMETIC_OVERFLOW|NUMERIC_|INVALID_ARRAY_INDEX|CANNOT_PARSE_|MALFORMED_|FAILED_EXECUTE_UDF)"
)


def _of_spark(error: BaseException) -> ErrorClass | None:
    """What Spark and Delta say in words only: an error of the JVM that has no class in Python."""
    if not (_is_of(error, "pyspark") or _is_of(error, "py4j") or _is_of(error, "delta")):
        return None
    text = _text(error)
    if _DELTA.search(text) or _TASK.search(text):
        return TRANSIENT
    if _DATA.search(text):
        return PERMANENT
    return SYSTEMIC if _GONE.search(text) else None


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
        log.debug("%s of a %s cannot be had", name, type(thing).__name__, exc_info=True)
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
        log.debug("the text of a %s cannot be had", type(error).__name__, exc_info=True)
        return ""
