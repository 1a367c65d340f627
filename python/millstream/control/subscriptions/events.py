"""The events a subscription's history is made of, and their form in the journal.

Sits between `machine` (which emits and folds them) and `journal` (which keeps them). Invariant: events say
what happened, with every time, id and random choice in them, so folding them again gives the same state.

Form: one JSON object per event, `{"kind": "acked", "id": "orders", "acks": [["a/b", "0000..._0042"]]}`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

Pair = tuple[str, str]
LinkRow = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class Created:
    kind: ClassVar[str] = "created"
    id: str
    uid: str
    config: dict[str, Any]
    base_url: str
    at_ms: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Rebased:
    """The client now reaches the server under another address; later callback URLs use it."""

    kind: ClassVar[str] = "rebased"
    id: str
    base_url: str


@dataclass(frozen=True, slots=True)
class Deleted:
    kind: ClassVar[str] = "deleted"
    id: str


@dataclass(frozen=True, slots=True)
class Linked:
    """Rows of (path, acked offset, explicit). A known path keeps its offset and may become explicit."""

    kind: ClassVar[str] = "linked"
    id: str
    links: tuple[LinkRow, ...]


@dataclass(frozen=True, slots=True)
class Unlinked:
    kind: ClassVar[str] = "unlinked"
    id: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Relabelled:
    """The explicit link is gone, the glob link to the same stream stays with its offset."""

    kind: ClassVar[str] = "relabelled"
    id: str
    path: str


@dataclass(frozen=True, slots=True)
class Woke:
    kind: ClassVar[str] = "woke"
    id: str
    wake_id: str
    generation: int
    trigger: str
    snapshot: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """The wake reached its receiver; `lease_until_ms` is None while a pull wake waits for a claim."""

    kind: ClassVar[str] = "sent"
    id: str
    wake_id: str
    lease_until_ms: int | None


@dataclass(frozen=True, slots=True)
class SendFailed:
    kind: ClassVar[str] = "send_failed"
    id: str
    wake_id: str
    attempt: int
    next_attempt_at_ms: int
    error: str


@dataclass(frozen=True, slots=True)
class Claimed:
    kind: ClassVar[str] = "claimed"
    id: str
    wake_id: str
    holder: str
    lease_until_ms: int


@dataclass(frozen=True, slots=True)
class Extended:
    kind: ClassVar[str] = "extended"
    id: str
    wake_id: str
    lease_until_ms: int


@dataclass(frozen=True, slots=True)
class Acked:
    kind: ClassVar[str] = "acked"
    id: str
    acks: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The wake is over: done, released, expired, or empty (nothing it was about is left)."""

    kind: ClassVar[str] = "finished"
    id: str
    wake_id: str
    reason: str


Event = (
    Created
    | Rebased
    | Deleted
    | Linked
    | Unlinked
    | Relabelled
    | Woke
    | Sent
    | SendFailed
    | Claimed
    | Extended
    | Acked
    | Finished
)

_TYPES: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        Created,
        Rebased,
        Deleted,
        Linked,
        Unlinked,
        Relabelled,
        Woke,
        Sent,
        SendFailed,
        Claimed,
        Extended,
        Acked,
        Finished,
    )
}


def encode(event: Event) -> dict[str, object]:
    row: dict[str, object] = {"kind": event.kind}
    for field in fields(event):
        row[field.name] = getattr(event, field.name)
    return row


def decode(row: Mapping[str, Any]) -> Event:
    """The event of a journal row; `ValueError` if the row is none of ours."""
    values = {name: _frozen(value) for name, value in row.items() if name != "kind"}
    try:
        return _TYPES[row["kind"]](**values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a subscription event: {str(row)[:200]}") from error


def _frozen(value: Any) -> Any:
    """Lists, and lists of lists: no event has more."""
    if not isinstance(value, list):
        return value
    return tuple([tuple(item) if isinstance(item, list) else item for item in value])
