"""Offsets as the control plane may use them: compare, recognise, and tell an empty stream.

Sits below `machine`. Offsets are `%016d_%016d` (epoch, byte position), so plain string comparison orders
them, and `-1` sorts before all of them. Invariant: a stream whose position is 0 holds no byte, whatever
its epoch says, so nothing in it can be pending.
"""

from __future__ import annotations

import re
from typing import Final

BEFORE_FIRST: Final = "-1"
ZERO: Final = "0000000000000000_0000000000000000"

_MINTED: Final = re.compile(r"[0-9]{16}_[0-9]{16}")


def is_minted(offset: str) -> bool:
    """Whether this has the form of an offset that a server gives out (never `-1` or `now`)."""
    return _MINTED.fullmatch(offset) is not None


def is_empty(tail: str) -> bool:
    """Whether a stream with this tail holds no byte."""
    return tail.endswith("_0000000000000000")


def is_pending(acked: str, tail: str) -> bool:
    """Whether a reader that has processed everything up to `acked` has something left to read."""
    return tail > acked and not is_empty(tail)
