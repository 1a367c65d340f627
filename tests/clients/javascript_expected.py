"""What tests/js/scenario.mjs must bring back, whichever runtime it ran in."""

from __future__ import annotations

from typing import Any


def check_scenario(result: dict[str, Any]) -> None:
    assert result["catchUp"] == {
        "whole": "first sécond",
        "rest": "sécond",
        "contentType": "text/plain",
        "offsetMoves": True,
    }
    numbers = [{"n": n} for n in range(11)]
    assert result["sseJson"] == {"items": numbers, "closed": True}
    assert result["longPollJson"] == {"items": numbers, "closed": True}
    every_byte = list(range(256))
    assert result["sseBytes"] == {"items": every_byte, "closed": True}
    assert result["longPollBytes"] == {"items": every_byte, "closed": True}
    assert result["producers"] == {"errors": [], "numbers": list(range(1000)), "closed": True}
    assert result["refusals"] == {
        "missing": False,
        "conflict": 409,
        "closed": 409,
        "deleted": False,
        "deletedAgain": 404,
    }
