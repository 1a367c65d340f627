"""Changes of the state protocol as records, and what `materialise` has to make of them: a fold in plain Python."""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa

from support.spark_jobs import Sum, checksum

VALUES = (lambda n: {"n": n, "ü": [n, None]}, str, lambda n: n, lambda n: f'"{n}"', lambda _: None)
"""A string that spells a number is not that number."""
State = dict[tuple[str, str], tuple[int, Any]]
"""Offset and value of the last change of each key."""


def changes(count: int, seed: int) -> list[dict[str, Any]]:
    """Changes of every kind; a reset now and then ends what was before it."""
    chance = random.Random(seed)
    found: list[dict[str, Any]] = []
    for n in range(count):
        if n % 290 == 40:
            found.append({"headers": {"control": "reset"}})
            continue
        if n % 97 == 5:
            found.append({"headers": {"control": "snapshot-start", "offset": "x"}})
            continue
        operation = chance.choice(["insert", "update", "upsert", "delete"])
        found.append(
            {
                "type": chance.choice(["user", "order"]),
                "key": f"k{chance.randrange(60)}",
                **({} if operation == "delete" else {"value": VALUES[n % len(VALUES)](n)}),
                "headers": {"operation": operation, "timestamp": "2026-01-01T00:00:00Z"},
            }
        )
    return found


def fold(sent: list[dict[str, Any]]) -> State:
    state: State = {}
    for offset, change in enumerate(sent):
        if change["headers"].get("control") == "reset":
            state.clear()
        if "control" in change["headers"]:
            continue
        key = (change["type"], change["key"])
        state.pop(key, None)
        if change["headers"]["operation"] != "delete":
            state[key] = (offset, change["value"])
    return state


def as_sum(state: State) -> Sum:
    return checksum(json.dumps(entry).encode() for entry in sorted(state.items()))


def state_of(table: pa.Table) -> State:
    return {
        (row["type"], row["key"]): (row["offset"], json.loads(row["value"]))
        for row in table.to_pylist()
    }


def without_offsets(state: State) -> State:
    return {key: (0, value) for key, (_, value) in state.items()}


def snapshots(records: list[bytes]) -> list[State]:
    """What a reader of a stream of snapshots has at the end of each; the offsets are not those of the changes."""
    found = [json.loads(text) for text in records]
    assert found.count({"headers": {"control": "reset"}}) == sum(map(_is_end, found))
    return [without_offsets(fold(found[:n])) for n, one in enumerate(found, 1) if _is_end(one)]


def _is_end(change: dict[str, Any]) -> bool:
    return bool(change["headers"].get("control") == "snapshot-end")
