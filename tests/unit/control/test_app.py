"""The control application over its private socket, on a real engine."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millstream._engine import Engine
from millstream.control import openapi
from millstream.control.app import create_app
from millstream.control.limits import BODY_BYTES_MAX
from millstream.control.subscriptions.journal import HISTORY_PREFIX
from millstream.server.control_thread import ControlFailed, ControlThread

HOST = "127.0.0.1:4437"
SUBSCRIPTIONS = "/v1/stream/__ds/subscriptions/"


@dataclass(frozen=True)
class AppSettings:
    host: str = "127.0.0.1"
    public_url: str = ""
    data_dir: str = "./millstream-data"
    backup_dir: str = ""
    webhook_allow: str = ""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The code of a protocol error."""
        return str(self.json()["error"]["code"])


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("control", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


class Control:
    """The application as the engine reaches it: one request per connection."""

    def __init__(self, path: str) -> None:
        self.path = path

    def call(self, method: str, target: str, body: Any = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = UnixConnection(self.path)
        try:
            connection.request(method, target, data, {"Host": HOST, "Connection": "close", **named})
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, fields, response.read())
        finally:
            connection.close()


StartControl = Callable[..., Control]


@pytest.fixture
def start_control(engine: Engine, tmp_path: Path) -> Iterator[StartControl]:
    started: list[tuple[ControlThread, socket.socket]] = []

    def start(settings: AppSettings | None = None) -> Control:
        path = str(tmp_path / f"c{len(started)}")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(64)
        thread = ControlThread(create_app(engine, settings or AppSettings()), listener)
        started.append((thread, listener))
        thread.start()
        return Control(path)

    yield start
    for thread, listener in started:
        thread.stop(5.0)
        listener.close()


@pytest.fixture
def control(start_control: StartControl) -> Control:
    return start_control()


@pytest.fixture(scope="module")
def shared_control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    """For tests in which everything is refused: one application with a wake stream is enough."""
    place = tmp_path_factory.mktemp("shared")
    engine = Engine({"data_dir": str(place / "data"), "listen": False})
    engine.start()
    engine.create("wake", "application/json")
    engine.create("wake/text", "text/plain")
    path = str(place / "c")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(64)
        thread = ControlThread(create_app(engine, AppSettings()), listener)
        thread.start()
        yield Control(path)
        thread.stop(5.0)
    engine.stop()


def pull(**changes: Any) -> dict[str, Any]:
    return {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wake", **changes}


# Listing.


def test_streams_are_listed_in_pages(engine: Engine, control: Control) -> None:
    for name in ("a/1", "a/2", "a/3", "b"):
        engine.create(name, "text/plain")
    first = control.call("GET", "/-/api/streams?prefix=a/&limit=2").json()
    assert [entry["path"] for entry in first["streams"]] == ["a/1", "a/2"]
    assert first["next"] == "a/2"
    second = control.call("GET", "/-/api/streams?prefix=a/&limit=2&after=a/2").json()
    assert [entry["path"] for entry in second["streams"]] == ["a/3"]
    assert second["next"] is None
    entry = control.call("GET", "/-/api/streams/a%2F1").json()
    assert (entry["path"], entry["tail"]) == ("a/1", engine.tail("a/1"))


def test_a_missing_stream_is_a_problem_with_a_hint(engine: Engine, control: Control) -> None:
    engine.create("a/b", "text/plain")
    answer = control.call("GET", "/-/api/streams/a")
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "stream_not_found"
    assert problem["hint"]


def test_reserved_streams_are_never_shown(control: Control) -> None:
    listed = control.call("GET", "/-/api/streams").json()
    assert listed == {"streams": [], "next": None}
    assert control.call("GET", "/-/api/streams?prefix=__ds/").json()["streams"] == []
    assert control.call("GET", "/-/api/streams/__ds/state/keys").status == 404


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1001", "", "9" * 40, "1.5"])
def test_a_bad_limit_is_refused(shared_control: Control, limit: str) -> None:
    answer = shared_control.call("GET", f"/-/api/streams?limit={limit}")
    assert (answer.status, answer.json()["code"]) == (400, "bad_request")


# The shape of everything else.


def test_the_description_names_exactly_the_routes(control: Control) -> None:
    document = control.call("GET", "/-/openapi.json").json()
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    assert described == set(openapi.OPERATIONS)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"].endswith("."), (method, path)
            # It is really served: anything but "no such address" and "no such method".
            target = path.replace("{id}", "no-such").replace("{path}", "no-such")
            answer = control.call(method.upper(), target, {})
            assert answer.status != 405, (method, path)
            assert not answer.body.startswith(b'{"error":{"code":"NOT_FOUND"'), (method, path)


def test_unknown_addresses_and_methods_have_the_form_of_their_place(control: Control) -> None:
    for target in ("/v1/stream/__ds", "/v1/stream/__ds/x", SUBSCRIPTIONS + "s/nope"):
        answer = control.call("GET", target)
        assert (answer.status, answer.error) == (404, "NOT_FOUND")
    answer = control.call("POST", "/v1/stream/__ds/jwks.json")
    assert (answer.status, answer.error, answer.headers["allow"]) == (
        405,
        "METHOD_NOT_ALLOWED",
        "GET",
    )
    answer = control.call("PATCH", SUBSCRIPTIONS + "s")
    assert set(answer.headers["allow"].split(", ")) == {"PUT", "GET", "DELETE"}
    assert control.call("GET", "/-/nothing").json()["code"] == "not_found"
    assert control.call("POST", "/-/").json()["code"] == "method_not_allowed"


def test_every_answer_carries_the_security_headers(control: Control) -> None:
    for target in ("/-/", "/-/nothing", "/v1/stream/__ds/jwks.json", "/v1/stream/__ds/x"):
        headers = control.call("GET", target).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers  # the listener adds it where it belongs


def test_a_damaged_history_stops_the_start_with_a_sentence(
    engine: Engine, control: Control, start_control: StartControl
) -> None:
    (history,), _ = engine.list(HISTORY_PREFIX)
    engine.append(history["path"], b'{"v":99}')
    with pytest.raises(ControlFailed, match=r"did not load: stream __ds/state/subscriptions/\d+"):
        start_control()


def test_the_landing_page_says_what_is_where(control: Control) -> None:
    answer = control.call("GET", "/-/")
    assert answer.headers["content-type"].startswith("text/html")
    assert b"/-/api/streams" in answer.body


# The address in answers.


@pytest.mark.parametrize(
    ("bound", "headers", "base"),
    [
        ("127.0.0.1", {}, f"http://{HOST}"),
        ("127.0.0.1", {"Host": "LocalHost:1"}, "http://localhost:1"),
        (
            "127.0.0.1",
            {"X_Forwarded_Proto": "https", "X_Forwarded_Host": "s.example"},
            "https://s.example",
        ),
        ("0.0.0.0", {"X_Forwarded_Proto": "https", "X_Forwarded_Host": "evil"}, f"http://{HOST}"),
        ("127.0.0.1", {"X_Forwarded_Proto": "gopher"}, f"http://{HOST}"),
    ],
)
def test_the_base_url_is_the_one_the_client_used(
    engine: Engine, start_control: StartControl, bound: str, headers: dict[str, str], base: str
) -> None:
    control = start_control(AppSettings(host=bound))
    hook = {"type": "webhook", "streams": ["x"], "webhook": {"url": "https://hooks.example/"}}
    answer = control.call("PUT", SUBSCRIPTIONS + "s", hook, **headers)
    assert answer.status == 201
    assert answer.json()["webhook"]["signing"]["jwks_url"] == base + "/v1/stream/__ds/jwks.json"


def test_a_host_that_is_none_is_refused(control: Control) -> None:
    engine_less = {
        "type": "webhook",
        "streams": ["x"],
        "webhook": {"url": "https://hooks.example/"},
    }
    answer = control.call("PUT", SUBSCRIPTIONS + "s", engine_less, Host='evil"><script>')
    assert (answer.status, answer.error) == (400, "INVALID_REQUEST")


# Bodies.


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff",
        b"[" * 100_000,
        {"type": "other", "pattern": "a"},
        {"type": "pull-wake", "wake_stream": "wake"},
        pull(pattern=7),
        pull(pattern="a/b*"),
        pull(pattern="a\n"),
        pull(pattern="/".join("a" * 100)),
        pull(pattern="__ds/**"),
        pull(streams="x"),
        pull(streams=[1]),
        pull(streams=["__ds/state/keys"]),
        pull(streams=["x" * 2000]),
        pull(streams=["\ud800"]),
        pull(streams=["wake"]),
        pull(wake_stream=""),
        pull(wake_stream="missing"),
        pull(wake_stream="wake/text"),
        pull(lease_ttl_ms=999),
        pull(lease_ttl_ms=600_001),
        pull(lease_ttl_ms=1000.5),
        pull(lease_ttl_ms="1000"),
        pull(lease_ttl_ms=True),
        pull(description=5),
        {"type": "webhook", "pattern": "a"},
        {"type": "webhook", "pattern": "a", "webhook": "http://127.0.0.1/"},
        {"type": "webhook", "pattern": "a", "webhook": {"url": 5}},
    ],
)
def test_a_bad_configuration_is_refused_whole(shared_control: Control, body: Any) -> None:
    answer = shared_control.call("PUT", SUBSCRIPTIONS + "s", body)
    assert (answer.status, answer.error) == (400, "INVALID_REQUEST")
    assert shared_control.call("GET", SUBSCRIPTIONS + "s").status == 404


def test_a_body_beyond_the_limit_is_refused(control: Control) -> None:
    fits = control.call("PUT", SUBSCRIPTIONS + "s", b" " * BODY_BYTES_MAX)
    assert fits.status == 400
    answer = control.call("PUT", SUBSCRIPTIONS + "s", b" " * (BODY_BYTES_MAX + 1))
    assert (answer.status, answer.error) == (413, "payload_too_large")


def test_a_request_that_its_sender_gave_up_is_not_performed(
    engine: Engine, control: Control
) -> None:
    engine.create("wake", "application/json")
    assert control.call("PUT", SUBSCRIPTIONS + "s", pull()).status == 201
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(control.path)
        head = f"DELETE {SUBSCRIPTIONS}s HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head.encode() + b"half")
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10.0)
        assert connection.recv(1) == b""
    assert control.call("GET", SUBSCRIPTIONS + "s").status == 200


@pytest.mark.parametrize("name", ["%0a", "x" * 257, "%ed%a0%80"])
def test_a_bad_id_is_refused(shared_control: Control, name: str) -> None:
    answer = shared_control.call("PUT", SUBSCRIPTIONS + name, pull())
    assert (answer.status, answer.error) == (400, "INVALID_REQUEST")


def test_ids_and_paths_of_any_script_work(engine: Engine, control: Control) -> None:
    engine.create("wake", "application/json")
    target = SUBSCRIPTIONS + "caf%C3%A9%20%2B"
    created = control.call("PUT", target, pull(streams=["å/ b", "/slashed/"]))
    assert created.status == 201
    assert created.json()["id"] == "café +"
    assert [link["path"] for link in created.json()["streams"]] == ["å/ b", "slashed"]
    assert control.call("DELETE", target + "/streams/%C3%A5%2F%20b").status == 204
    links = control.call("GET", target).json()["streams"]
    assert [link["path"] for link in links] == ["slashed"]


def test_tokens_come_before_bodies_and_existence_before_tokens(
    engine: Engine, control: Control
) -> None:
    engine.create("wake", "application/json")
    answer = control.call("POST", SUBSCRIPTIONS + "none/ack", b"{")
    assert (answer.status, answer.error) == (404, "SUBSCRIPTION_NOT_FOUND")
    control.call("PUT", SUBSCRIPTIONS + "s", pull())
    for authorization in ({}, {"Authorization": "Basic x"}, {"Authorization": "Bearer nonsense"}):
        for action in ("ack", "callback", "release"):
            answer = control.call("POST", f"{SUBSCRIPTIONS}s/{action}", b"{", **authorization)
            assert (answer.status, answer.error) == (401, "TOKEN_INVALID")
    for body in ({}, {"worker": ""}, {"worker": 5}, {"worker": "x" * 300}):
        answer = control.call("POST", SUBSCRIPTIONS + "s/claim", body)
        assert (answer.status, answer.error) == (400, "INVALID_REQUEST")


def test_bad_wake_requests_are_refused(engine: Engine, control: Control) -> None:
    engine.create("wake", "application/json")
    control.call("PUT", SUBSCRIPTIONS + "s", pull())
    engine.create("events/a", "text/plain")
    engine.append("events/a", b"x")
    claim = control.call("POST", SUBSCRIPTIONS + "s/claim", {"worker": "w"}).json()
    good = {"wake_id": claim["wake_id"], "generation": claim["generation"]}
    token = {"Authorization": f"Bearer {claim['token']}"}
    changes: tuple[dict[str, Any], ...] = (
        {"wake_id": 5},
        {"generation": "1"},
        {"done": "yes"},
        {"acks": {}},
        {"acks": [5]},
        {"acks": [{"stream": "events/a"}]},
        {"acks": [{"offset": "1"}]},
    )
    for change in changes:
        answer = control.call("POST", SUBSCRIPTIONS + "s/ack", {**good, **change}, **token)
        assert (answer.status, answer.error) == (400, "INVALID_REQUEST"), change
    wrong = {**good, "acks": [{"stream": "events/a", "offset": "now"}]}
    answer = control.call("POST", SUBSCRIPTIONS + "s/ack", wrong, **token)
    assert (answer.status, answer.error) == (409, "INVALID_OFFSET")
    answer = control.call("POST", SUBSCRIPTIONS + "s/ack", good, **token)
    assert answer.json() == {"ok": True, "next_wake": False}
