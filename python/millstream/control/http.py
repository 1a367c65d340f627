"""What every handler of the control application needs: bounded bodies, base URL, error answers.

Sits between Starlette and the handlers. Two kinds of errors leave the application: below `/v1/stream/__ds/` the
protocol's `{"error": {"code", "message"}}`, everywhere else `application/problem+json`.
"""

from __future__ import annotations

import ipaddress
import json
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.exceptions import HTTPException
from starlette.responses import Response

from millstream.control.limits import BODY_BYTES_MAX, JSON_INTEGER_CHARS_MAX, JSON_VALUES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import Message, Receive

PROTOCOL_PREFIX: Final = "/v1/stream/__ds"
RETRY_AFTER_S: Final = 1
DETAIL_MAX: Final = 1024
"""Characters that a refusal says about a request."""

_AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


# What Starlette's own refusals mean to a client.
_ROUTING: Final = {
    404: ("not_found", "the addresses of this server are listed at /-/ and in /-/openapi.json"),
    405: ("method_not_allowed", "the Allow header names the methods of this address"),
}


def to_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class ApiError(HTTPException):
    """A refusal with a stable code, rendered in the form of the place it happened in."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str = "",
        extra: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        merged = dict(headers or {})
        if status in (429, 503):
            merged.setdefault("Retry-After", str(RETRY_AFTER_S))
        if len(message) > DETAIL_MAX:  # what a client has sent may be named in it
            message = f"{message[:DETAIL_MAX]} ..."
        super().__init__(status, message, merged)
        self.code = code
        self.hint = hint
        self.extra = dict(extra or {})


async def render_error(request: Request, error: Exception) -> Response:
    """The exception handler of the application, for refusals and for routing failures."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    if isinstance(error, ApiError):
        code, hint, extra = error.code, error.hint, error.extra
    else:
        code, hint, extra = (*_ROUTING.get(status, ("bad_request", "")), {})
    headers = dict(error.headers or {})
    if is_protocol(request):
        if not isinstance(error, ApiError):
            code = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}.get(status, "INVALID_REQUEST")
        body: dict[str, object] = {"code": code, "message": error.detail, **extra}
        return JsonResponse({"error": body}, status, headers)
    problem: dict[str, object] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": error.detail,
        "hint": hint,
    }
    return JsonResponse({**problem, **extra}, status, headers, "application/problem+json")


async def render_failure(request: Request, error: Exception) -> Response:
    """Anything unforeseen: logged by the server with its trace, told to the client without it."""
    del error
    return await render_error(request, ApiError(500, "internal", "the control plane failed"))


def is_protocol(request: Request) -> bool:
    path: str = request.scope["path"]
    return path == PROTOCOL_PREFIX or path.startswith(PROTOCOL_PREFIX + "/")


async def read_whole_body(receive: Receive) -> Receive | None:
    """Takes the body in, within bounds, and gives back a `receive` that tells it again; `None` if the client has left.

    All of it is read before anything is answered: an answer to a half-read request is lost when the
    connection closes behind it.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            raise ApiError(
                413,
                "payload_too_large",
                f"the body exceeds {BODY_BYTES_MAX} bytes",
                "split the request into several",
            )
        more = message.get("more_body", False)
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return replay


async def read_json_object(request: Request) -> dict[str, Any]:
    """The request's JSON object; an empty body counts as an empty object.

    Everybody else waits while a body is parsed, on whatever thread, so only what takes milliseconds is begun.
    """
    body = await request.body()
    code = "INVALID_REQUEST" if is_protocol(request) else "bad_request"
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        if _has_too_many_values(text):
            raise ApiError(
                400,
                code,
                f"the body has more than {JSON_VALUES_MAX} values",
                "split the request into several",
            )
        value = json.loads(text, parse_int=_integer) if body else {}
    except (ValueError, RecursionError) as error:
        raise ApiError(400, code, "the body is not valid JSON") from error
    if not isinstance(value, dict):
        raise ApiError(400, code, "the body must be a JSON object")
    return value


def _has_too_many_values(text: str) -> bool:
    """Whether a JSON text has more values than are parsed: each stands behind one of three characters."""
    if _count_marks(text) <= JSON_VALUES_MAX:
        return False
    # The names of streams may have such characters, too. What is valid has at most two strings behind each mark that
    # counts; with more quotes there is nothing to be looked at.
    bare = text.replace(r"\\", "").replace(r"\"", "")
    if bare.count('"') > 4 * (JSON_VALUES_MAX + 1):
        return True
    return _count_marks("".join(bare.split('"')[::2])) > JSON_VALUES_MAX


def _count_marks(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _integer(text: str) -> int:
    """A whole number. Making one takes the square of its length, and no field has a long one."""
    if len(text) > JSON_INTEGER_CHARS_MAX:
        raise ValueError("too long for an integer")
    return int(text)


def base_url(request: Request, bound_host: str, public_url: str | None) -> str:
    """Scheme and host under which the client reached this server.

    `public_url` wins if it is set. Forwarded headers are believed only on a loopback bind, where nobody but a
    proxy on this machine can have sent them.
    """
    if public_url:
        return public_url.rstrip("/")
    headers = request.headers
    host = headers.get("host", "")
    scheme = "http"
    if is_loopback(bound_host):
        host = headers.get("x-forwarded-host", host).partition(",")[0].strip()
        forwarded = headers.get("x-forwarded-proto", scheme).partition(",")[0].strip().lower()
        scheme = forwarded if forwarded in ("http", "https") else scheme
    if not _AUTHORITY.fullmatch(host):
        raise ApiError(400, "INVALID_REQUEST", "the Host header does not name a host")
    return f"{scheme}://{host.lower()}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
