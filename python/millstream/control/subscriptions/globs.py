"""What a glob says about where its matches can be: bounds a listing to what can match at all.

Sits below `manager`. Which names a glob matches is the engine's matter alone (`_engine.matching`, `Engine.globs_of`):
`*` is exactly one segment, `**` is zero or more, everything else is literal.
"""

from __future__ import annotations

ANY_SEGMENT = "*"
ANY_DEPTH = "**"


def literal_prefix(pattern: str) -> str:
    """The longest text that every match starts with.

    `a/**` also matches `a` itself, so the slash before a `**` is not part of the prefix.
    """
    literal: list[str] = []
    for segment in pattern.split("/"):
        if segment == ANY_SEGMENT:
            return "".join(part + "/" for part in literal)
        if segment == ANY_DEPTH:
            return "/".join(literal)
        literal.append(segment)
    return pattern


def cover(prefixes: set[str]) -> list[str]:
    """The fewest prefixes that cover all given ones, in order."""
    kept: list[str] = []
    for prefix in sorted(prefixes):
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return kept
