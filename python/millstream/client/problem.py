"""From a refused response to the one exception that says what happened.

Where it sits: called by the operations and the producers with every status that is no success.
A Millstream server names the reason by a code in an `application/problem+json` body:

    {"code":"stream_closed","title":"stream is closed","detail":"...","hint":"...","status":409}

Other servers of the protocol send free text, and HEAD never has a body; then the status and the
protocol's headers decide.

Invariant I-PRB-1: every response maps to exactly one exception, whatever its body holds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from millstream import errors
from millstream.errors import MillstreamError, ServerError

if TYPE_CHECKING:
    from millstream.client.http import Request, Response

_BY_STATUS: Final[dict[int, str]] = {
    400: "bad_request",
    401: "unauthorized",
    403: "producer_fenced",
    404: "stream_not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    410: "stream_gone",
    412: "precondition_failed",
    413: "payload_too_large",
    414: "uri_too_long",
    417: "expectation_failed",
    429: "rate_limited",
    431: "head_too_large",
    501: "not_implemented",
    502: "control_unavailable",
    503: "server_busy",
    504: "control_timeout",
    505: "version_not_supported",
    507: "storage_full",
}

_HINTS: Final[dict[str, str]] = {
    "stream_not_found": "create it first, or check the path with `millstream stream list`",
    "stream_closed": "a closed stream can be read but not written; append to another one",
    "stream_conflict": "look at it with `millstream stream info`; choose another path or remove it",
    "content_type_mismatch": "append records of the type that the stream was created with",
    "producer_fenced": "give each running producer its own id",
    "unauthorized": "send the credentials that the proxy in front of the server asks for",
    "forbidden": "these credentials, or this address, may not do that; ask who runs the server",
    "storage_full": "free disk space on the server; appends work again by themselves",
    "precondition_failed": "read up to `error.tail`, decide again, then append with that offset",
}


def error_from_response(request: Request, response: Response, path: str) -> MillstreamError:
    """Build the exception for a refused request about stream `path` (or the server if empty)."""
    problem = _problem(response)
    named = problem.get("code")
    known = isinstance(named, str) and named in errors.CODES
    code = str(named) if known else _code_from_status(request, response)
    kind = errors.CODES.get(code, ServerError)
    title = _text(problem.get("title"))
    detail = _text(problem.get("detail"))
    # Our own hint speaks the caller's language; the server's speaks HTTP.
    hint = _HINTS.get(code) or _text(problem.get("hint"))
    message = _message(code, title, detail, response, path)
    if not issubclass(kind, ServerError):
        return kind(message, hint=hint, code=code)
    error = kind(
        message,
        code=code,
        status=response.status,
        title=title,
        detail=detail,
        hint=hint,
        retry_after_seconds=retry_after_seconds(response),
        tail=response.headers.get("stream-next-offset"),
    )
    if isinstance(error, errors.ProducerGap):
        error.expected_seq = header_integer(response, "producer-expected-seq")
    elif isinstance(error, errors.ProducerFenced):
        error.current_epoch = header_integer(response, "producer-epoch")
    return error


def retry_after_seconds(response: Response) -> float | None:
    """`Retry-After` in its seconds form; a date or junk counts as absent."""
    value = response.headers.get("retry-after", "")
    if value.isascii() and value.isdigit() and len(value) <= 9:
        return float(value)
    return None


def header_integer(response: Response, name: str) -> int | None:
    value = response.headers.get(name, "")
    if value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return None


def _code_from_status(request: Request, response: Response) -> str:
    headers = response.headers
    if response.status == 409:
        sent = {name for name, _ in request.headers}
        if headers.get("stream-closed", "").lower() == "true":
            return "stream_closed"
        if "producer-expected-seq" in headers:
            return "producer_gap"
        if request.method == "PUT":
            return "stream_conflict"
        return "sequence_conflict" if "Stream-Seq" in sent else "content_type_mismatch"
    if response.status == 403 and "producer-epoch" not in headers:
        return "forbidden"
    if response.status == 404 and "/v1/stream/" not in request.target:
        return "not_found"
    code = _BY_STATUS.get(response.status)
    if code is None:
        code = "internal" if response.status >= 500 else "bad_request"
    return code


def _problem(response: Response) -> dict[str, Any]:
    if "json" not in response.headers.get("content-type", ""):
        return {}
    try:
        document = json.loads(response.body)
    except (ValueError, RecursionError):
        return {}
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        inner = document["error"]
        return {"code": inner.get("code"), "detail": inner.get("message")}
    return document if isinstance(document, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _message(
    code: str, title: str | None, detail: str | None, response: Response, path: str
) -> str:
    """The server's detail; else a sentence that names the stream; else whatever there is."""
    if detail and detail != title:
        return detail
    sentence = _sentence(code, path)
    if sentence or title:
        return sentence or title or ""
    text = response.body[:200].decode("utf-8", "replace").strip()
    return f"the server answered {response.status}" + (f": {text}" if text else "")


def _sentence(code: str, path: str) -> str | None:
    subject = f"stream `{path}`" if path else "the server"
    return {
        "stream_not_found": f"{subject} does not exist",
        "stream_gone": f"{subject} was deleted, or no longer keeps this offset",
        "stream_closed": f"{subject} is closed",
        "stream_conflict": f"{subject} exists with a different configuration",
        "content_type_mismatch": f"{subject} holds records of another type",
        "sequence_conflict": f"{subject} has already seen this or a later `seq`",
        "producer_fenced": f"another producer with this id has taken over {subject}",
        "producer_gap": f"{subject} is missing an earlier request of this producer",
        "precondition_failed": f"the tail of {subject} has moved",
        "unauthorized": "the server, or a proxy in front of it, refused the credentials (401)",
        "forbidden": "the server, or a proxy in front of it, refused the request (403)",
        "payload_too_large": "the request is larger than the server allows",
    }.get(code)
