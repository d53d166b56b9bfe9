"""What is known of errors from outside: tables of class names, SQLSTATEs, HTTP statuses, errnos and words, and what each means.

Pure data with its sources, so that no driver is imported. Read by `classify`.
"""

from __future__ import annotations

import errno
import re
from enum import StrEnum


class ErrorClass(StrEnum):
    """What to do about an error."""

    TRANSIENT = "TRANSIENT"
    """It may pass on another try."""
    PERMANENT = "PERMANENT"
    """The event is at fault: it becomes a dead letter."""
    SYSTEMIC = "SYSTEMIC"
    """All events are concerned: none becomes a dead letter."""


TRANSIENT, PERMANENT, SYSTEMIC = ErrorClass.TRANSIENT, ErrorClass.PERMANENT, ErrorClass.SYSTEMIC

STATES: dict[str, ErrorClass] = {
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
    "P0001": PERMANENT,  # RAISE in a trigger; raise_error of Spark
    "XX": SYSTEMIC,  # internal error, corruption
}
"""SQLSTATE, or how it begins. Source: PostgreSQL 16 manual, appendix A; 2D521: error-conditions.json of Delta Lake."""

OWN_STATES = ("40001", "40P01", "55P03", "57014")
"""Of the transient ones, those that one event may bring about again and again: conflicts, locks, its own slow statement."""

SPARK_STATES = ("21", "22", "23", "2D521", "42", "P0001")
"""Of Spark's states, those that mean the same in PostgreSQL. P0001 is `raise_error` and `assert_true`, whose text may be an event's: it is
not searched for words. Source: error-conditions.json of Spark 4."""


NAMES: dict[str, ErrorClass] = {
    "MemoryError": SYSTEMIC,
    "ImportError": SYSTEMIC,  # this process, or an executor, lacks a module of the handler's: a deployment defect
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


LOGIN = re.compile(r"FATAL: .{0,200}(?:authentication failed|pg_hba\.conf|does not exist|not permitted|permission denied)")
"""Where no connection came to be there is no SQLSTATE, only libpq's text."""


STATUS: dict[int, ErrorClass] = {
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

OWN_STATUS = (408, 500, 504)
"""Of the transient ones, those that one event may bring about again and again."""

AZURE_STATUS = STATUS | {403: SYSTEMIC, 404: SYSTEMIC, 409: None, 412: None}
AZURE_BUSY = ("ServerBusy", "OperationTimedOut", "InternalError")
AZURE_THINGS = ("BlobNotFound", "PathNotFound", "ResourceNotFound", "EntityNotFound", "MessageNotFound")
"""Error codes of a 404 about one thing, which an event may have named, and not about the container, hub or account."""


NEVER_CONNECTED = (
    "requests.exceptions.ConnectTimeout",
    "httpx.ConnectTimeout",
    "urllib3.exceptions.ConnectTimeoutError",
    "botocore.exceptions.ConnectTimeoutError",
    "aiohttp.client_exceptions.ConnectionTimeoutError",
    "psycopg.errors.ConnectionTimeout",
)
"""Time-outs of connecting alone. Elsewhere a class of such a name may also be an answer that took too long (opensearch-py)."""


ERRNOS: dict[int, ErrorClass] = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EIO), SYSTEMIC
) | dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EAGAIN), TRANSIENT)


TASK = re.compile(
    r"(?:Lost task|Job aborted).{0,2000}?(?:ExecutorLostFailure|FetchFailed|MetadataFetchFailed|Executor heartbeat timed out)", re.DOTALL
)
WORKER = re.compile(
    r"Python worker exited unexpectedly"
    r"|ExecutorLostFailure \(executor \S+ exited caused by one of the running tasks\)"
    r"|has failed the maximum allowable number of times: \d+\. Most recent failure reason: \S*FetchFailed"
    r"|(?:SocketException|ClosedChannelException|Broken pipe|Connection reset).{0,2000}?org\.apache\.spark\.api\.python",
    re.DOTALL,
)
"""A Python worker died while it worked, or its executor with it. Without retries of tasks, as on local[N], one death ends the job; an event
may be what kills it. Executors that have died take the files of a shuffle along: behind one, that is all the job says.

Source: BasePythonRunner of Spark 4, whose writer passes on what the socket says; ExecutorLostFailure of TaskEndReason and
handleTaskCompletion of DAGScheduler, Spark 3.5 to 4.2.
"""
RAISED = re.compile(r"Traceback \(most recent call last\):\n(?:[ ].*\n)+([\w.]+)(?::|$)", re.MULTILINE)
CAUGHT = "\nDuring handling of the above exception, another exception occurred:\n"
"""How the text of an error of a Python worker begins, with the name of the class; and what stands in it where that was caught."""
DELTA = re.compile(r"io\.delta\.exceptions\.(?:Concurrent|MetadataChanged|ProtocolChanged)\w*Exception|\[DELTA_CONCURRENT_")
STOPPED = re.compile(
    r"SparkContext was shut down|stopped SparkContext"
    r"|rejected from java\.util\.concurrent\.ThreadPoolExecutor\S*\[(?:Shutting down|Terminated)"
    r'|return value of "org\.apache\.spark\.SparkContext\.\w+\(\)" is null'
)
"""What a job says while Spark stops: somebody stopped it, or its JVM is about to end, which stops Spark first."""
GONE = re.compile(
    rf"{STOPPED.pattern}|Answer from Java side is empty|No space left on device|java\.lang\.OutOfMemoryError"
    r"|Java heap space|spark\.driver\.maxResultSize|TaskResultLost"
)
ENDING = re.compile(r"cannot schedule new futures after|can't (?:start|create) new thread at interpreter shutdown")
"""What RuntimeError says while Python ends: a thread that goes on for a moment cannot use any pool. Source: concurrent.futures.thread."""
CANCELLED = re.compile(
    r"\[SPARK_JOB_CANCELLED\]|\bJob \d+ cancelled\b|\[OPERATION_CANCELED\]"
    r"|java\.lang\.InterruptedException|java\.io\.InterruptedIOException|java\.nio\.channels\.ClosedByInterruptException"
)
"""Somebody cancelled the job, or stops the query that it is of. Source: DAGScheduler.handleJobCancellation and
StreamExecution.isInterruptionException of Spark 3.5 to 4.2, and the condition of Spark Connect's interrupts."""
AWAY = re.compile(
    r"java\.net\.(?:ConnectException|UnknownHostException|NoRouteToHostException)|java\.nio\.channels\.UnresolvedAddressException"
    r"|java\.sql\.SQL(?:NonT|T)ransientConnectionException|org\.apache\.hadoop\.net\.ConnectTimeoutException"
    r"|PSQLException: (?:Connection to \S+ refused|The connection attempt failed)|CommunicationsException: Communications link failure"
    r"|SQLServerException: The TCP/IP connection to the host"
    r"|\bs3a\.AWS(?:ServiceThrottled|ClientIO|Status500)Exception|Could not execute broadcast in \d+ secs"
    r"|AbfsRestOperationException: Operation failed: \"[^\"]{0,500}\", (?:429|5\d\d),"
    r"|org\.apache\.kafka\.common\.errors\.(?:Timeout|Disconnect|Network|BrokerNotAvailable|CoordinatorNotAvailable)Exception"
)
"""A job of Spark could not connect to what it reads or writes, as a table by JDBC, or the storage was too busy: that is no row's fault.

Source: the drivers; hadoop-aws and hadoop-azure 3.4; BroadcastExchangeExec of Spark.
"""
VANISHED = re.compile(r"\[FAILED_READ_FILE\.FILE_NOT_EXIST\]|\[DELTA_FILE_NOT_FOUND|java\.io\.FileNotFoundException")
"""A file that a plan reads is gone: as of a table that was written anew meanwhile. Another try plans anew."""
LACKING = re.compile(
    r"java\.lang\.(?:ClassNotFoundException|NoClassDefFoundError|NoSuchMethodError|UnsatisfiedLinkError)"
    r"|org\.apache\.hadoop\.security\.AccessControlException|java\.nio\.file\.AccessDeniedException"
    r"|AbfsRestOperationException: Operation failed: \"[^\"]{0,500}\", (?:401|403),"
)
"""A jar is missing on the cluster, or of another version, or Spark may not read or write there."""
UNANSWERED = re.compile(r"^(?:Py4JError: )?An error occurred while calling \S+$")
"""All that py4j says of a call that was under way when the JVM ended. Source: send_command and get_return_value of py4j 0.10.9."""
UNANSWERED_CONNECT = re.compile(r"StatusCode\.UNAVAILABLE|\[INVALID_HANDLE\.SESSION_")
"""What Spark Connect says once its retries are over, or to a session that its server does not know, as after a restart.

Source: pyspark.sql.connect.client of 4.2; INVALID_HANDLE in Spark's error-conditions.json.
"""
DATA = re.compile(
    r"\[(?:CAST_|DIVIDE_BY_ZERO|ARITHMETIC_OVERFLOW|NUMERIC_|INVALID_ARRAY_INDEX|CANNOT_PARSE_|MALFORMED_|FAILED_EXECUTE_UDF)"
)
