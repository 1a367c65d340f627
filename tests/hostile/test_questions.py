"""Large questions take no more than they bring, and what is wrong with them is told in a few words."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from support.http import Api, request_bytes
from support.pipeline import Pipeline
from support.server import Server
from support.staging import rows_body

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}
ASKED_BYTES = 8 * MIB - 4096
# DEL, which is written in eight characters where it is shown.
NAME = "\x7f" * ASKED_BYTES
PLACE = {"offset": "-1", "number": 0}
LONG = [
    ("/v1/tails", {"streams": [f"__ds/{NAME}"]}),
    ("/v1/tails", {"streams": [{"name": "a", "incarnation": NAME}]}),
    ("/v1/tails", {"streams": NAME}),
    ("/v1/tails", {NAME: 1}),
    ("/v1/read", {"ranges": [{"stream": f"__ds/{NAME}", "from": PLACE, "to": PLACE}]}),
    ("/v1/read", {"ranges": [{"stream": NAME, "from": PLACE, "to": PLACE}]}),
    ("/v1/read", {"ranges": [], "columns": [NAME]}),
    ("/v1/commit", {"producer": "p", "epoch": 0, "stages": [{"id": NAME, "checksum": "x"}]}),
    ("/v1/commit", {"producer": "p", "epoch": 0, "stages": [{"id": NAME, "checksum": "0" * 8}]}),
    ("/v1/commit", {"producer": "p", "epoch": 0, "stages": NAME}),
]
LISTS = [
    ("/v1/tails", '{"streams":[', '"",', '""]}'),
    ("/v1/tails", '{"streams":[{"name":"a","at":[', '{"byte":1},', '{"byte":1}]}]}'),
    ("/v1/tails", '{"streams":[{"name":"a","at":[', '{"offset":"-1"},', '{"byte":1}]}]}'),
    ("/v1/read", '{"ranges":[],"columns":[', '"value",', '"value"]}'),
    ("/v1/commit", '{"producer":"p","epoch":0,"stages":[],"streams":[', '"",', '""]}'),
]


@pytest.mark.parametrize("number", range(len(LONG)))
def test_a_refusal_names_no_more_of_a_request_than_a_person_reads(api: Api, number: int) -> None:
    target, question = LONG[number]
    body = json.dumps(question, ensure_ascii=False).encode()
    answer = api.call("POST", target, {"Content-Type": "application/json"}, body)
    assert 400 <= answer.status < 500
    assert answer.json()["code"]
    assert len(answer.body) < 8192


def test_a_refused_row_names_no_more_of_its_stream_than_a_person_reads(api: Api) -> None:
    body = rows_body([("n" * ASKED_BYTES, b"x")])
    answer = api.call("PUT", "/v1/stage/long", None, body)
    assert 400 <= answer.status < 500
    assert len(answer.body) < 8192


@pytest.mark.parametrize("number", range(len(LISTS)))
def test_a_list_that_is_too_long_takes_no_memory(
    start_server: Callable[..., Server], number: int
) -> None:
    server = start_server()
    api = Api(server)
    target, begin, entry, end = LISTS[number]
    body = (begin + entry * ((ASKED_BYTES - 200) // len(entry)) + end).encode()
    before = server.rss_bytes()
    answer = api.call("POST", target, {"Content-Type": "application/json"}, body)
    assert 400 <= answer.status < 500
    # The body itself is there twice while it is received.
    assert server.peak_rss_bytes() - before < 4 * len(body)


def test_a_small_question_does_not_wait_behind_large_ones(
    start_server: Callable[..., Server],
) -> None:
    api = Api(start_server(), deadline_s=60)
    assert api.put("small", b"x").status == 201
    places = [{"byte": 0}] * 100_000
    large = json.dumps({"streams": [{"name": "small", "at": places}]}).encode()
    small = json.dumps({"streams": ["small"]}).encode()
    with ExitStack() as stack:
        asking = [stack.enter_context(api.connect()) for _ in range(60)]
        for connection in asking:
            connection.send(request_bytes("POST", "/v1/tails", None, large))
        api.wait_until_metric("millstream_pipeline_queue", lambda waiting: waiting > 40)
        assert api.call("POST", "/v1/tails", None, small).status == 200
        assert api.metric("millstream_pipeline_queue") > 20, "it had to wait for them"
        for connection in asking:
            assert connection.read_response().status in (200, 503)


def test_a_small_read_does_not_wait_for_reads_inside_large_appends(
    start_server: Callable[..., Server],
) -> None:
    """Between two records of one append no bytes lie by their offsets, and of where a range ends inside one nothing tells."""
    api = Api(start_server(), deadline_s=60)
    pipeline = Pipeline(api)
    for name, records in (("one", 1_000_000), ("other", 1_000_000), ("few", 3)):
        assert api.put(name, headers=JSON).status == 201
        for count in (1, records):
            array = b"[" + b",".join([b"1234567"] * count) + b"]"
            assert api.post(name, array, headers=JSON).status == 204
    small = {"ranges": [pipeline.records("few", 0, 4)]}

    # By turns, so that neither is still at hand.
    inside = [pipeline.records(name, 999_998, 999_999) for name in ("one", "other")] * 12
    costly = json.dumps({"ranges": inside, "columns": ["offset"]}).encode()
    with ExitStack() as stack:
        reading = [stack.enter_context(api.connect()) for _ in range(60)]
        for connection in reading:
            connection.send(request_bytes("POST", "/v1/read", None, costly))
        api.wait_until_metric("millstream_pipeline_queue", lambda waiting: waiting > 40)
        assert pipeline.post("/v1/read", small).status == 200
        assert api.metric("millstream_pipeline_queue") > 20, "it had to wait for them"

    # Small by all that these say: they look through one large append, and then it is others' turn.
    up_to = [pipeline.records(name, 0, 2) for name in ("one", "other")] * 12
    window = pipeline.window(up_to, columns=["offset"])
    assert window.next is not None
    assert window.next[0] == 1
    assert pipeline.read(up_to, columns=["offset"]).column("offset") == [0, 1] * 24
