"""The description of the control plane's HTTP interface, served at `/-/openapi.json`.

Made from the application's own routes (path, methods, the handler's first sentence) and the schemas below; a test
compares both ways, so neither a route nor a description can be missing.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from millstream.control import limits
from millstream.control.http import PROTOCOL_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_FLAG: Schema = {"type": "boolean"}


def _object(required: Sequence[str] = (), **properties: Schema) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return schema


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


_STREAM = _object(
    ("path", "content_type", "tail", "closed", "durability", "incarnation"),
    path=_TEXT,
    content_type=_TEXT,
    tail=_TEXT,
    closed=_FLAG,
    durability=_TEXT,
    incarnation=_TEXT,
    records=_INTEGER,
    bytes=_INTEGER,
    created_at={**_INTEGER, "description": "milliseconds since 1970"},
    ttl_seconds=_or_null(_INTEGER),
    expires_at={**_or_null(_INTEGER), "description": "milliseconds since 1970"},
    forked_from=_or_null(_TEXT),
)
_LINK = _object(path=_TEXT, link_type={"enum": ["explicit", "glob"]}, acked_offset=_TEXT)
_WORK = _object(**_LINK["properties"], tail_offset=_TEXT, has_pending=_FLAG)
_CONFIG = _object(
    ("type",),
    type={"enum": ["webhook", "pull-wake"]},
    pattern=_TEXT,
    streams=_array(_TEXT),
    webhook=_object(("url",), url=_TEXT),
    wake_stream=_TEXT,
    lease_ttl_ms={
        **_INTEGER,
        "minimum": limits.LEASE_TTL_MS_MIN,
        "maximum": limits.LEASE_TTL_MS_MAX,
        "default": limits.LEASE_TTL_MS_DEFAULT,
    },
    description=_TEXT,
)
_SUBSCRIPTION = _object(
    **{
        **_CONFIG["properties"],
        "id": _TEXT,
        "subscription_id": _TEXT,
        "streams": _array(_LINK),
        "created_at": _TEXT,
        "status": {"enum": ["active", "failed"]},
        "next_attempt_at": _TEXT,
        "last_error": _TEXT,
        "streams_total": {
            **_INTEGER,
            "description": "how many there are, if more than are listed:"
            f" at most {limits.VIEW_STREAMS_MAX}, and 6 MiB of them",
        },
    }
)
_WAKE = _object(
    ("wake_id", "generation"),
    wake_id=_TEXT,
    generation=_INTEGER,
    acks=_array(_object(("stream", "offset"), stream=_TEXT, offset=_TEXT)),
    done=_FLAG,
)
_ACCEPTED = _object(ok=_FLAG, next_wake=_FLAG)
_CLAIM = _object(
    wake_id=_TEXT,
    generation=_INTEGER,
    token=_TEXT,
    streams=_array(_WORK),
    lease_ttl_ms=_INTEGER,
)

_BACKUP = _object(
    ("id", "to", "state", "phase", "bytes_done", "bytes_total", "started_at"),
    id=_TEXT,
    to=_TEXT,
    state={"enum": ["running", "done", "failed", "cancelled"]},
    phase=_TEXT,
    bytes_done=_INTEGER,
    bytes_total={**_INTEGER, "description": "0 until it is known"},
    started_at={**_INTEGER, "description": "milliseconds since 1970"},
    ended_at={**_or_null(_INTEGER), "description": "milliseconds since 1970"},
    summary=_or_null(
        _object(
            commit_number=_INTEGER,
            checkpoint=_INTEGER,
            taken_at={**_INTEGER, "description": "milliseconds since 1970"},
            streams=_INTEGER,
            files=_INTEGER,
            bytes=_INTEGER,
            damaged=_INTEGER,
            damage=_array(_TEXT),
        )
    ),
    error=_or_null(_object(code=_TEXT, detail=_TEXT)),
)
_FINDING = _object(
    ("severity", "file", "what"),
    severity={"enum": ["error", "note"]},
    file=_TEXT,
    byte=_or_null(_INTEGER),
    stream=_or_null(_TEXT),
    what=_TEXT,
)
_REPORT = _object(
    ("errors", "notes", "findings"),
    errors=_INTEGER,
    notes=_INTEGER,
    beyond_repair=_FLAG,
    streams=_INTEGER,
    stream_bytes=_INTEGER,
    appends=_INTEGER,
    log_files=_INTEGER,
    frames=_INTEGER,
    packs=_INTEGER,
    findings=_array(_FINDING),
    repair={"type": "null"},
)
_VERIFICATION = _object(
    ("state", "bytes_done", "bytes_total"),
    state={"enum": ["idle", "running", "done", "failed", "cancelled"]},
    bytes_done=_INTEGER,
    bytes_total=_INTEGER,
    started_at={**_or_null(_INTEGER), "description": "milliseconds since 1970"},
    ended_at={**_or_null(_INTEGER), "description": "milliseconds since 1970"},
    report=_or_null(_REPORT),
    error=_or_null(_object(code=_TEXT, detail=_TEXT)),
)

_SUBSCRIPTION_PATH = PROTOCOL_PREFIX + "/subscriptions/{id}"

# (method, path) -> (request body, {status: response body})
OPERATIONS: dict[tuple[str, str], tuple[Schema | None, dict[int, Schema | None]]] = {
    ("GET", "/-/"): (None, {200: None}),
    ("GET", "/-/openapi.json"): (None, {200: {"type": "object"}}),
    ("GET", "/-/api/streams"): (
        None,
        {200: _object(streams=_array(_STREAM), next=_or_null(_TEXT)), 400: None},
    ),
    ("GET", "/-/api/streams/{path}"): (None, {200: _STREAM, 404: None}),
    ("PATCH", "/-/api/streams/{path}"): (
        _object(("durability",), durability=_TEXT),
        {200: _STREAM, 400: None, 404: None, 501: None},
    ),
    ("POST", "/-/api/backups"): (
        _object(("to",), to=_TEXT, rate_mib_per_second={"type": "number"}, allow_damage=_FLAG),
        {202: _BACKUP, 400: None, 403: None, 409: None},
    ),
    ("GET", "/-/api/backups/{id}"): (None, {200: _BACKUP, 404: None}),
    ("DELETE", "/-/api/backups/{id}"): (None, {200: _BACKUP, 202: _BACKUP, 404: None}),
    ("POST", "/-/api/verify"): (None, {202: _VERIFICATION, 409: None}),
    ("GET", "/-/api/verify"): (None, {200: _VERIFICATION, 400: None}),
    ("DELETE", "/-/api/verify"): (None, {200: _VERIFICATION, 202: _VERIFICATION}),
    ("GET", PROTOCOL_PREFIX + "/jwks.json"): (
        None,
        {200: _object(keys=_array({"type": "object"}))},
    ),
    ("PUT", _SUBSCRIPTION_PATH): (
        _CONFIG,
        {200: _SUBSCRIPTION, 201: _SUBSCRIPTION, 400: None, 409: None, 429: None},
    ),
    ("GET", _SUBSCRIPTION_PATH): (None, {200: _SUBSCRIPTION, 404: None}),
    ("DELETE", _SUBSCRIPTION_PATH): (None, {204: None}),
    ("POST", _SUBSCRIPTION_PATH + "/streams"): (
        _object(("streams",), streams=_array(_TEXT)),
        {204: None, 400: None, 404: None},
    ),
    ("DELETE", _SUBSCRIPTION_PATH + "/streams/{path}"): (None, {204: None, 404: None}),
    ("POST", _SUBSCRIPTION_PATH + "/callback"): (
        _WAKE,
        {200: _ACCEPTED, 401: None, 404: None, 409: None},
    ),
    ("POST", _SUBSCRIPTION_PATH + "/claim"): (
        _object(("worker",), worker=_TEXT),
        {200: _CLAIM, 400: None, 404: None, 409: None},
    ),
    ("POST", _SUBSCRIPTION_PATH + "/ack"): (
        _WAKE,
        {200: _ACCEPTED, 401: None, 404: None, 409: None},
    ),
    ("POST", _SUBSCRIPTION_PATH + "/release"): (
        _WAKE,
        {204: None, 401: None, 404: None, 409: None},
    ),
}

_QUERY: dict[str, list[tuple[str, Schema]]] = {
    "/-/api/streams": [
        ("prefix", _TEXT),
        ("after", _TEXT),
        ("limit", {**_INTEGER, "minimum": 1, "maximum": limits.LIST_LIMIT_MAX}),
    ],
    "/-/api/backups/{id}": [("wait_ms", _INTEGER)],
    "/-/api/verify": [("wait_ms", _INTEGER)],
}


def served(routes: Sequence[BaseRoute]) -> dict[tuple[str, str], str]:
    """Every (method, path) that the routes answer, with the first line of the handler's text."""
    found: dict[tuple[str, str], str] = {}
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                handlers = getattr(route.endpoint, "handlers", {})
                text = (handlers.get(method) or route.endpoint).__doc__ or ""
                found[method, path] = text.strip().partition("\n")[0]
    return found


def document(routes: Sequence[BaseRoute]) -> Schema:
    paths: dict[str, Schema] = {}
    for (method, path), summary in served(routes).items():
        body, responses = OPERATIONS[method, path]
        operation: Schema = {
            "summary": summary,
            "parameters": _parameters(path),
            "responses": {
                str(status): _response(status, schema, path) for status, schema in responses.items()
            },
        }
        if body is not None:
            operation["requestBody"] = {"content": {"application/json": {"schema": body}}}
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millstream control plane", "version": _version()},
        "paths": paths,
    }


def _parameters(path: str) -> list[Schema]:
    named = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    return named + [
        {"name": name, "in": "query", "schema": schema} for name, schema in _QUERY.get(path, [])
    ]


def _response(status: int, schema: Schema | None, path: str) -> Schema:
    if status >= 400:
        problem = _object(code=_TEXT, title=_TEXT, detail=_TEXT, hint=_TEXT)
        if path.startswith(PROTOCOL_PREFIX):
            problem = _object(error=_object(code=_TEXT, message=_TEXT))
            return {"description": "refused", "content": {"application/json": {"schema": problem}}}
        return {
            "description": "refused",
            "content": {"application/problem+json": {"schema": problem}},
        }
    if schema is None:
        return {"description": "done" if status == 204 else "a page"}
    return {"description": "done", "content": {"application/json": {"schema": schema}}}


def _version() -> str:
    try:
        return version("millstream")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0"
