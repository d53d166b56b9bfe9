"""Error classes: what will pass, what is an event's own fault, what is everybody's."""

from __future__ import annotations

import errno
import http.client
import logging
import socket
import ssl
import urllib.error
from email.message import Message

import psycopg
import pyspark.errors as spark
import pytest
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from psycopg import errors as pg
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from checkpoint import errors as ours
from deadletter import ErrorClass
from deadletter.classify import classify, is_cancelled, killed_a_worker, outlasted

TRANSIENT, PERMANENT, SYSTEMIC = ErrorClass.TRANSIENT, ErrorClass.PERMANENT, ErrorClass.SYSTEMIC


NO_SCHEDULER = 'because the return value of "org.apache.spark.SparkContext.dagScheduler()" is null'


def show(value: object) -> str:
    """A test id: the type of an error with its text."""
    return f"{type(value).__name__} {value}"[:60] if isinstance(value, BaseException) else str(value)


def foreign(name: str, *bases: type, **attributes: object) -> BaseException:
    """An error of a package that is not installed here, by the full name of its class."""
    module, _, cls = name.rpartition(".")
    made = type(cls, bases or (Exception,), {"__module__": module, "__qualname__": cls})("text")
    for key, value in attributes.items():
        setattr(made, key, value)
    assert isinstance(made, BaseException)
    return made


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (pg.SerializationFailure(), TRANSIENT),
        (pg.DeadlockDetected(), TRANSIENT),
        (pg.LockNotAvailable(), TRANSIENT),
        (pg.QueryCanceled(), TRANSIENT),
        (pg.AdminShutdown(), TRANSIENT),
        (pg.CrashShutdown(), TRANSIENT),
        (pg.CannotConnectNow(), TRANSIENT),
        (pg.ConnectionFailure(), TRANSIENT),
        (pg.TooManyConnections(), TRANSIENT),
        (pg.IdleInTransactionSessionTimeout(), TRANSIENT),
        (pg.UniqueViolation(), PERMANENT),
        (pg.NotNullViolation(), PERMANENT),
        (pg.CheckViolation(), PERMANENT),
        (pg.ForeignKeyViolation(), PERMANENT),
        (pg.ExclusionViolation(), PERMANENT),
        (pg.InvalidTextRepresentation(), PERMANENT),
        (pg.NumericValueOutOfRange(), PERMANENT),
        (pg.StringDataRightTruncation(), PERMANENT),
        (pg.DivisionByZero(), PERMANENT),
        (pg.RaiseException(), PERMANENT),
        (pg.DatatypeMismatch(), PERMANENT),
        (pg.UndefinedFunction(), PERMANENT),
        (pg.UndefinedTable(), SYSTEMIC),
        (pg.UndefinedColumn(), SYSTEMIC),
        (pg.InsufficientPrivilege(), SYSTEMIC),
        (pg.SyntaxError(), SYSTEMIC),
        (pg.InvalidCatalogName(), SYSTEMIC),
        (pg.InvalidSchemaName(), SYSTEMIC),
        (pg.InvalidPassword(), SYSTEMIC),
        (pg.InvalidAuthorizationSpecification(), SYSTEMIC),
        (pg.ReadOnlySqlTransaction(), SYSTEMIC),
        (pg.DiskFull(), SYSTEMIC),
        (pg.OutOfMemory(), SYSTEMIC),
        (pg.IoError(), SYSTEMIC),
        (pg.DatabaseDropped(), SYSTEMIC),
        (pg.InternalError_(), SYSTEMIC),
        (pg.DataCorrupted(), SYSTEMIC),
        (pg.ConfigFileError(), SYSTEMIC),
        (psycopg.OperationalError("server closed the connection unexpectedly"), TRANSIENT),
        (psycopg.OperationalError("the connection is closed"), TRANSIENT),
        (psycopg.InterfaceError("connection already closed"), TRANSIENT),
        (psycopg.OperationalError('connection to server failed: FATAL:  password authentication failed for user "x"'), SYSTEMIC),
        (psycopg.OperationalError('connection to server failed: FATAL:  database "x" does not exist'), SYSTEMIC),
        (psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), PERMANENT),
        (psycopg.ProgrammingError("cannot adapt type 'object'"), PERMANENT),
    ],
    ids=show,
)
def test_psycopg_errors_are_known_by_sqlstate(error: psycopg.Error, expected: ErrorClass) -> None:
    """What will pass is retried, what a row breaks is its event's fault, what is missing or full is everybody's."""
    assert classify(error) is expected


def test_every_sqlstate_of_psycopg_is_answered() -> None:
    """Integrity and data errors are never retried and never stop the stream; no state raises."""
    for name, error in vars(pg).items():
        if isinstance(error, type) and issubclass(error, psycopg.Error) and error.sqlstate:
            found = classify(error())
            assert found is PERMANENT or not error.sqlstate.startswith(("22", "23")), name


def test_other_drivers_are_known_by_their_sqlstate_too() -> None:
    """psycopg2 calls it pgcode, asyncpg sqlstate; SQLAlchemy wraps the driver's error as the cause."""
    assert classify(foreign("psycopg2.errors.DeadlockDetected", pgcode="40P01")) is TRANSIENT
    assert classify(foreign("asyncpg.exceptions.UndefinedTableError", sqlstate="42P01")) is SYSTEMIC
    wrapped = foreign("sqlalchemy.exc.DBAPIError")
    wrapped.__cause__ = pg.DiskFull()
    assert classify(wrapped) is SYSTEMIC


def java(text: str) -> BaseException:
    """An error of the JVM, as py4j raises it, without the JVM."""
    return foreign("py4j.protocol.Py4JJavaError", type("Shown", (Exception,), {"__str__": lambda self: text}))


CALL = "An error occurred while calling o424.save.\n: "
STAGE = (
    CALL + "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: "
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (spark.AnalysisException("[TABLE_OR_VIEW_NOT_FOUND] The table `nope` cannot be found."), SYSTEMIC),
        (spark.ParseException("[PARSE_SYNTAX_ERROR] Syntax error at or near 'selec'."), SYSTEMIC),
        (spark.NumberFormatException("[CAST_INVALID_INPUT] The value 'a' cannot be cast."), PERMANENT),
        (spark.ArithmeticException("[DIVIDE_BY_ZERO] Division by zero."), PERMANENT),
        (spark.DateTimeException("[CANNOT_PARSE_TIMESTAMP] Text 'a' could not be parsed."), PERMANENT),
        (spark.ArrayIndexOutOfBoundsException("[INVALID_ARRAY_INDEX] The index 2 is out of bounds."), PERMANENT),
        (spark.PythonException("An exception was thrown from the Python worker:\nConnectionResetError: peer"), PERMANENT),
        (spark.SparkRuntimeException("[USER_RAISED_EXCEPTION] no"), PERMANENT),
        (spark.PySparkTypeError("field id: IntegerType() can not accept object 'a'"), PERMANENT),
        (spark.UnknownException("java.lang.IllegalStateException: SparkContext was shut down"), SYSTEMIC),
        (spark.UnknownException(NO_SCHEDULER), SYSTEMIC),
        (spark.UnknownException("Task 2 rejected from java.util.concurrent.ThreadPoolExecutor@12a[Shutting down, "), SYSTEMIC),
        (Py4JNetworkError("Answer from Java side is empty"), SYSTEMIC),
        (Py4JError("An error occurred while calling o140.select"), SYSTEMIC),  # it was under way when the JVM ended
        (Py4JError("An error occurred while calling o1.nope. Trace:\npy4j.Py4JException: Method nope([]) does not exist"), PERMANENT),
        (SparkConnectGrpcException("<_MultiThreadedRendezvous of RPC ...\n\tstatus = StatusCode.UNAVAILABLE"), SYSTEMIC),
        (SparkConnectGrpcException("[INVALID_HANDLE.SESSION_NOT_FOUND] The handle 1 is invalid. Session not found."), SYSTEMIC),
        (spark.SparkRuntimeException("[SPARK_JOB_CANCELLED] Job 1 cancelled Query [id = 1] was stopped SQLSTATE: XXKDA"), SYSTEMIC),
        (java(CALL + "org.apache.spark.SparkException: Job 3 cancelled because Stage 5 was cancelled"), SYSTEMIC),  # Spark 3.5
        (spark.SparkRuntimeException("[OPERATION_CANCELED] Operation has been canceled."), SYSTEMIC),
        (spark.IllegalArgumentException("java.net.UnknownHostException: prices.example"), TRANSIENT),
        (java(CALL + "org.postgresql.util.PSQLException: Connection to prices:5432 refused. Check that the hostname"), TRANSIENT),
        (java(STAGE + "Lost task 0.3: org.apache.kafka.common.errors.TimeoutException: Topic t not present in metadata"), TRANSIENT),
        (java(STAGE + "Lost task 0.3: org.apache.kafka.common.errors.RecordTooLargeException: The message is"), PERMANENT),
        (java(STAGE + "Lost task 0.3: org.apache.hadoop.fs.s3a.AWSServiceThrottledException: getFileStatus: SlowDown"), TRANSIENT),
        (java(STAGE + 'x.AbfsRestOperationException: Operation failed: "The server is busy.", 503, GET, https://a'), TRANSIENT),
        (java(STAGE + 'x.AbfsRestOperationException: Operation failed: "Not authorized.", 403, GET, https://a'), SYSTEMIC),
        (java(STAGE + 'x.AbfsRestOperationException: Operation failed: "Not found.", 404, GET, https://a'), PERMANENT),
        (java(CALL + "org.apache.spark.SparkException: Could not execute broadcast in 300 secs. You can increase"), TRANSIENT),
        (java(CALL + "java.lang.ClassNotFoundException: org.postgresql.Driver"), SYSTEMIC),
        (java(STAGE + "Lost task 0.3: java.nio.file.AccessDeniedException: s3a://bucket/prices"), SYSTEMIC),
        (RuntimeError("cannot schedule new futures after interpreter shutdown"), SYSTEMIC),
        (RuntimeError("can't start new thread at interpreter shutdown"), SYSTEMIC),
        (RuntimeError("no such order"), PERMANENT),
        (ours.SparkGone("Spark was stopped"), SYSTEMIC),
        (
            java(CALL + "io.delta.exceptions.ConcurrentAppendException: [DELTA_CONCURRENT_APPEND.WITHOUT_HINT] Transaction conflict"),
            TRANSIENT,
        ),
        (java(CALL + "io.delta.exceptions.MetadataChangedException: [DELTA_METADATA_CHANGED] changed"), TRANSIENT),
        (
            java(CALL + "org.apache.spark.sql.delta.schema.DeltaInvariantViolationException: [DELTA_VIOLATE_CONSTRAINT_WITH_VALUES]"),
            PERMANENT,
        ),
        (java(STAGE + "Lost task 0.3 in stage 1.0 (TID 4) (h executor 1): ExecutorLostFailure (executor 1 exited)"), TRANSIENT),
        (
            java(STAGE + "Lost task 0.3 in stage 1.0 (TID 4) (h executor 1): FetchFailed(BlockManagerId(1, h, 7337), shuffleId=0)"),
            TRANSIENT,
        ),
        (java(STAGE + "org.apache.spark.SparkNumberFormatException: [CAST_INVALID_INPUT] The value 'No space left on device'"), PERMANENT),
        (java(STAGE + "java.io.IOException: No space left on device"), SYSTEMIC),
        (java(STAGE + "Python worker exited unexpectedly (crashed)"), TRANSIENT),
        (java(STAGE + "java.net.SocketException: Broken pipe\n\tat org.apache.spark.api.python.BasePythonRunner"), TRANSIENT),
        (foreign("delta.exceptions.base.DeltaConcurrentModificationException"), TRANSIENT),
    ],
    ids=show,
)
def test_spark_and_delta_errors(error: BaseException, expected: ErrorClass) -> None:
    """Data errors and errors in a UDF are an event's fault; lost executors and concurrent commits pass; a bad plan or a dead JVM do not."""
    assert classify(error) is expected


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("Python worker exited unexpectedly (crashed)", PERMANENT),
        (
            "Lost task 0.3 in stage 1.0: ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: code 137",
            PERMANENT,
        ),
        (
            "Lost task 0.3 in stage 1.0: ExecutorLostFailure (executor 1 exited unrelated to the running tasks) Reason: decommissioned",
            SYSTEMIC,
        ),
        (
            "ResultStage 3 (call) has failed the maximum allowable number of times: 4. Most recent failure reason: "
            "org.apache.spark.shuffle.MetadataFetchFailedException: Missing an output location for shuffle 0 partition 1",
            PERMANENT,
        ),
    ],
)
def test_a_worker_that_dies_again_and_again_is_the_events_own_fault(said: str, found: ErrorClass) -> None:
    """So is an executor, unless it was taken away. Spark names no event: where tries do not outlast it, halves find what kills."""
    error = java(STAGE + said)
    assert (classify(error), outlasted(error), killed_a_worker(error)) == (TRANSIENT, found, found is PERMANENT)


@pytest.mark.parametrize(
    "error",
    [
        foreign("requests.exceptions.ConnectTimeout", foreign("requests.exceptions.ConnectionError").__class__, TimeoutError),
        foreign("httpx.ConnectTimeout", foreign("httpx.TransportError").__class__),
        pg.ConnectionTimeout("connection timeout expired"),
        OSError(errno.ETIMEDOUT, "Connection timed out"),
    ],
    ids=show,
)
def test_a_connection_that_is_not_made_in_time_is_nobodys_fault(error: Exception) -> None:
    """Behind a firewall that answers nothing a service is as much away as one that refuses: no event is blamed, whatever the cause says."""
    error.__context__ = TimeoutError("timed out")
    assert (classify(error), outlasted(error)) == (TRANSIENT, SYSTEMIC)
    assert outlasted(TimeoutError("timed out")) is PERMANENT


def test_a_slow_answer_is_told_from_a_connection_that_is_not_made() -> None:
    """What a package calls ConnectionTimeout may be one event's slow question; what was handled before an error says nothing of it."""
    slow = foreign("opensearchpy.exceptions.ConnectionTimeout")
    slow.__context__ = foreign("urllib3.exceptions.ReadTimeoutError", foreign("urllib3.exceptions.TimeoutError").__class__)
    assert (classify(slow), outlasted(slow)) == (TRANSIENT, PERMANENT)
    cancelled = pg.QueryCanceled()
    cancelled.__context__ = foreign("httpx.ConnectTimeout", foreign("httpx.TransportError").__class__)
    assert outlasted(cancelled) is PERMANENT


def test_the_state_of_a_spark_error_is_asked() -> None:
    """A cast that fails is SQLSTATE 22018, also where the class says nothing; a state that only Spark uses leaves the class to decide.

    What `raise_error` says is P0001, and may quote an event: no word of it counts.
    """

    class WithState(spark.SparkRuntimeException):
        def __init__(self, state: str) -> None:
            super().__init__("bad order: Java heap space" if state == "P0001" else "text")
            self.state = state

        def getSqlState(self) -> str:
            return self.state

    states = {
        "22018": PERMANENT,
        "P0001": PERMANENT,
        "42P01": SYSTEMIC,
        "38000": PERMANENT,
        "39000": PERMANENT,
        "2D521": TRANSIENT,
        "XX000": PERMANENT,
    }
    assert {state: classify(WithState(state)) for state in states} == states


def test_a_jvm_that_cannot_be_asked_is_no_obstacle() -> None:
    """The methods of a captured error talk to a JVM that may be gone: what cannot be had is left out."""

    class Captured(spark.AnalysisException):
        def getSqlState(self) -> str:
            raise ConnectionRefusedError(111, "Connection refused")

    assert classify(Captured("text")) is SYSTEMIC


def test_a_refused_socket_to_the_jvm_is_no_connection_that_comes_back() -> None:
    """After the death of the JVM py4j raises plain ConnectionRefusedError; elsewhere that is transient."""
    space = {"__name__": "py4j.clientserver"}
    exec("def connect():\n    raise ConnectionRefusedError(111, 'Connection refused')", space)
    with pytest.raises(ConnectionRefusedError) as raised:
        space["connect"]()  # type: ignore[operator]
    assert classify(raised.value) is SYSTEMIC
    assert classify(ConnectionRefusedError(111, "Connection refused")) is TRANSIENT


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CommitFailedError("a concurrent transaction deleted data"), TRANSIENT),
        (TableNotFoundError("no log files"), SYSTEMIC),
        (DeltaError("Generic error"), PERMANENT),
    ],
    ids=show,
)
def test_deltalake_errors(error: BaseException, expected: ErrorClass) -> None:
    """A lost race is planned again; a table that is not there is missing for every event."""
    assert classify(error) is expected


AZURE = foreign("azure.core.exceptions.AzureError")
HTTP = type(foreign("azure.core.exceptions.HttpResponseError", type(AZURE)))


def azure(status: int, code: str | None = None, name: str = "HttpResponseError") -> BaseException:
    """An HTTP error as azure-core has it."""
    return foreign(f"azure.core.exceptions.{name}", HTTP, status_code=status, error_code=code)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (azure(429), TRANSIENT),
        (azure(503, "ServerBusy"), TRANSIENT),
        (azure(409, "ServerBusy"), TRANSIENT),
        (azure(500), TRANSIENT),
        (azure(401), SYSTEMIC),
        (azure(403), SYSTEMIC),
        (azure(404, "ContainerNotFound", "ResourceNotFoundError"), SYSTEMIC),
        (azure(404, "BlobNotFound", "ResourceNotFoundError"), PERMANENT),
        (azure(400), PERMANENT),
        (azure(401, name="ClientAuthenticationError"), SYSTEMIC),
        (foreign("azure.core.exceptions.ServiceRequestError", type(AZURE)), TRANSIENT),
        (foreign("azure.core.exceptions.ServiceResponseError", type(AZURE)), TRANSIENT),
        (foreign("azure.eventhub.exceptions.ConnectError"), TRANSIENT),
        (foreign("azure.eventhub.exceptions.ConnectionLostError"), TRANSIENT),
        (foreign("azure.eventhub.exceptions.OperationTimeoutError"), TRANSIENT),
        (foreign("azure.eventhub.exceptions.AuthenticationError", type(foreign("azure.eventhub.exceptions.ConnectError"))), SYSTEMIC),
        (foreign("azure.servicebus.exceptions.ServiceBusServerBusyError", type(AZURE)), TRANSIENT),
        (foreign("azure.servicebus.exceptions.MessageSizeExceededError", type(AZURE), ValueError), PERMANENT),
    ],
    ids=show,
)
def test_azure_errors(error: BaseException, expected: ErrorClass) -> None:
    """Throttling and lost connections pass; no right, no hub and no container are everybody's fault."""
    assert classify(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (foreign("requests.exceptions.ConnectionError", OSError), TRANSIENT),
        (foreign("requests.exceptions.HTTPError", OSError, response=foreign("x.Response", status_code=503)), TRANSIENT),
        (foreign("requests.exceptions.HTTPError", OSError, response=foreign("x.Response", status_code=404)), PERMANENT),
        (foreign("requests.exceptions.HTTPError", OSError, response=foreign("x.Response", status_code=401)), SYSTEMIC),
        (foreign("httpx.ConnectTimeout", type(foreign("httpx.TransportError"))), TRANSIENT),
        (foreign("aiohttp.client_exceptions.ClientResponseError", status=429), TRANSIENT),
        (urllib.error.HTTPError("http://x", 503, "busy", Message(), None), TRANSIENT),
        (urllib.error.HTTPError("http://x", 422, "no", Message(), None), PERMANENT),
        (http.client.RemoteDisconnected("gone"), TRANSIENT),
        (http.client.IncompleteRead(b""), TRANSIENT),
    ],
    ids=show,
)
def test_http_errors(error: BaseException, expected: ErrorClass) -> None:
    """A busy service passes, a request that it refuses is the event's fault, and who may not log in need not try again."""
    assert classify(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), TRANSIENT),
        (BrokenPipeError(), TRANSIENT),
        (TimeoutError(), TRANSIENT),
        (socket.timeout(), TRANSIENT),  # noqa: UP041 - the old name is what is tested
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), TRANSIENT),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), SYSTEMIC),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), SYSTEMIC),
        (ssl.SSLError(1, "decryption failed"), TRANSIENT),
        (OSError(errno.EHOSTUNREACH, "No route to host"), TRANSIENT),
        (OSError(errno.ENOSPC, "No space left on device"), SYSTEMIC),
        (OSError(errno.EROFS, "Read-only file system"), SYSTEMIC),
        (OSError(errno.EMFILE, "Too many open files"), SYSTEMIC),
        (PermissionError(errno.EACCES, "Permission denied"), SYSTEMIC),
        (MemoryError(), SYSTEMIC),
        (FileNotFoundError(errno.ENOENT, "No such file"), PERMANENT),
        (OSError("no number"), PERMANENT),
        (ValueError("bad"), PERMANENT),
        (RecursionError(), PERMANENT),
        (KeyError("k"), PERMANENT),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), PERMANENT),
    ],
    ids=show,
)
def test_errors_of_python_itself(error: BaseException, expected: ErrorClass) -> None:
    """What is not known is the event's own fault: the budget watches over it."""
    assert classify(error) is expected


@pytest.mark.parametrize("name", sorted(n for n, c in vars(ours).items() if isinstance(c, type) and issubclass(c, ours.DedupError)))
def test_our_own_errors_say_what_they_are(name: str) -> None:
    """Rows that a sink refuses are their events' fault; a store that is away or was overtaken passes; the rest needs a person."""
    passing, of_events = ["StoreUnavailable", "CommitConflict", "CommitUnknown"], ["RowsRefused", "ValuesRefused"]
    expected = dict.fromkeys(of_events, PERMANENT) | dict.fromkeys(passing, TRANSIENT)
    assert classify(getattr(ours, name)()) is expected.get(name, SYSTEMIC)


def raised(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    """`outer` as if raised from, in the handling of, or in place of `inner`."""
    outer.__context__ = inner
    if how != "handling":
        outer.__cause__ = inner if how == "from" else None  # sets __suppress_context__
    return outer


def test_the_cause_of_an_unknown_error_decides() -> None:
    """A handler that wraps the driver's error is understood; a cause that was hidden with `from None` is not looked at."""
    assert classify(raised(RuntimeError("wrapped"), pg.DeadlockDetected(), "from")) is TRANSIENT
    assert classify(raised(RuntimeError("wrapped"), pg.DiskFull(), "handling")) is SYSTEMIC
    assert classify(raised(RuntimeError("wrapped"), pg.DiskFull(), "hidden")) is PERMANENT
    assert classify(raised(RuntimeError("a"), raised(ValueError("b"), TimeoutError(), "from"), "from")) is TRANSIENT


def test_a_known_error_speaks_for_itself() -> None:
    """What it was raised for does not change what a known error is."""
    assert classify(raised(pg.UniqueViolation(), ConnectionResetError(), "handling")) is PERMANENT


def test_causes_in_a_circle_or_without_end_are_left() -> None:
    """Circles end, and so does a chain of a thousand causes."""
    one, two = ValueError("1"), ValueError("2")
    one.__cause__, two.__cause__ = two, one
    assert classify(one) is PERMANENT
    last: BaseException = TimeoutError()
    for _ in range(1000):
        last = raised(ValueError(), last, "from")
    assert classify(last) is PERMANENT


def test_rules_of_the_user_come_first_and_in_order() -> None:
    """A type or a predicate, the first that fits; what none fits is judged as always."""
    rules = [(pg.UniqueViolation, TRANSIENT), (lambda e: "later" in str(e), TRANSIENT), (Exception, SYSTEMIC)]
    assert classify(pg.UniqueViolation(), rules) is TRANSIENT
    assert classify(ValueError("come later"), rules) is TRANSIENT
    assert classify(ValueError("bad"), rules) is SYSTEMIC
    assert classify(pg.DiskFull(), rules[:2]) is SYSTEMIC
    assert classify(raised(RuntimeError(), ValueError("later"), "from"), rules[:2]) is TRANSIENT


def test_a_rule_that_raises_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """A mistake in a predicate neither hides the error nor stops the stream: it is logged, and the next rule is asked."""
    with caplog.at_level(logging.WARNING, "dedup"):
        assert classify(ValueError(), [(lambda e: e.args[5] == 1, SYSTEMIC), (ValueError, TRANSIENT)]) is TRANSIENT
    assert "rule" in caplog.text


class Hostile(Exception):
    """Nothing about it can be asked."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError


def test_an_error_that_cannot_be_looked_at_is_its_events_own() -> None:
    """Attributes and text that raise end nothing: the class is what can be known without them."""
    assert classify(Hostile()) is PERMANENT
    assert classify(raised(RuntimeError(), Hostile(), "from")) is PERMANENT


def test_a_module_that_is_missing_is_a_defect_of_the_deployment() -> None:
    """It is everybody's fault, also as a cause; not where the handler caught it before the event failed. The user's rules come first."""

    def failed(code: str) -> BaseException:
        with pytest.raises(Exception) as raised:  # noqa: PT011  whichever the code raises
            exec(code)
        return raised.value

    optional = "try:\n    import no_such_module\nexcept ImportError:\n    "
    assert classify(failed("import no_such_module")) is SYSTEMIC
    assert classify(failed("from json import no_such_name")) is SYSTEMIC
    assert (
        classify(failed("try:\n    import no_such_module\nexcept ImportError as e:\n    raise RuntimeError('install it') from e"))
        is SYSTEMIC
    )
    assert classify(failed(optional + "int('x')")) is PERMANENT
    assert classify(failed(optional + "raise ValueError('x') from None")) is PERMANENT
    assert classify(failed("import no_such_module"), [(ImportError, PERMANENT)]) is PERMANENT


_LOST = '  File "/jobs/shop.py", line 7, in price\n    raise x\n'


@pytest.mark.parametrize(
    ("raised", "found", "then"),
    [
        ("ConnectionResetError: peer", TRANSIENT, SYSTEMIC),
        ("requests.exceptions.ConnectionError: prices:443", TRANSIENT, SYSTEMIC),
        ("TimeoutError", TRANSIENT, PERMANENT),
        ("ValueError: ConnectionResetError: peer", PERMANENT, SYSTEMIC),
        ("KeyError: 'x'\n\nDuring handling of the above exception, another exception occurred:\n\nConnectionError: x", PERMANENT, SYSTEMIC),
        ("ConnectionError: x\n\nDuring handling of the above exception, another exception occurred:\n\nValueError: x", PERMANENT, SYSTEMIC),
    ],
)
def test_what_a_udf_raises_is_judged_as_what_a_handler_raises(raised: str, found: ErrorClass, then: ErrorClass) -> None:
    """By the class in the worker's traceback, which Spark passes on as text."""
    error = spark.PythonException(_WORKER + _LOST + raised + "\n")
    assert classify(error) is found and outlasted(error) is then


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[SPARK_JOB_CANCELLED] Job 1 cancelled as part of cancellation of all jobs SQLSTATE: XXKDA", True),
        ("Job 1 cancelled part of cancelled job group 8a", True),
        ("java.nio.channels.ClosedByInterruptException\n\tat java.base/java.nio", True),
        ("java.io.InterruptedIOException: Call interrupted", True),
        ("java.net.SocketTimeoutException: Read timed out", False),
        ("Job 1 cancelled because SparkContext was shut down", False),
        ("Job aborted due to stage failure", False),
    ],
)
def test_spark_that_ends_is_not_somebody_who_cancels(text: str, found: bool) -> None:
    """A JVM that runs out of memory cancels its jobs, too: what its tasks were trying stays suspect. What others say cancels nothing."""
    assert is_cancelled(java(CALL + text)) is found
    assert not is_cancelled(ValueError(text))


@pytest.mark.parametrize("text", ["[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error", "java.io.FileNotFoundException: No such file"])
def test_a_file_that_is_gone_is_read_anew_before_an_event_is_blamed(text: str) -> None:
    """A table that was written anew while the handler read it; or a file that the event itself names."""
    error = java(STAGE + "Lost task 0.3: " + text)
    assert (classify(error), outlasted(error)) == (TRANSIENT, PERMANENT)


_WORKER = "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
_LINE = '  File "/jobs/shop.py", line 7, in price\n    import no_such_module\n'
_LACKS = "ModuleNotFoundError: No module named 'no_such_module'\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (_LINE + _LACKS, SYSTEMIC),
        (_LINE + "    ^^^^^^\nImportError: cannot import name 'x' from 'json'", SYSTEMIC),
        (_LINE + _LACKS + "\nThe above exception was the direct cause of the following exception:\n\nRuntimeError: install it\n", SYSTEMIC),
        (_LINE + _LACKS + "\nDuring handling of the above exception, another exception occurred:\n\nValueError: x\n", PERMANENT),
        (_LINE + "ValueError: bad\n" + _LACKS, PERMANENT),
        (_LINE + "ValueError: bad\nTraceback (most recent call last):\n" + _LINE + _LACKS, PERMANENT),
        (_LINE + "ImportErrors: of the user", PERMANENT),
    ],
)
def test_a_module_that_is_missing_in_a_udf_is_a_defect_of_the_deployment(text: str, found: ErrorClass) -> None:
    """As in a task of ours; but not what an event's text says, nor what the UDF caught. Texts as Spark 4.2 gives them."""
    assert classify(spark.PythonException(_WORKER + text)) is found
