"""What a failed query says in one sentence: the connector's own error, or the last line of a Python error."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from millstream.errors import PipelineError, StreamNotFound
from millstream.spark.jobs.run.driver import plain_error

FRAMES = """\
[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Traceback (most recent call last):
  File "worker.py", line 1, in main
    process()
    ^^^^^^^^^
  File "lake.py", line 2, in enter

"""
CHAINED = """\
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 3, in f
_internal.CommitFailed: the later one"""
JAVA = "\n\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:581)\n"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "deltalake.exceptions.DeltaError: a decimal is too long",
            "DeltaError: a decimal is too long",
        ),
        ("Exception: no class of its own", "Exception: no class of its own"),
        ("pkg.SchemaMismatch: first line\nsecond line", "SchemaMismatch: first line"),
        ("StopIteration", "StopIteration"),
        (
            CHAINED,
            "CommitFailed: the later one",
        ),
    ],
)
def test_the_last_line_of_any_python_error_is_shown(raised: str, said: str) -> None:
    # Spark's own sentence stands in front of the traceback, or in a line of its own.
    for text in (FRAMES, FRAMES.replace("exception: ", "exception:\n")):
        error = plain_error(PySparkException(text + raised + JAVA))
        assert isinstance(error, PipelineError)
        assert (error.code, error.message) == ("query_failed", f"the query failed: {said}")


def test_an_error_of_ours_is_itself_and_others_are_left_alone() -> None:
    raised = "ConnectorError: stream_not_found: stream `s` does not exist. Hint: create it."
    error = plain_error(PySparkException(FRAMES + raised + JAVA))
    assert isinstance(error, StreamNotFound)
    assert (error.message, error.hint) == ("stream `s` does not exist", "create it")
    of_job = "terminated with exception: [USER_RAISED_EXCEPTION] field_missing: no `id`. Hint: decode. SQLSTATE: P0001 SQLSTATE: X"
    error = plain_error(PySparkException(of_job + JAVA))
    assert error is not None
    assert (error.code, error.message, error.hint) == ("field_missing", "no `id`", "decode")
    assert plain_error(ValueError("x")) is None
    java = plain_error(PySparkException("[TABLE_NOT_FOUND] There is no table.\nmore"))
    assert java is not None
    assert java.message == "the query failed: [TABLE_NOT_FOUND] There is no table."
