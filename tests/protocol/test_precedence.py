"""Which refusal wins when a request is wrong in several ways, and that a refusal changes nothing."""

from __future__ import annotations

import pytest

from support.http import Api, producer


def refused(response_of: object, status: int, code: str) -> None:
    status_seen, code_seen = response_of.status, response_of.code  # type: ignore[attr-defined]
    assert (status_seen, code_seen) == (status, code)


@pytest.fixture
def closed(shared: Api, path: str) -> str:
    shared.put(path, b"data")
    shared.post(path, b"end", headers={**producer("closer", 2, 0), "Stream-Closed": "true"})
    return path


def test_closed_beats_content_type(shared: Api, closed: str) -> None:
    answer = shared.post(closed, b"{}", "application/json")
    refused(answer, 409, "stream_closed")
    assert answer["stream-closed"] == "true"
    assert answer.offset == shared.head(closed).offset


def test_closed_beats_stream_seq_and_producer_gap(shared: Api, closed: str) -> None:
    refused(shared.post(closed, b"x", headers={"Stream-Seq": "0"}), 409, "stream_closed")
    refused(shared.post(closed, b"x", headers=producer("new", 0, 7)), 409, "stream_closed")


def test_stale_epoch_on_a_closed_stream_is_refused(shared: Api, closed: str) -> None:
    answer = shared.post(closed, b"x", headers=producer("closer", 1, 0))
    assert answer.status in (403, 409)
    assert answer.code in ("producer_fenced", "stream_closed")


def test_empty_body_beats_missing_content_type(shared: Api, path: str) -> None:
    shared.put(path)
    refused(shared.post(path, b"", None), 400, "body_empty")
    refused(shared.post(path, b"", None, producer("p", 0, 0)), 400, "body_empty")


def test_missing_content_type_beats_closed(shared: Api, closed: str) -> None:
    refused(shared.post(closed, b"x", None), 400, "content_type_missing")


def test_content_type_beats_producer_and_sequence(shared: Api, path: str) -> None:
    shared.put(path)
    shared.post(path, b"x", headers={"Stream-Seq": "5"})
    wrong = {**producer("p", 0, 9), "Stream-Seq": "1"}
    refused(shared.post(path, b"{}", "application/json", wrong), 409, "content_type_mismatch")


def test_producer_beats_stream_seq(shared: Api, path: str) -> None:
    shared.put(path)
    both = {**producer("p", 0, 0), "Stream-Seq": "a"}
    assert shared.post(path, b"x", headers=both).status == 200
    assert shared.post(path, b"x", headers=both).status == 204
    refused(
        shared.post(path, b"x", headers={**producer("p", 0, 5), "Stream-Seq": "a"}),
        409,
        "producer_gap",
    )


def test_stream_seq_beats_bad_json(shared: Api, path: str) -> None:
    shared.put(path, b"[]", "application/json")
    shared.post(path, b"1", "application/json", {"Stream-Seq": "b"})
    refused(
        shared.post(path, b"{", "application/json", {"Stream-Seq": "a"}), 409, "sequence_conflict"
    )


def test_refused_json_leaves_producer_and_sequence_alone(shared: Api, path: str) -> None:
    shared.put(path, b"[]", "application/json")
    both = {**producer("p", 0, 0), "Stream-Seq": "a"}
    refused(shared.post(path, b"{", "application/json", both), 400, "json_invalid")
    refused(shared.post(path, b"[]", "application/json", both), 400, "json_empty")
    assert shared.post(path, b"1", "application/json", both).status == 200
    assert shared.get(path).body == b"[1]"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Producer-Id": "p"}, "producer_invalid"),
        ({"Producer-Id": "p", "Producer-Epoch": "0"}, "producer_invalid"),
        ({"Producer-Epoch": "0", "Producer-Seq": "0"}, "producer_invalid"),
        (producer("", 0, 0), "producer_invalid"),
        ({**producer("p", 0, 0), "Producer-Epoch": "9007199254740992"}, "producer_invalid"),
        ({**producer("p", 0, 0), "Producer-Seq": "9007199254740992"}, "producer_invalid"),
        ({**producer("p", 0, 0), "Producer-Seq": "18446744073709551616"}, "producer_invalid"),
        ({**producer("p", 0, 0), "Producer-Seq": "+1"}, "producer_invalid"),
        ({**producer("p", 0, 0), "Producer-Seq": ""}, "producer_invalid"),
    ],
)
def test_producer_header_syntax(shared: Api, path: str, headers: dict[str, str], code: str) -> None:
    shared.put(path)
    refused(shared.post(path, b"x", headers=headers), 400, code)
    assert shared.get(path).body == b""


def test_largest_producer_numbers_are_accepted(shared: Api, path: str) -> None:
    shared.put(path)
    highest = str(2**53 - 1)
    headers = {"Producer-Id": "p", "Producer-Epoch": highest, "Producer-Seq": "0"}
    assert shared.post(path, b"x", headers=headers).status == 200


def test_higher_epoch_must_start_at_zero(shared: Api, path: str) -> None:
    shared.put(path)
    shared.post(path, b"x", headers=producer("p", 0, 0))
    refused(shared.post(path, b"x", headers=producer("p", 1, 1)), 400, "producer_epoch_invalid")


def test_missing_stream_beats_everything_in_a_well_formed_request(shared: Api, path: str) -> None:
    refused(shared.post(path, b"x"), 404, "stream_not_found")
    refused(shared.close_stream(path), 404, "stream_not_found")
    refused(shared.get(path), 404, "stream_not_found")
    refused(shared.get(path, offset="now", live="long-poll"), 404, "stream_not_found")
    refused(shared.delete(path), 404, "stream_not_found")


def test_unknown_method_is_405_with_what_is_allowed(shared: Api, path: str) -> None:
    answer = shared.call("PATCH", Api.target(path))
    refused(answer, 405, "method_not_allowed")
    assert {"GET", "PUT", "POST"} <= {name.strip() for name in answer["allow"].split(",")}


def test_every_refusal_carries_the_security_headers(shared: Api, path: str) -> None:
    page = {"Origin": "https://page.example"}
    for answer in (
        shared.get(path, page),
        shared.post(path, b"x", headers=page),
        shared.call("PATCH", "/v1/stream/x", page),
        shared.get(path, page, offset="junk"),
    ):
        assert answer.status >= 400
        assert answer["x-content-type-options"] == "nosniff"
        assert answer["access-control-allow-origin"] == "*"
