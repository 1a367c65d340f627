"""What the client makes of an answer of `/v1/tails`."""

from __future__ import annotations

from typing import Any

import pytest

from millstream import errors
from millstream.client import pipeline_read


def found(code: str) -> Any:
    return pipeline_read._found({"error": {"code": code, "detail": "why"}})


@pytest.mark.parametrize("code", ["offset_invalid", "offset_beyond_tail"])
def test_an_offset_that_the_stream_does_not_have_is_told(code: str) -> None:
    assert found(code).error == f"{code}: why"


@pytest.mark.parametrize("code", ["shutting_down", "server_busy", "internal", "new_in_a_later_one"])
def test_nothing_else_is_taken_for_that(code: str) -> None:
    """A reader would skip records that are there."""
    with pytest.raises(errors.Unavailable, match=code) as raised:
        found(code)
    assert (raised.value.code, raised.value.retryable) == (code, True)
