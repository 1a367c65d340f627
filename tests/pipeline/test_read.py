"""`POST /v1/read`: rows are exactly the records of the ranges, wherever their bytes lie.

Every case that can be is run against a model: the list of records as they were appended. Places change between
cases (memory, files, both), never what is read.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from support.classes import as_class
from support.http import Api, request_bytes
from support.pipeline import ALL_COLUMNS, Pipeline
from support.server import Server

JSON = "application/json"
BYTES = "application/octet-stream"


@pytest.fixture
def pipeline(api: Api) -> Pipeline:
    return Pipeline(api)


@pytest.fixture
def shared_pipeline(shared: Api) -> Pipeline:
    return Pipeline(shared)


def until(api: Api, name: str, reached: Callable[[int], bool]) -> None:
    """Waits for a metric."""
    deadline = time.monotonic() + 10
    while not reached(seen := api.metric(name)):
        assert time.monotonic() < deadline, f"{name} stays at {seen}"
        time.sleep(0.01)


class Model:
    """A stream as a list of records, kept beside the real one."""

    def __init__(self, api: Api, path: str, content_type: str, **headers: str) -> None:
        self.api, self.path, self.content_type = api, path, content_type
        answer = api.put(path, b"", content_type, headers)
        assert answer.status == 201, answer.body
        self.offset = answer.offset
        self.values: list[bytes] = []
        self.positions: list[str] = []

    def append(self, records: list[Any]) -> None:
        if self.content_type == JSON:
            texts = [json.dumps(record).encode() for record in records]
            body = b"[" + b" , ".join(texts) + b"]"
        else:
            texts = [b"".join(json.dumps(record).encode() for record in records)]
            body = texts[0]
        answer = self.api.post(self.path, body, self.content_type)
        deadline = time.monotonic() + 30
        while answer.status == 503 and time.monotonic() < deadline:
            # Ephemeral bytes are on their way to disk: the answer asks to try again shortly.
            answer = self.api.post(self.path, body, self.content_type)
        assert answer.status == 204, answer.body
        self.values += texts
        self.positions += [self.offset] * len(texts)
        self.offset = answer.offset


TRICKY = [
    {"text": 'a,"]}\\', "n": [1, {"x": None}]},
    'plain, with [brackets] and \\ " quotes',
    -1.5e300,
    None,
    True,
    [],
    {},
    [[[]], {"": ""}],
    "ünï☃😀",
    [1, 2, 3],
]


def fork_of(source: str, offset: str | None = None) -> dict[str, str]:
    place = {} if offset is None else {"Stream-Fork-Offset": offset}
    return {"Stream-Forked-From": Api.target(source), **place}


def fill(model: Model, rng: random.Random, appends: int) -> None:
    for _ in range(appends):
        count = rng.choice([1, 1, 1, 2, 7, 60])
        model.append([rng.choice(TRICKY) for _ in range(count)])


def check_whole(pipeline: Pipeline, model: Model, **options: Any) -> None:
    read = pipeline.read(pipeline.whole(model.path), columns=ALL_COLUMNS, key_path="n", **options)
    assert read.column("value") == model.values
    assert read.column("offset") == list(range(len(model.values)))
    assert read.column("position") == model.positions
    assert set(read.column("stream")) == {model.path}
    assert read.column("epoch") == [int(position[:16]) for position in model.positions]
    assert read.gaps == []


def check_ranges(pipeline: Pipeline, model: Model, rng: random.Random, count: int) -> None:
    total = len(model.values)
    cuts = [sorted((rng.randint(0, total), rng.randint(0, total))) for _ in range(count)]
    check_cuts(pipeline, model, cuts, (rng.randint(500, 5000), 1 << 20))
    # One record per window, over a few appends.
    first = rng.randint(0, total)
    check_cuts(pipeline, model, [[first, min(first + 30, total)]], (1,))


def check_cuts(
    pipeline: Pipeline, model: Model, cuts: list[list[int]], sizes: tuple[int, ...]
) -> None:
    ranges = [pipeline.records(model.path, first, behind) for first, behind in cuts]
    expected = [number for first, behind in cuts for number in range(first, behind)]
    for max_bytes in sizes:
        read = pipeline.read(ranges, columns=["value", "offset"], max_bytes=max_bytes)
        assert read.column("offset") == expected
        assert read.column("value") == [model.values[number] for number in expected]


@pytest.mark.parametrize("content_type", [JSON, BYTES])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_the_records_in_memory_in_files_and_in_both(
    server: Server, api: Api, pipeline: Pipeline, path: str, content_type: str, seed: int
) -> None:
    rng = random.Random(f"{seed}{content_type}")
    model = Model(api, path, content_type)
    fill(model, rng, 40)
    check_whole(pipeline, model)
    check_ranges(pipeline, model, rng, 4)
    server.restart()  # an orderly stop writes everything to files
    check_whole(pipeline, model)
    check_whole(pipeline, model, max_bytes=7777)
    check_ranges(pipeline, model, rng, 4)
    fill(model, rng, 40)
    check_whole(pipeline, model)
    check_ranges(pipeline, model, rng, 4)


@pytest.mark.parametrize("name", ["ephemeral", "memory", "disk"])
def test_every_class_is_read(shared: Api, path: str, name: str) -> None:
    model = Model(shared, path, JSON, **as_class(name))
    fill(model, random.Random(name), 20)
    check_whole(Pipeline(shared), model)


def test_large_streams_pass_through_checkpoints_and_spills(
    start_server: Callable[..., Server],
) -> None:
    settings = {"checkpoint_bytes": "256KiB", "ephemeral_bytes_max": "256KiB"}
    api = Api(start_server(settings=settings))
    rng = random.Random(7)
    for name in ("fsync", "ephemeral"):
        model = Model(api, f"large/{name}", JSON, **as_class(name))
        for number in range(60):
            text = "".join(rng.choices("abc,[]{}", k=3000))
            model.append([{"id": number, "n": 1, "text": text}] * 10)
        if name == "fsync":
            until(api, "millstream_checkpoints_total", lambda count: count > 0)
        else:
            until(api, "millstream_ephemeral_spilled_bytes_total", lambda count: count > 0)
        check_whole(Pipeline(api), model)
        check_whole(Pipeline(api), model, max_bytes=100_000)
        check_ranges(Pipeline(api), model, rng, 3)


def test_a_reader_keeps_up_with_a_writer_while_bytes_move(
    start_server: Callable[..., Server],
) -> None:
    """Follows by cursor and reads what is new, while checkpoints take the bytes away from under it."""
    api = Api(start_server(settings={"checkpoint_bytes": "64KiB"}))
    pipeline = Pipeline(api)
    model = Model(api, "followed", JSON)
    seen: list[bytes] = []
    numbers: list[int] = []

    def write() -> None:
        rng = random.Random(5)
        for _ in range(150):
            model.append([rng.choice(TRICKY) for _ in range(rng.choice([1, 1, 5, 200]))])
        assert api.close_stream("followed").status == 204

    writer = threading.Thread(target=write)
    writer.start()
    told = pipeline.tails(streams=["followed"])
    place, closed = told["streams"][0]["first"], False
    deadline = time.monotonic() + 60
    while not closed:
        assert time.monotonic() < deadline
        for stream in told["streams"]:
            read = pipeline.read(
                [{"stream": "followed", "from": place, "to": stream["tail"]}], max_bytes=10_000
            )
            assert read.gaps == []
            seen += read.column("value")
            numbers += read.column("offset")
            place, closed = stream["tail"], stream["closed"]
        told = pipeline.tails(streams=["followed"], cursor=told["cursor"], wait_ms=5000)
    writer.join(30)
    assert seen == model.values
    assert numbers == list(range(len(seen)))
    until(api, "millstream_checkpoints_total", lambda count: count > 0)


def test_columns_and_their_types(shared_pipeline: Pipeline, shared: Api, path: str) -> None:
    shared.put(path, b"", JSON)
    shared.post(path, b'[{"user":{"id":"a\\u00e4"}},{"user":{"id":[1, 2]}},{"user":1},5]', JSON)
    before = shared_pipeline.tail(path)["time_ms"]
    read = shared_pipeline.window(
        shared_pipeline.whole(path), columns=ALL_COLUMNS[::-1], key_path="user.id"
    )
    types = {field.name: str(field.type) for field in read.table.schema}
    assert list(types) == ALL_COLUMNS[::-1]
    assert types == {
        "stream": "string",
        "offset": "int64",
        "timestamp": "timestamp[us, tz=UTC]",
        "value": "binary",
        "position": "string",
        "epoch": "int64",
        "key": "binary",
    }
    assert read.column("key") == ["aä".encode(), b"[1, 2]", None, None]
    stamps = read.table.column("timestamp").cast(pa.int64()).to_pylist()
    assert stamps == [before * 1000] * 4
    default = shared_pipeline.window(shared_pipeline.whole(path))
    assert default.table.column_names == ["stream", "offset", "timestamp", "value"]


def test_byte_streams_have_no_key(shared_pipeline: Pipeline, shared: Api, path: str) -> None:
    shared.put(path, b'{"a":1}')
    read = shared_pipeline.window(
        shared_pipeline.whole(path), columns=["key", "value"], key_path="a"
    )
    assert read.table.to_pylist() == [{"key": None, "value": b'{"a":1}'}]


def test_a_window_has_a_record_however_large(
    shared_pipeline: Pipeline, shared: Api, path: str
) -> None:
    shared.put(path)
    bodies = [b"x" * 300_000, b"y", b"z" * 300_000]
    for body in bodies:
        shared.post(path, body)
    windows = list(shared_pipeline.windows(shared_pipeline.whole(path), max_bytes=1000))
    assert [window.column("value") for window in windows] == [[body] for body in bodies]


def test_batches_are_bounded_also_inside_one_append(
    shared_pipeline: Pipeline, shared: Api, path: str
) -> None:
    shared.put(path, b"", JSON)
    shared.post(path, b"[" + b",".join(b"%d" % number for number in range(150_000)) + b"]", JSON)
    read = shared_pipeline.window(shared_pipeline.whole(path), columns=["value", "offset"])
    assert read.next is None
    sizes = [batch.num_rows for batch in read.table.to_batches()]
    assert sizes == [65_536, 65_536, 150_000 - 2 * 65_536]
    assert read.column("value")[::9999] == [b"%d" % number for number in range(0, 150_000, 9999)]
    assert read.column("offset") == list(range(150_000))


def test_many_ranges_share_batches(shared_pipeline: Pipeline, shared: Api, path: str) -> None:
    names = [f"{path}/{number}" for number in range(300)]
    for number, name in enumerate(names):
        shared.put(name, b"%d" % number)
    ranges = shared_pipeline.whole(*names)
    read = shared_pipeline.window(ranges)
    assert read.column("stream") == names
    assert len(read.table.to_batches()) == 1
    small = shared_pipeline.read(ranges, max_bytes=1000)
    assert small.table.equals(read.table) or small.table.to_pylist() == read.table.to_pylist()


def test_forks_read_through_to_their_sources(
    server: Server, api: Api, pipeline: Pipeline, path: str
) -> None:
    source = Model(api, path, JSON)
    fill(source, random.Random(1), 20)
    middle, known = source.offset, len(source.values)
    fill(source, random.Random(2), 5)
    fork = f"{path}-fork"
    headers = {"Stream-Forked-From": Api.target(path), "Stream-Fork-Offset": middle}
    assert api.put(fork, b"", JSON, headers).status == 201
    assert api.post(fork, b'["own",1]', JSON).status == 204
    expected = [*source.values[:known], b'"own"', b"1"]
    for _ in range(2):
        whole = pipeline.read(pipeline.whole(fork), columns=ALL_COLUMNS, key_path="a")
        assert whole.column("value") == expected
        assert whole.column("offset") == list(range(len(expected)))
        epochs = [int(middle[:16])] * known + [int(api.head(fork)["stream-incarnation"])] * 2
        assert whole.column("epoch") == epochs
        small = pipeline.read(
            pipeline.whole(fork), columns=ALL_COLUMNS, key_path="a", max_bytes=1999
        )
        assert small.table.to_pylist() == whole.table.to_pylist()
        part = pipeline.read([pipeline.records(fork, known - 2, known + 1)])
        assert part.column("value") == expected[known - 2 : known + 1]
        server.restart()


@pytest.mark.parametrize("media", [BYTES, JSON])
def test_a_fork_that_begins_with_a_part_and_a_body_has_both_as_records(
    server: Server, api: Api, pipeline: Pipeline, path: str, media: str
) -> None:
    source, fork, deep = f"{path}/source", f"{path}/fork", f"{path}/deep"
    middle = api.put(source, b"[1]", media).offset
    api.post(source, b"[2,3,4]", media)
    part = {**fork_of(source, middle), "Stream-Fork-Sub-Offset": "2"}
    assert api.put(fork, b"[5]", None, part).status == 201
    assert api.put(deep, b"", None, fork_of(fork)).status == 201
    expected = [b"1", b"2", b"3", b"5"] if media == JSON else [b"[1]", b"[2", b"[5]"]
    for _ in range(2):
        for name in (fork, deep):
            for max_bytes in (1, 1 << 20):
                read = pipeline.read(
                    pipeline.whole(name), columns=["value", "offset"], max_bytes=max_bytes
                )
                assert read.column("value") == expected
                assert read.column("offset") == list(range(len(expected)))
            assert api.get(name, tail="1").body == b"[5]"
        server.crash_and_restart()


def test_an_empty_range_has_no_rows(shared_pipeline: Pipeline, shared: Api, path: str) -> None:
    shared.put(path, b"", JSON)
    assert shared_pipeline.window(shared_pipeline.whole(path)).table.num_rows == 0
    shared.post(path, b"[1,2,3]", JSON)
    place = shared_pipeline.place(path, number=1)
    empty = shared_pipeline.window([{"stream": path, "from": place, "to": place}])
    assert (empty.table.num_rows, empty.next, empty.gaps) == (0, None, [])
    assert shared_pipeline.window([]).table.num_rows == 0


def test_pipelined_behind_an_append_it_sees_it(shared: Api, path: str) -> None:
    shared.put(path)
    question = json.dumps({"streams": [path]}).encode()
    target = Api.target(path)
    with shared.connect() as connection:
        requests = b""
        for _ in range(5):
            requests += request_bytes("POST", target, {"Content-Type": "text/plain"}, b"x")
            requests += request_bytes("POST", "/v1/tails", None, question, chunked=True)
        connection.send(requests)
        for count in range(1, 6):
            assert connection.read_response().status == 204
            told = connection.read_response().json()
            assert told["streams"][0]["tail"]["number"] == count


def test_a_client_that_leaves_or_dawdles_harms_nobody(
    server: Server, api: Api, pipeline: Pipeline, path: str
) -> None:
    api.put(path)
    for _ in range(8):
        api.post(path, b"x" * 4_000_000)
    body = json.dumps({"ranges": pipeline.whole(path), "max_bytes": 1 << 25}).encode()
    head = b"POST /v1/read HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    with server.connect() as gone, server.connect() as slow:
        gone.send(head + body)
        gone.abort()
        slow.send(head + body)
        answer = slow.read_head()
        assert api.metric("millstream_pipeline_answer_bytes") > 0
        assert api.post(path, b"y").status == 204
        assert sum(len(piece) for piece in slow.body_pieces(answer)) > 32_000_000
    until(api, "millstream_pipeline_answer_bytes", lambda left: left == 0)


# --- what is refused --------------------------------------------------------------------------


def test_streams_that_are_not_what_was_meant(
    shared_pipeline: Pipeline, shared: Api, path: str
) -> None:
    shared.put(path, b"old")
    (known,) = shared_pipeline.whole(path)
    shared.delete(path)
    answer = shared_pipeline.post("/v1/read", {"ranges": [known]})
    assert (answer.status, answer.code) == (404, "stream_not_found")
    assert path in answer.json()["detail"]
    shared.put(path, b"new")
    answer = shared_pipeline.post("/v1/read", {"ranges": [known]})
    assert (answer.status, answer.code) == (409, "stream_recreated")


def test_an_error_behind_rows_comes_with_the_next_request(
    shared_pipeline: Pipeline, shared: Api, path: str
) -> None:
    shared.put(path, b"good")
    shared.put(f"{path}-gone", b"bad")
    ranges = shared_pipeline.whole(path, f"{path}-gone")
    shared.delete(f"{path}-gone")
    window = shared_pipeline.window(ranges)
    assert window.column("value") == [b"good"]
    assert window.next == (1, ranges[1]["from"])
    answer = shared_pipeline.post("/v1/read", {"ranges": ranges[1:]})
    assert (answer.status, answer.code) == (404, "stream_not_found")


def bad_requests() -> list[tuple[Any, str]]:
    good: dict[str, Any] = {
        "stream": "s",
        "from": {"offset": "-1", "number": 0},
        "to": {"offset": "-1", "number": 0},
    }
    place = good["from"]
    return [
        (b"", "bad_request"),
        (b"{", "bad_request"),
        (b"[]", "bad_request"),
        (b"\xff", "bad_request"),
        ({}, "bad_request"),
        ({"ranges": 1}, "bad_request"),
        ({"ranges": [1]}, "bad_request"),
        ({"ranges": [{}]}, "bad_request"),
        ({"ranges": [{**good, "surprise": 1}]}, "bad_request"),
        ({"ranges": [good], "surprise": 1}, "bad_request"),
        ({"ranges": [{**good, "from": {"offset": "-1"}}]}, "bad_request"),
        ({"ranges": [{**good, "from": {**place, "number": -1}}]}, "bad_request"),
        ({"ranges": [{**good, "from": {**place, "number": 1.5}}]}, "bad_request"),
        ({"ranges": [{**good, "from": {**place, "offset": "now"}}]}, "offset_invalid"),
        ({"ranges": [{**good, "from": {**place, "offset": "1_2"}}]}, "offset_invalid"),
        ({"ranges": [{**good, "from": {**place, "offset": 7}}]}, "bad_request"),
        ({"ranges": [{**good, "incarnation": "x"}]}, "bad_request"),
        ({"ranges": [{**good, "stream": "__ds/x"}]}, "bad_request"),
        ({"ranges": [good], "columns": []}, "bad_request"),
        ({"ranges": [good], "columns": ["values"]}, "bad_request"),
        ({"ranges": [good], "columns": ["value", "value"]}, "bad_request"),
        ({"ranges": [good], "columns": ["key"]}, "bad_request"),
        ({"ranges": [good], "columns": ["key"], "key_path": "a..b"}, "bad_request"),
        ({"ranges": [good], "max_bytes": 0}, "bad_request"),
        ({"ranges": [good], "max_bytes": (64 << 20) + 1}, "bad_request"),
        ({"ranges": [good] * 20_001}, "bad_request"),
        ({"ranges": [good]}, "stream_not_found"),
    ]


@pytest.mark.parametrize("number", range(len(bad_requests())))
def test_bad_requests_are_told_apart(shared_pipeline: Pipeline, number: int) -> None:
    body, code = bad_requests()[number]
    answer = shared_pipeline.post("/v1/read", body)
    assert answer.code == code, answer.body
    assert answer.status == (404 if code == "stream_not_found" else 400)
    assert answer.get("access-control-allow-origin") is None


def test_places_that_a_stream_does_not_have(
    shared_pipeline: Pipeline, shared: Api, path: str
) -> None:
    shared.put(path, b"", JSON)
    shared.post(path, b"[10,20,30]", JSON)
    shared.post(path, b"40", JSON)
    tail = shared_pipeline.tail(path)
    epoch = tail["tail"]["offset"][:16]
    first, second = tail["first"], shared_pipeline.place(path, number=3)

    def refused(begin: dict[str, Any], end: dict[str, Any]) -> str:
        ranges = [{"stream": path, "from": begin, "to": end}]
        answer = shared_pipeline.post("/v1/read", {"ranges": ranges})
        assert answer.status == 400, answer.body
        return answer.code

    inside = {"offset": f"{epoch}_{4:016}", "number": 1}
    beyond = {"offset": f"{epoch}_{400:016}", "number": 9}
    future = {"offset": f"{int(epoch) + 1:016}_{0:016}", "number": 0}
    assert refused(inside, tail["tail"]) == "offset_invalid"
    assert refused(first, inside) == "offset_invalid"
    assert refused(first, beyond) == "offset_beyond_tail"
    assert refused(future, tail["tail"]) == "offset_invalid"
    assert refused({**first, "number": 4}, tail["tail"]) == "offset_invalid"
    assert refused({**second, "number": 2}, tail["tail"]) == "offset_invalid"
    assert refused(second, {**second, "number": 5}) == "offset_invalid"
    assert refused(second, first) == "bad_request"
    # What there is comes first, the error with the request that begins there.
    window = shared_pipeline.window(
        [{"stream": path, "from": first, "to": {**second, "number": 5}}]
    )
    assert (window.column("value"), window.next) == ([b"10", b"20", b"30"], (0, second))


def test_other_methods_and_large_bodies(shared: Api) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = shared.call(method, "/v1/read")
        assert (answer.status, answer.get("allow")) == (405, "POST"), method
        assert answer.get("access-control-allow-origin") is None
    answer = shared.call("POST", "/v1/read", {"Content-Length": str((8 << 20) + 1)}, b"")
    assert (answer.status, answer.code) == (413, "payload_too_large")
