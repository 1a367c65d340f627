"""Request bodies of the subscription API, checked field by field.

Sits between `routes` and `manager`. Invariant: what leaves here is bounded, of the right type, and in normal
form (paths without slashes at their ends), so nothing behind it checks again.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

from millstream.control import limits
from millstream.control.subscriptions.machine import WakeRequest
from millstream.control.subscriptions.model import Config, Refused, SubscriptionType

_ID: Final = re.compile(r"[^\x00-\x1f\x7f/\ufffd]+")  # U+FFFD: it was no UTF-8
_TEXT: Final = re.compile(r"[^\x00-\x1f\x7f]+")


def invalid(message: str) -> Refused:
    return Refused(400, "INVALID_REQUEST", message)


def subscription_id(text: str) -> str:
    if len(text) > limits.SUBSCRIPTION_ID_CHARS_MAX or not _ID.fullmatch(text):
        raise invalid("a subscription id has 1 to 256 characters, no slash, no control character")
    _require_unicode(text, "the subscription id")
    return text


def stream_path(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{field} must be a string")
    path = value.strip("/")
    if not path or len(path) > limits.PATH_CHARS_MAX or not _TEXT.fullmatch(path):
        raise invalid(f"{field} must be a stream path of 1 to {limits.PATH_CHARS_MAX} characters")
    _require_unicode(path, field)
    if path == "__ds" or path.startswith("__ds/"):
        raise invalid(f"{field} names a reserved stream")
    return path


def stream_paths(value: object, field: str = "streams") -> list[str]:
    if not isinstance(value, list) or not value:
        raise invalid(f"{field} must be a non-empty array of stream paths")
    if len(value) > limits.STREAMS_PER_REQUEST_MAX:
        raise invalid(f"{field} has more than {limits.STREAMS_PER_REQUEST_MAX} entries")
    return list(dict.fromkeys(stream_path(item, f"each of {field}") for item in value))


def config(body: dict[str, Any]) -> Config:
    kind = body.get("type")
    if kind not in ("webhook", "pull-wake"):
        raise invalid('type must be "webhook" or "pull-wake"')
    pattern = _pattern(body["pattern"]) if body.get("pattern") not in (None, "") else None
    listed = body.get("streams")
    streams = stream_paths(listed) if listed not in (None, []) else []
    if pattern is None and not streams:
        raise invalid("one of pattern and streams is required")
    wake_stream = None
    if kind == "pull-wake":
        if body.get("wake_stream") in (None, ""):
            raise invalid("a pull-wake subscription needs wake_stream")
        wake_stream = stream_path(body["wake_stream"], "wake_stream")
        if wake_stream in streams:
            raise invalid("a subscription cannot follow its own wake_stream")
    return Config(
        type=cast(SubscriptionType, kind),
        pattern=pattern,
        streams=tuple(streams),
        webhook_url=_webhook_url(body) if kind == "webhook" else None,
        wake_stream=wake_stream,
        lease_ttl_ms=_lease_ttl_ms(body.get("lease_ttl_ms")),
        description=_description(body.get("description")),
    )


def worker(body: dict[str, Any]) -> str:
    name = body.get("worker")
    if not isinstance(name, str) or not 0 < len(name) <= limits.WORKER_CHARS_MAX:
        raise invalid(f"worker must be a string of 1 to {limits.WORKER_CHARS_MAX} characters")
    _require_unicode(name, "worker")
    return name


def wake_request(body: dict[str, Any], token: tuple[str, int]) -> WakeRequest:
    wake_id, generation = body.get("wake_id"), body.get("generation")
    if not isinstance(wake_id, str) or not isinstance(generation, int):
        raise invalid("wake_id must be a string and generation an integer")
    done = body.get("done", False)
    if not isinstance(done, bool):
        raise invalid("done must be true or false")
    return WakeRequest(token[0], token[1], wake_id, generation, _acks(body.get("acks")), done)


def _acks(value: object) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > limits.ACKS_PER_REQUEST_MAX:
        raise invalid(f"acks must be an array of at most {limits.ACKS_PER_REQUEST_MAX} entries")
    acks: list[tuple[str, str]] = []
    for item in value:
        if not isinstance(item, dict) or not isinstance(item.get("offset"), str):
            raise invalid("each of acks must be an object with stream and offset")
        acks.append((stream_path(item.get("stream", item.get("path")), "stream"), item["offset"]))
    return tuple(acks)


def _pattern(value: object) -> str:
    pattern = stream_path(value, "pattern")
    segments = pattern.split("/")
    if len(segments) > limits.PATTERN_SEGMENTS_MAX:
        raise invalid(f"pattern has more than {limits.PATTERN_SEGMENTS_MAX} segments")
    for segment in segments:
        if "*" in segment and segment not in ("*", "**"):
            raise invalid(f"in a pattern, * stands for a whole segment; {segment!r} mixes it")
    return pattern


def _webhook_url(body: dict[str, Any]) -> str:
    webhook = body.get("webhook")
    url = webhook.get("url") if isinstance(webhook, dict) else None
    if not isinstance(url, str) or not url:
        raise invalid("a webhook subscription needs webhook.url")
    return url


def _lease_ttl_ms(value: object) -> int:
    if value is None:
        return limits.LEASE_TTL_MS_DEFAULT
    # JSON has one kind of number: 1e3 is the integer 1000 too.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not limits.LEASE_TTL_MS_MIN <= value <= limits.LEASE_TTL_MS_MAX
    ):
        raise invalid(
            f"lease_ttl_ms must be an integer from {limits.LEASE_TTL_MS_MIN} "
            f"to {limits.LEASE_TTL_MS_MAX}"
        )
    return value


def _description(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > limits.DESCRIPTION_CHARS_MAX:
        raise invalid(
            f"description must be a string of at most {limits.DESCRIPTION_CHARS_MAX} characters"
        )
    _require_unicode(value, "description")
    return value


def _require_unicode(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(f"{field} contains half of a surrogate pair") from error
