"""The durability classes as tests speak of them: headers, changes, and gaps taken apart.

Invariant: what a class promises is written here once (`SURVIVES_KILL`); tests only apply it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from support.http import Api, Response

CLASSES = ("ephemeral", "memory", "disk", "fsync")
WEAK = ("ephemeral", "memory")
SURVIVES_KILL = ("disk", "fsync")
NOT_OFFERED = {"quorum": "cluster", "object": "object store"}
"""Class -> a word of what the server must say that it needs."""
PAIRS = [(before, after) for before in CLASSES for after in CLASSES]


def as_class(name: str) -> dict[str, str]:
    return {"Stream-Durability": name}


def fork_as(source: str, name: str, offset: str | None = None) -> dict[str, str]:
    headers = {"Stream-Forked-From": Api.target(source), **as_class(name)}
    return headers if offset is None else {**headers, "Stream-Fork-Offset": offset}


def change(api: Api, path: str, document: Any) -> Response:
    """PATCH with a document, or with a class by name."""
    sent = {"durability": document} if isinstance(document, str) else document
    return api.call(
        "PATCH",
        f"/-/api/streams/{path}",
        {"Content-Type": "application/json"},
        json.dumps(sent).encode(),
    )


def set_class(api: Api, path: str, name: str) -> None:
    answer = change(api, path, name)
    assert (answer.status, answer.json()["durability"]) == (200, name), answer.body


@dataclass(frozen=True)
class Gap:
    """`Stream-Gap`, checked for its form."""

    begin: str
    end: str
    reason: str
    certain: bool

    @classmethod
    def of(cls, response: Response) -> Gap | None:
        text = response.get("stream-gap")
        if text is None:
            return None
        names = [part.partition("=")[0] for part in text.split("; ")]
        values = [part.partition("=")[2] for part in text.split("; ")]
        assert names == ["from", "to", "reason", "certain"], text
        assert values[3] in ("0", "1"), text
        return cls(values[0], values[1], values[2], values[3] == "1")

    @classmethod
    def of_control(cls, control: dict[str, Any]) -> Gap | None:
        if "streamGapFrom" not in control:
            assert not [name for name in control if name.startswith("streamGap")], control
            return None
        return cls(
            control["streamGapFrom"],
            control["streamGapTo"],
            control["streamGapReason"],
            control["streamGapCertain"],
        )


def read_through(api: Api, path: str, offset: str = "-1") -> tuple[bytes, list[Gap]]:
    """Every byte to the tail and every gap on the way."""
    body, gaps = b"", []
    for _ in range(1000):
        answer = api.get(path, offset=offset)
        assert answer.status == 200, (answer.status, answer.body)
        gap = Gap.of(answer)
        if gap is not None:
            gaps.append(gap)
        body += answer.body
        offset = answer.offset
        if answer.get("stream-up-to-date") == "true":
            return body, gaps
    raise AssertionError("the tail was never reached")
