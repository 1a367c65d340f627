"""A web page of another origin has no business with subscriptions, whatever a browser lets it send."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from support.http import Api, Response
from support.server import Server

EVIL = "http://evil.example"
# It never fires: nothing is ever appended below this pattern.
HOOK = {"type": "webhook", "pattern": "silent/*", "webhook": {"url": "https://93.184.216.34/hook"}}
SPELLINGS = (
    "/v1/stream/__ds/subscriptions/",
    "/v1/stream/%5f%5Fds/subscriptions/",
    "/v1/stream/__ds%2Fsubscriptions%2F",
)


@pytest.fixture
def name(path: str) -> str:
    return path.replace("/", "-")


def put(api: Api, target: str, headers: dict[str, str]) -> Response:
    return api.call(
        "PUT", target, {"Content-Type": "application/json", **headers}, json.dumps(HOOK).encode()
    )


def told_to_no_page(answer: Response) -> bool:
    return not any(name.lower().startswith("access-control-") for name, _ in answer.headers)


@pytest.mark.parametrize("root", SPELLINGS)
def test_a_preflight_below_ds_allows_nothing(shared: Api, name: str, root: str) -> None:
    asked = {
        "Origin": EVIL,
        "Access-Control-Request-Method": "PUT",
        "Access-Control-Request-Headers": "content-type",
    }
    answer = shared.call("OPTIONS", root + name, asked)
    assert told_to_no_page(answer), answer.headers
    assert (answer.status, answer.code) == (403, "origin_refused")
    streams = shared.call("OPTIONS", Api.target(name), asked)
    assert (streams.status, streams["access-control-allow-origin"]) == (204, "*")


@pytest.mark.parametrize("origin", [EVIL, "null", "http://", "http://127.0.0.1:1", "file://"])
@pytest.mark.parametrize("root", SPELLINGS)
def test_a_page_of_another_origin_makes_no_webhook(
    shared: Api, name: str, root: str, origin: str
) -> None:
    answer = put(shared, root + name, {"Origin": origin})
    assert (answer.status, answer.code) == (403, "origin_refused")
    assert told_to_no_page(answer)
    assert shared.call("GET", SPELLINGS[0] + name).status == 404


def test_a_page_of_another_origin_neither_changes_nor_reads_a_subscription(
    shared: Api, name: str
) -> None:
    target = SPELLINGS[0] + name
    assert put(shared, target, {}).status == 201
    # What a form sends without asking first: a simple content type.
    form = {"Origin": EVIL, "Content-Type": "text/plain"}
    for method, place, body in (
        ("DELETE", target, None),
        ("GET", target, None),
        ("GET", "/v1/stream/__ds/jwks.json", None),
        ("POST", target + "/streams", b'{"streams":["x"]}'),
        ("POST", target + "/claim", b'{"worker":"w"}'),
    ):
        answer = shared.call(method, place, form, body)
        assert (answer.status, answer.code) == (403, "origin_refused"), (method, place)
        assert told_to_no_page(answer)
    # An image or a script is asked for without an origin: the answer is marked as not theirs.
    plain = shared.call("GET", target)
    assert (plain.status, plain.json()["streams"]) == (200, [])
    assert told_to_no_page(plain)
    assert plain["cross-origin-resource-policy"] == "same-origin"
    assert shared.call("DELETE", target).status == 204


def test_a_name_that_was_pointed_here_is_refused_on_loopback(shared: Api, name: str) -> None:
    rebound = {"Host": "evil.example:4437", "Origin": "http://evil.example:4437"}
    answer = put(shared, SPELLINGS[0] + name, rebound)
    assert (answer.status, answer.code) == (403, "host_refused")
    assert shared.call("GET", SPELLINGS[0] + name).status == 404


def test_a_page_of_the_servers_own_origin_may(shared: Api, name: str) -> None:
    port = shared.server.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        own = {"Host": host, "Origin": f"http://{host}"}
        assert put(shared, SPELLINGS[0] + name, own).status == 201
        assert shared.call("DELETE", SPELLINGS[0] + name, own).status == 204


def test_named_origins_and_the_public_one_may(
    start_server: Callable[..., Server], name: str
) -> None:
    app, public = "https://app.example", "https://streams.example"
    server = start_server(
        settings={
            "subscription_origins": f"{app}, http://10.0.0.5:8080",
            "public_url": public + "/",
        }
    )
    api = Api(server)
    target = SPELLINGS[0] + name
    page = {"Origin": app}
    preflight = api.call("OPTIONS", target, {**page, "Access-Control-Request-Method": "PUT"})
    assert (preflight.status, preflight["access-control-allow-origin"]) == (204, "*")
    assert "PUT" in preflight["access-control-allow-methods"]
    made = put(api, target, page)
    assert (made.status, made["access-control-allow-origin"]) == (201, "*")
    wrong = api.call("POST", target + "/claim", page, b"{}")
    assert (wrong.status, wrong["access-control-allow-origin"]) == (400, "*")
    assert api.call("GET", target, {"Origin": "http://10.0.0.5:8080"}).status == 200
    # The public address, with and without a proxy that passes the host on.
    assert api.call("GET", target, {"Origin": public}).status == 200
    assert api.call("GET", target, {"Origin": public, "Host": "streams.example"}).status == 200
    for origin in (
        EVIL,
        "http://app.example",
        "https://app.example:444",
        "https://app.example.evil",
    ):
        refused = api.call("GET", target, {"Origin": origin})
        assert (refused.status, refused.code) == (403, "origin_refused"), origin
        assert told_to_no_page(refused)
    # The rest of the control plane is for pages of its own origin only.
    assert api.call("GET", "/-/api/streams", page).status == 403
    assert api.call("GET", "/-/api/streams", {"Origin": public}).status == 200
