"""One response, one exception: by code where the server names one, by status where it does not."""

from __future__ import annotations

import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import errors
from millstream.client.http import Request, Response
from millstream.client.problem import _HINTS, error_from_response, retry_after_seconds

POST = Request("POST", "/v1/stream/a")
CODES = """bad_request, offset_invalid, offset_beyond_tail, content_type_missing,
content_type_mismatch, body_empty, json_invalid, json_empty, producer_invalid,
producer_fenced, producer_gap, producer_epoch_invalid, sequence_conflict,
stream_not_found, stream_gone, stream_closed, stream_conflict, fork_source_missing,
fork_source_gone, fork_offset_invalid, precondition_failed, payload_too_large,
head_too_large, uri_too_long, request_timeout, method_not_allowed, not_found,
too_many_connections, server_busy, shutting_down, outcome_unknown, storage_full,
durability_unavailable, durability_unknown, origin_refused, host_refused,
control_unavailable, control_timeout, version_not_supported, not_implemented,
expectation_failed, internal"""


def problem(code: str, status: int = 400, **headers: str) -> Response:
    body = {"code": code, "title": "T", "detail": "D", "hint": "H", "status": status}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    names["content-type"] = "application/problem+json"
    return Response(status, names, json.dumps(body).encode())


@pytest.mark.parametrize("code", CODES.replace("\n", " ").split(", "))
def test_every_code_of_the_server_has_its_exception(code: str) -> None:
    error = error_from_response(POST, problem(code, 499), "a")
    assert type(error) is errors.CODES[code]
    assert (error.code, str(error)) == (code, "D")
    assert error.hint == _HINTS.get(code, "H")


def test_a_stream_is_named_when_the_server_gives_only_a_title() -> None:
    body = b'{"code":"stream_not_found","title":"Stream not found"}'
    response = Response(404, {"content-type": "application/problem+json"}, body)
    assert str(error_from_response(POST, response, "a/b")) == "stream `a/b` does not exist"


def test_the_table_and_the_tree_agree() -> None:
    documented = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if kind.__module__ == errors.__name__:
            assert issubclass(kind, errors.MillstreamError)
            assert f" {name}" in documented or name == "MillstreamError", (
                f"{name} is not in the tree"
            )
            assert kind.__doc__, name


@pytest.mark.parametrize(
    ("method", "status", "headers", "kind"),
    [
        ("HEAD", 404, {}, errors.StreamNotFound),
        ("HEAD", 410, {}, errors.StreamGone),
        ("POST", 409, {"stream-closed": "TRUE"}, errors.StreamClosed),
        ("POST", 409, {"producer-expected-seq": "4"}, errors.ProducerGap),
        ("POST", 409, {}, errors.ContentTypeMismatch),
        ("PUT", 409, {}, errors.StreamConflict),
        ("POST", 403, {"producer-epoch": "9"}, errors.ProducerFenced),
        ("POST", 403, {}, errors.Forbidden),
        ("POST", 412, {}, errors.PreconditionFailed),
        ("POST", 413, {}, errors.PayloadTooLarge),
        ("POST", 429, {}, errors.RateLimited),
        ("GET", 503, {}, errors.Unavailable),
        ("POST", 507, {}, errors.InsufficientStorage),
        ("GET", 500, {}, errors.ServerError),
        ("GET", 418, {}, errors.BadRequest),
        ("GET", 302, {}, errors.BadRequest),
    ],
)
def test_servers_without_codes_are_understood_by_status(
    method: str, status: int, headers: dict[str, str], kind: type[errors.MillstreamError]
) -> None:
    response = Response(status, headers, b"some words")
    assert type(error_from_response(Request(method, "/v1/stream/a"), response, "a")) is kind


def test_an_equal_sequence_is_told_from_a_wrong_type() -> None:
    request = Request("POST", "/v1/stream/a", (("Stream-Seq", "1"),))
    assert isinstance(error_from_response(request, Response(409, {}), "a"), errors.SequenceConflict)


def test_the_facts_of_a_refusal_are_kept() -> None:
    fenced = error_from_response(POST, problem("producer_fenced", 403, producer_epoch="8"), "a")
    assert isinstance(fenced, errors.ProducerFenced)
    assert fenced.current_epoch == 8
    gap = error_from_response(POST, problem("producer_gap", 409, producer_expected_seq="3"), "a")
    assert isinstance(gap, errors.ProducerGap)
    assert gap.expected_seq == 3
    moved = error_from_response(
        POST, problem("precondition_failed", 412, stream_next_offset="7"), "a"
    )
    assert isinstance(moved, errors.PreconditionFailed)
    assert (moved.tail, moved.status) == ("7", 412)


@given(
    st.integers(300, 599),
    st.binary(max_size=60),
    st.sampled_from(["text/plain", "application/json"]),
)
def test_no_body_can_break_the_mapping(status: int, body: bytes, kind: str) -> None:
    error = error_from_response(POST, Response(status, {"content-type": kind}, body), "a")
    assert isinstance(error, errors.MillstreamError)
    assert str(error)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("", None), ("-1", None), ("Wed, 21 Oct", None), ("²", None)]
)
def test_retry_after_is_read_only_as_seconds(text: str, seconds: float | None) -> None:
    assert retry_after_seconds(Response(503, {"retry-after": text})) == seconds
