"""Many requests in one write: answered in order, each seeing what stands before it."""

from __future__ import annotations

from support.http import Api, Closed, producer, request_bytes

TEXT = {"Content-Type": "text/plain"}


def test_get_behind_post_sees_it(shared: Api, path: str) -> None:
    target = Api.target(path)
    batch = request_bytes("PUT", target, TEXT, b"")
    for number in range(50):
        batch += request_bytes("POST", target, TEXT, b"%d," % number)
        batch += request_bytes("GET", target)
    with shared.connect() as connection:
        connection.send(batch)
        assert connection.read_response().status == 201
        expected = b""
        for number in range(50):
            expected += b"%d," % number
            assert connection.read_response().status == 204
            answer = connection.read_response()
            assert (answer.status, answer.body) == (200, expected)


def test_a_fork_behind_an_append_to_its_source_takes_it_along(shared: Api, path: str) -> None:
    shared.put(path)
    with shared.connect() as connection:
        for number in range(10):
            fork = Api.target(f"{path}/fork/{number}")
            connection.send(
                request_bytes("POST", Api.target(path), TEXT, b"%d," % number)
                + request_bytes("PUT", fork, {**TEXT, "Stream-Forked-From": path})
                + request_bytes("GET", fork)
            )
            append, created = connection.read_response(), connection.read_response()
            assert (append.status, created.status) == (204, 201)
            assert created.offset == append.offset
            expected = b"".join(b"%d," % before for before in range(number + 1))
            assert connection.read_response().body == expected


def test_two_thousand_appends_in_one_write_keep_their_order(shared: Api, path: str) -> None:
    shared.put(path)
    count = 2000
    with shared.connect() as connection:
        connection.send(
            b"".join(
                request_bytes("POST", Api.target(path), TEXT, b"%d\n" % n) for n in range(count)
            )
        )
        offsets = [connection.read_response().offset for _ in range(count)]
    assert offsets == sorted(set(offsets))
    assert shared.read_all(path) == b"".join(b"%d\n" % n for n in range(count))


def test_mixed_streams_methods_and_refusals_come_back_in_order(shared: Api, path: str) -> None:
    first, second = Api.target(f"{path}/1"), Api.target(f"{path}/2")
    steps = [
        ("PUT", first, TEXT, b"a", 201),
        ("POST", second, TEXT, b"x", 404),
        ("PUT", second, {"Content-Type": "application/json"}, b"[1]", 201),
        ("POST", first, {"Content-Type": "application/json"}, b"1", 409),
        ("POST", first, {**TEXT, **producer("p", 0, 0)}, b"b", 200),
        ("POST", first, {**TEXT, **producer("p", 0, 0)}, b"b", 204),
        ("POST", first, {**TEXT, **producer("p", 0, 5)}, b"c", 409),
        ("HEAD", first, {}, None, 200),
        ("GET", second, {}, None, 200),
        ("POST", first, {"Stream-Closed": "true"}, b"", 204),
        ("POST", first, TEXT, b"late", 409),
        ("DELETE", second, {}, None, 204),
        ("GET", second, {}, None, 404),
        ("GET", first, {}, None, 200),
        ("OPTIONS", first, {}, None, 204),
    ]
    with shared.connect() as connection:
        connection.send(b"".join(request_bytes(*step[:4]) for step in steps))
        for method, target, _, _, status in steps:
            answer = connection.read_response(head_only=method == "HEAD")
            assert answer.status == status, (method, target)
    assert shared.get(f"{path}/1").body == b"ab"


def test_requests_behind_a_long_poll_wait_for_it(shared: Api, path: str) -> None:
    tail = shared.put(path).offset
    with shared.connect() as connection:
        connection.send(
            request_bytes("GET", Api.target(path, offset=tail, live="long-poll"))
            + request_bytes("HEAD", Api.target(path))
        )
        assert connection.read_response().status == 204
        assert connection.read_response(head_only=True).status == 200


def test_connection_close_is_honoured(shared: Api, path: str) -> None:
    target = Api.target(path)
    with shared.connect() as connection:
        connection.send(
            request_bytes("PUT", target, {**TEXT, "Connection": "close"}, b"")
            + request_bytes("GET", target)
        )
        answer = connection.read_response()
        assert (answer.status, answer["connection"].lower()) == (201, "close")
        try:
            connection.read_response()
        except Closed:
            return
        raise AssertionError("a request behind Connection: close was answered")


def test_http_1_0_gets_an_answer_and_the_end(shared: Api, path: str) -> None:
    shared.put(path, b"old")
    with shared.connect() as connection:
        connection.send(f"GET {Api.target(path)} HTTP/1.0\r\n\r\n".encode())
        raw = connection.read_to_end()
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert raw.endswith(b"\r\n\r\nold")


def test_one_connection_serves_many_requests(shared: Api, path: str) -> None:
    with shared.connect() as connection:
        connection.request("PUT", Api.target(path), TEXT, b"")
        for number in range(200):
            assert connection.request("POST", Api.target(path), TEXT, b"x").status == 204
            if number % 20 == 0:
                assert connection.request("GET", Api.target(path)).body == b"x" * (number + 1)
