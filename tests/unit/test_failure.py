"""What is kept of a failed attempt: something, of any exception, and nothing that PostgreSQL or a reader cannot take."""

from __future__ import annotations

import datetime as dt
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import NumberFormatException, PythonException

from deadletter import Failure, Kind
from deadletter.failure import MESSAGE_BYTES, STACK_BYTES, clean, describe
from fixtures.variants import of_which

AT = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def failure_of(error: BaseException) -> Failure:
    """Raise it here, describe it, and check what holds for each failure."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - also the ends of the process are described
        failure = describe(caught, AT)
    for text in (failure.error_type, failure.message, failure.stack, failure.fingerprint):
        assert type(text) is str
        assert "\0" not in text
        text.encode()
    assert len(failure.message.encode()) <= MESSAGE_BYTES
    assert len(failure.stack.encode()) <= STACK_BYTES
    assert len(failure.fingerprint) == 16
    return failure


def test_type_message_stack_and_time_are_kept() -> None:
    """A letter says what was raised, where, and when; builtins without their module."""
    failure = failure_of(ValueError("bad amount 3"))
    assert (failure.error_type, failure.message, failure.at, failure.kind) == ("ValueError", "bad amount 3", AT, Kind.HANDLER_ERROR)
    assert failure.stack.startswith("Traceback (most recent call last):")
    assert failure.stack.endswith("ValueError: bad amount 3\n")
    assert "in failure_of" in failure.stack
    assert describe(ValueError(), AT, Kind.CRASHED).kind is Kind.CRASHED


def test_causes_are_in_the_stack() -> None:
    """The root of an error that was wrapped is there to be read, oldest first."""
    error = RuntimeError("outer")
    error.__cause__ = KeyError("inner")
    stack = failure_of(error).stack
    assert 0 < stack.index("KeyError: 'inner'") + 1 < stack.index("RuntimeError: outer")


def make(name: str, **members: object) -> BaseException:
    """An exception whose class has these members."""
    return type(name, (Exception,), members)("text")  # type: ignore[no-any-return]


def broken(*_: object) -> str:
    raise RuntimeError("even this")


class Odd(str):
    """Text with manners of its own."""

    __slots__ = ()

    def __getitem__(self, key: object) -> str:
        raise RuntimeError

    encode = replace = splitlines = __len__ = broken  # type: ignore[assignment]


class Meta(type):
    """The class itself refuses to be asked."""

    def __getattribute__(cls, name: str) -> object:
        raise RuntimeError(name)


class Nameless(Exception, metaclass=Meta):
    """Its type has no name that can be had."""


def chained(length: int) -> BaseException:
    """An error with that many causes."""
    error: BaseException = ValueError("first")
    for number in range(length):
        following = ValueError(str(number))
        following.__cause__ = error
        error = following
    return error


def circle() -> BaseException:
    """Two errors that caused each other."""
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def nested(depth: int) -> BaseException:
    """Groups in groups."""
    error: Exception = ValueError("inmost")
    for _ in range(depth):
        error = ExceptionGroup("group", [error])
    return error


def sent(text: object) -> BaseException:
    """An exception with this text as its only argument."""
    return ValueError(text)


HOSTILE = {
    "str raises": lambda: make("E", __str__=broken),
    "str and repr raise": lambda: make("E", __str__=broken, __repr__=broken),
    "str exits": lambda: make("E", __str__=lambda self: sys.exit(3)),
    "str is no str": lambda: make("E", __str__=lambda self: 7),
    "str is odd": lambda: make("E", __str__=lambda self: Odd("text")),
    "str recurses": lambda: make("E", __str__=lambda self: str(self)),
    "name with NUL": lambda: make("E", __qualname__="a\0b\ud800"),
    "module is no text": lambda: make("E", __module__=7),
    "module raises": lambda: make("E", __module__=property(broken)),
    "traceback raises": lambda: make("E", __traceback__=property(broken), __cause__=property(broken), __context__=property(broken)),
    "everything raises": lambda: make("E", __getattribute__=broken),
    "type raises": Nameless,
    "notes are nothing": lambda: make("E", __notes__=7),
    "notes raise": lambda: make("E", __notes__=property(broken)),
    "NUL": lambda: sent("a\0b\0"),
    "lone surrogate": lambda: sent("a\ud800b\udcff"),
    "invalid bytes": lambda: sent(b"\xff\x00\xfe"),
    "huge": lambda: sent("x y " * 25_000_000),
    "many lines": lambda: sent("\n" * 1_000_000),
    "circle": circle,
    "many causes": lambda: chained(2_000),
    "deep group": lambda: nested(3_000),
    "cannot be pickled": lambda: make("E", __reduce__=broken),
    "system exit": lambda: SystemExit(3),
    "keyboard interrupt": lambda: KeyboardInterrupt(),
    "memory": MemoryError,
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff" * 1_000_000, 0, 1, "invalid\0"),
    "syntax": lambda: SyntaxError("bad", ("f\0.py", 1, 10**9, "x\ud800", 1, -5)),
    "os": lambda: OSError(5, "io\0", "file\ud800"),
    "huge without a space": lambda: sent("x" * 100_000_000),
    "huge and wide": lambda: sent("\U0001f4a5" * 1_000_000),
}


@pytest.mark.parametrize("name", of_which(len(HOSTILE) - 2, HOSTILE))
def test_any_exception_becomes_a_failure(name: str) -> None:
    """Whatever an exception does when it is asked what it is: the answer is short, valid UTF-8, without NUL."""
    failure_of(HOSTILE[name]())


def test_a_hostile_text_leaves_the_type_and_the_place() -> None:
    """When the text cannot be had, the rest is still there."""
    failure = failure_of(make("Nasty", __str__=broken))
    assert failure.error_type.endswith("Nasty")
    assert "cannot be had" in failure.message
    assert "in failure_of" in failure.stack


def recurse(n: int) -> int:
    return recurse(n + 1) + 1


def test_a_recursion_error_is_described() -> None:
    """Also with an exhausted stack the frames are kept, folded, and the own function is the place."""
    with pytest.raises(RecursionError) as raised:
        recurse(0)
    failure = describe(raised.value, AT)
    assert failure.error_type == "RecursionError"
    assert "in recurse" in failure.stack
    assert "more times" in failure.stack


def test_ctrl_c_while_an_error_is_described_is_ctrl_c() -> None:
    """The one thing that passes: a person who wants the process to end."""

    def interrupt(_: object) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        describe(make("E", __str__=interrupt), AT)


def test_a_long_stack_keeps_both_ends_and_a_long_message_its_beginning() -> None:
    """The beginning says where it came from, the end what it is; the cut is marked."""
    failure = failure_of(sent("start " + "x" * 1_000_000 + " end"))
    assert failure.message.startswith("start x")
    assert failure.message.endswith("(cut)")
    assert len(failure.message) == MESSAGE_BYTES
    assert failure.stack.startswith("Traceback")
    assert failure.stack.endswith("x end\n")
    assert "... cut here ..." in failure.stack
    assert len(failure.stack) == STACK_BYTES


@given(st.text(st.characters(), max_size=60), st.integers(20, 80), st.sampled_from([0.0, 0.5, 0.7]))
def test_a_cut_text_is_valid_and_within_its_limit(text: str, limit: int, tail: float) -> None:
    """Characters are never cut in two, and what fits is kept whole."""
    cut = clean(text, limit, tail)
    assert len(cut.encode()) <= limit
    assert "\0" not in cut


def test_secrets_are_in_neither_message_nor_stack_nor_at_a_cut() -> None:
    """Passwords are hidden before a text is cut, so that no cut separates one from the words that give it away."""
    secret = "hunter2" * 10
    dsn = f"postgresql://bob:{secret}@db/orders"
    for padding in (0, MESSAGE_BYTES - 45, MESSAGE_BYTES - 10, STACK_BYTES, 500_000):
        error = sent("x" * padding + " " + dsn + " " + "y" * 1_000_000)
        error.__cause__ = sent(f"password={secret}")
        error.add_note(f"SharedAccessKey={secret}")
        failure = failure_of(error)
        assert "hunter2" not in failure.message + failure.stack


def called(code: str, file: str, name: str = "job") -> BaseException:
    """The exception of `run()` in a module that seems to come from this file."""
    space: dict[str, object] = {"__name__": name}
    exec(compile(code, file, "exec"), space)
    run = space["run"]
    assert isinstance(run, types.FunctionType)
    try:
        run()
    except Exception as error:  # noqa: BLE001 - whatever the code raises is wanted
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError("nothing was raised")


def fingerprint_of(code: str, file: str) -> str:
    """The fingerprint of what that code raises."""
    return describe(called(code, file), AT).fingerprint


RUN = "def run():\n    raise ValueError('no order 17 for 4711')\n"


def test_the_fingerprint_is_the_same_for_other_numbers_lines_and_folders() -> None:
    """Letters of one bug are one group: over events, over releases that move lines, over machines."""
    first = fingerprint_of(RUN, "/home/a/job.py")
    assert fingerprint_of(RUN.replace("17", "999").replace("4711", "5"), "/home/a/job.py") == first
    assert fingerprint_of("\n\n\n" + RUN, "/home/a/job.py") == first
    assert fingerprint_of(RUN, "/databricks/x/job.py") == first
    assert fingerprint_of(RUN, r"C:\jobs\job.py") == first


def test_the_fingerprint_tells_type_place_and_wording_apart() -> None:
    """Different bugs are different groups."""
    first = fingerprint_of(RUN, "/a/job.py")
    others = [
        fingerprint_of(RUN.replace("ValueError", "KeyError"), "/a/job.py"),
        fingerprint_of(RUN.replace("order", "customer"), "/a/job.py"),
        fingerprint_of(RUN, "/a/other.py"),
        fingerprint_of("def inner():\n    raise ValueError('no order 17 for 4711')\ndef run():\n    inner()\n", "/a/job.py"),
    ]
    assert len({first, *others}) == 5


def test_only_the_first_line_and_no_address_counts() -> None:
    """Details that differ from event to event, such as PostgreSQL's failing row, do not split a group."""
    code = "def run():\n    raise ValueError('violates check at 0x7f71d7884b80\\nDETAIL: row (bob)')\n"
    other = code.replace("7f71d7884b80", "1b2c").replace("bob", "alice, with more")
    assert fingerprint_of(code, "/a/job.py") == fingerprint_of(other, "/a/job.py")


@pytest.mark.parametrize(
    "foreign",
    [
        "/venv/lib/python3.11/site-packages/lib.py",
        "/usr/lib/python3/dist-packages/lib.py",
        "/usr/lib/python3.12/json/decoder.py",
        "/databricks/spark/python/pyspark.zip/pyspark/worker.py",
        r"C:\Python\Lib\site-packages\lib.py",
        "<frozen importlib._bootstrap>",
        describe.__code__.co_filename,
    ],
)
def test_the_place_is_the_innermost_own_frame(foreign: str) -> None:
    """Where libraries raise, the place is the user's line that called them: two callers of one library are two groups."""
    space: dict[str, object] = {}
    exec(compile("def deep():\n    raise ValueError('bad')\n", foreign, "exec"), space)

    def by(function: str) -> str:
        code = f"def {function}(deep):\n    deep()\ndef run():\n    {function}(DEEP)\n"
        made: dict[str, object] = {"DEEP": space["deep"]}
        exec(compile(code, "/home/a/job.py", "exec"), made)
        with pytest.raises(ValueError, match="bad") as raised:
            made["run"]()  # type: ignore[operator]
        return describe(raised.value, AT).fingerprint

    assert by("one") == by("one")
    assert by("one") != by("two")


def test_cells_of_a_notebook_are_one_place() -> None:
    """A cell that is run again has another number and the same bug."""
    assert fingerprint_of(RUN, "<command-4711001>") == fingerprint_of(RUN, "<command-4711002>")


WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/pyspark/python/lib/pyspark.zip/pyspark/worker.py", line 3622, in main
    process()
  File "/home/a/job.py", line 10, in run
    raise ValueError("no order 17 for 4711")
ValueError: no order 17 for 4711"""


def test_an_error_of_a_python_worker_is_the_workers() -> None:
    """A bug is one group whether it is met on the driver or in a UDF: PySpark's error has the worker's traceback in its text."""
    failure = failure_of(PythonException(WORKER))
    assert (failure.error_type, failure.message) == ("ValueError", "no order 17 for 4711")
    assert failure.fingerprint == fingerprint_of(RUN, "/home/a/job.py")
    assert "PythonException" in failure.stack


JAVA = """An error occurred while calling o93.save.
: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to file:/tmp/w. SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailedWhileWritingRowsError(QueryExecutionErrors.scala:843)
Caused by: org.apache.spark.SparkNumberFormatException: [CAST_INVALID_INPUT] The value 'a' of the type "STRING" cannot be cast.
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


def test_an_error_of_the_jvm_is_its_root() -> None:
    """py4j's own first line is the same for all that happens in `save`: type and message are those of the last cause."""
    error = type("Py4JJavaError", (Exception,), {"__module__": "py4j.protocol"})(JAVA)
    failure = failure_of(error)
    assert failure.error_type == "org.apache.spark.SparkNumberFormatException"
    assert failure.message.startswith("[CAST_INVALID_INPUT] The value 'a'")
    assert "TASK_WRITE_FAILED" in failure.stack


def test_an_error_of_spark_without_either_is_taken_as_it_is() -> None:
    """Most errors of Spark have a type and a text of their own."""
    failure = failure_of(NumberFormatException("[CAST_INVALID_INPUT] The value 'a'"))
    assert (failure.error_type.rsplit(".", 1)[-1], failure.message) == ("NumberFormatException", "[CAST_INVALID_INPUT] The value 'a'")


def test_an_events_own_text_cannot_pose_as_a_traceback() -> None:
    """Only errors of Spark are read for what a worker said."""
    assert failure_of(RuntimeError(WORKER)).error_type == "RuntimeError"
