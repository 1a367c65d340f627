"""What the client makes of an answer of `/v1/tails`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from millstream import errors
from millstream.client import pipeline_read


def found(code: str) -> Any:
    return pipeline_read._found({"error": {"code": code, "detail": "why"}})


@pytest.mark.parametrize("code", ["offset_invalid", "offset_beyond_tail"])
def test_an_offset_that_the_stream_does_not_have_is_told(code: str) -> None:
    assert found(code).error == f"{code}: why"


def test_the_engine_says_the_same_of_the_same_codes() -> None:
    source = (Path(__file__).parents[3] / "engine/core/src/error.rs").read_text("utf-8")
    codes = dict(re.findall(r'^    (\w+) "(\w+)" \d+ ', source, re.MULTILINE))
    rule = source.split("pub fn is_about_offset", 1)[1].split("\n    }\n", 1)[0]
    about = {codes[name] for name in re.findall(r"ErrorCode::(\w+)", rule)}
    assert about == pipeline_read.ABOUT_OFFSETS


@pytest.mark.parametrize("code", ["shutting_down", "server_busy", "internal", "new_in_a_later_one"])
def test_nothing_else_is_taken_for_that(code: str) -> None:
    """A reader would skip records that are there."""
    with pytest.raises(errors.Unavailable, match=code) as raised:
        found(code)
    assert (raised.value.code, raised.value.retryable) == (code, True)
