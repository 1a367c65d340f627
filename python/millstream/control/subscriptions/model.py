"""What a subscription is: its configuration, its links, and the wake in flight.

Sits below `events` and `machine`. Nothing here does I/O or reads a clock.
Invariants: a subscription has at most one wake in flight; `generation` only grows; a link's `acked` offset
only grows while its stream lives; `pending` is exactly the links whose known tail is past `acked`. Links are kept by
`state`, together for all subscriptions: here is only what differs from one subscription to the other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

SubscriptionType = Literal["webhook", "pull-wake"]

# sending: the webhook request (or the record on the wake stream) still has to succeed.
# open: it did; a webhook's lease runs, a pull wake waits for a claim.
# claimed: a pull worker holds the lease.
WakePhase = Literal["sending", "open", "claimed"]


@dataclass(frozen=True, slots=True)
class Config:
    """What the client asked for; two equal identities are the same subscription."""

    type: SubscriptionType
    pattern: str | None
    streams: tuple[str, ...]
    webhook_url: str | None
    wake_stream: str | None
    lease_ttl_ms: int
    description: str | None

    def identity(self) -> str:
        canonical = json.dumps(
            [
                self.type,
                self.pattern,
                sorted(set(self.streams)),
                self.webhook_url,
                self.wake_stream,
                self.lease_ttl_ms,
                self.description,
            ],
            ensure_ascii=True,
            separators=(",", ":"),
        )
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True)
class Link:
    """How a subscription and a stream belong together, put together for who asks."""

    path: str
    acked: str
    explicit: bool


@dataclass(slots=True)
class Wake:
    """One wake in flight. `snapshot` maps stream to the tail that a plain "done" acknowledges."""

    wake_id: str
    generation: int
    trigger: str
    snapshot: dict[str, str]
    phase: WakePhase = "sending"
    attempt: int = 0
    next_attempt_at_ms: int | None = None
    last_error: str | None = None
    holder: str | None = None
    lease_until_ms: int | None = None


@dataclass(slots=True)
class Subscription:
    id: str
    uid: str  # unique per creation: a token of a deleted namesake never fits
    config: Config
    base_url: str
    created_at_ms: int
    generation: int = 0
    opening: bool = False  # it gets its first links: nobody knows of it yet
    linked: int = 0  # how many streams
    explicit: set[str] = field(default_factory=set)  # those that were named, not matched
    offsets: dict[str, str] = field(
        default_factory=dict
    )  # acknowledged, where not as far as others
    wake: Wake | None = None
    pending: dict[str, None] = field(default_factory=dict)  # an ordered set, oldest first

    @property
    def status(self) -> Literal["active", "failed"]:
        wake = self.wake
        retrying = wake is not None and wake.phase == "sending" and wake.attempt > 0
        return "failed" if retrying else "active"


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream as a worker or a webhook is told about it."""

    path: str
    explicit: bool
    acked: str
    tail: str
    pending: bool

    def to_json(self) -> dict[str, object]:
        return {
            "path": self.path,
            "link_type": "explicit" if self.explicit else "glob",
            "acked_offset": self.acked,
            "tail_offset": self.tail,
            "has_pending": self.pending,
        }


class Refused(Exception):  # noqa: N818
    """A command that the machine will not carry out; nothing was changed."""

    def __init__(self, status: int, code: str, message: str, **extra: object) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.extra = extra
