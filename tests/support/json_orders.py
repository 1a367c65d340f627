"""Orders as JSON records, good and bad, and what `decode` has to make of them: a fold in plain Python, without the connector."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from typing import Any

SCHEMA = "id BIGINT NOT NULL, price DOUBLE, at TIMESTAMP, user STRUCT<name: STRING, age: INT>"
COLUMNS = ("id", "price", "at", "user_name", "user_age")
BAD = (
    lambda n: {"id": n, "price": f"{n} EUR"},
    lambda n: {"price": n / 4},
    lambda n: {"id": n, "user": {"name": "ü", "age": "old"}},
    lambda n: {"id": n, "user": {"age": 1.5, "name": {"first": "a"}}},
    lambda n: {"id": 2**70 + n},
    lambda n: [n],
    lambda _: "text",
)


def orders(count: int, seed: int, bad_share: float = 0.2) -> list[bytes]:
    """Texts of records; every kind of bad one is among them if there are enough."""
    chance = random.Random(seed)
    found: list[Any] = []
    for n in range(count):
        if chance.random() < bad_share:
            found.append(BAD[n % len(BAD)](n))
            continue
        at = datetime.fromtimestamp(1_700_000_000 + n * 977 + n / 7, UTC).isoformat()
        user = {"name": f"u{n % 5}", "age": n % 90} if n % 3 else None
        found.append(
            {"id": n, "price": n / 8 if n % 4 else None, "at": at, "user": user, "more": [n]}
        )
    return [json.dumps(record, ensure_ascii=False).encode() for record in found]


def fold(text: bytes, *, with_id: bool = True) -> dict[str, Any] | tuple[str, str | None]:
    """The flat row of a record, or the reason and the field of its letter."""
    record = json.loads(text)
    if not isinstance(record, dict):
        return "not_an_object", None
    row = {
        "id": record.get("id"),
        "price": record.get("price"),
        "at": record.get("at"),
        "user_name": (record.get("user") or {}).get("name"),
        "user_age": (record.get("user") or {}).get("age"),
    }
    if row["id"] is not None and row["id"] >= 2**63:
        return "wrong_type", "id"
    if isinstance(row["price"], str):
        return "wrong_type", "price"
    if row["user_age"] is not None and not isinstance(row["user_age"], int):
        return "wrong_type", "user.age"
    if with_id and row["id"] is None:
        return "missing", "id"
    if row["at"] is not None:
        row["at"] = datetime.fromisoformat(row["at"]).isoformat(timespec="microseconds")
    return row


def letters(texts: list[bytes]) -> list[tuple[int, str, str | None, str]]:
    """Offset, reason, field and text of every record that does not fit."""
    folded = [(n, fold(text), text) for n, text in enumerate(texts)]
    return [(n, *why, text.decode()) for n, why, text in folded if isinstance(why, tuple)]


def as_letters(found: list[bytes]) -> list[tuple[int, str, str | None, str]]:
    """The same of a stream of dead letters."""
    told = [json.loads(letter) for letter in found]
    return [(one["offset"], one["reason"], one.get("field"), one["value"]) for one in told]


def good(texts: list[bytes]) -> list[bytes]:
    """The rows of those that do, as text."""
    return [plain(row) for row in map(fold, texts) if isinstance(row, dict)]


def plain(row: dict[str, Any]) -> bytes:
    """A row as text, from a stream or a lake: times in UTC to the microsecond."""
    found = {name: row[name] for name in COLUMNS}
    at = found["at"]
    if at is not None:
        at = at if isinstance(at, datetime) else datetime.fromisoformat(at)
        found["at"] = at.astimezone(UTC).isoformat(timespec="microseconds")
    return json.dumps(found, ensure_ascii=False, sort_keys=True).encode()
