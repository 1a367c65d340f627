"""Stream globs: `*` is exactly one segment, `**` is zero or more, everything else is literal.

Sits below `machine`. `GlobIndex` holds the patterns of all subscriptions in one segment tree, so that
finding who wants a path costs a walk along the path, not a test per subscription; the walk keeps a set of
tree nodes and is linear in the path for any number of `**`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANY_SEGMENT = "*"
ANY_DEPTH = "**"


def split(pattern: str) -> list[str]:
    return pattern.split("/")


def literal_prefix(pattern: str) -> str:
    """The longest text that every match starts with: bounds a listing to what can match at all.

    `a/**` also matches `a` itself, so the slash before a `**` is not part of the prefix.
    """
    literal: list[str] = []
    segments = split(pattern)
    for segment in segments:
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


def matcher(pattern: str) -> Callable[[str], bool]:
    """A test of one pattern, prepared once for many paths."""
    index = GlobIndex()
    index.add(pattern, "")
    return lambda path: bool(index.find(path))


@dataclass(slots=True)
class _Node:
    literal: dict[str, _Node] = field(default_factory=dict)
    any_segment: _Node | None = None
    any_depth: _Node | None = None
    repeats: bool = False  # this node was reached through `**` and stays active on every segment
    owners: dict[str, None] = field(default_factory=dict)

    def is_bare(self) -> bool:
        return not (self.literal or self.any_segment or self.any_depth or self.owners)


class GlobIndex:
    """Patterns with their owners; `find` gives the owners of all patterns that match a path."""

    def __init__(self) -> None:
        self._root = _Node()
        self._patterns: dict[str, int] = {}

    def patterns(self) -> list[str]:
        return list(self._patterns)

    def add(self, pattern: str, owner: str) -> None:
        node = self._root
        for segment in split(pattern):
            node = _child(node, segment)
        if owner not in node.owners:
            node.owners[owner] = None
            self._patterns[pattern] = self._patterns.get(pattern, 0) + 1

    def remove(self, pattern: str, owner: str) -> None:
        walk: list[tuple[_Node, str]] = []
        node = self._root
        for segment in split(pattern):
            walk.append((node, segment))
            node = _child(node, segment)
        if owner in node.owners:
            del node.owners[owner]
            self._patterns[pattern] -= 1
            if not self._patterns[pattern]:
                del self._patterns[pattern]
        for parent, segment in reversed(walk):
            _prune(parent, segment)

    def find(self, path: str) -> set[str]:
        active = _with_depths([self._root])
        for segment in split(path):
            following: list[_Node] = []
            for node in active:
                following.extend(_step(node, segment))
            active = _with_depths(following)
            if not active:
                return set()
        return {owner for node in active for owner in node.owners}


def _step(node: _Node, segment: str) -> Iterator[_Node]:
    literal = node.literal.get(segment)
    if literal is not None:
        yield literal
    if node.any_segment is not None:
        yield node.any_segment
    if node.repeats:
        yield node


def _with_depths(nodes: list[_Node]) -> list[_Node]:
    """The nodes and all that a `**` reaches from them without using up a segment, each once."""
    seen: dict[int, _Node] = {}
    waiting = nodes
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if node.any_depth is not None:
            waiting.append(node.any_depth)
    return list(seen.values())


def _child(node: _Node, segment: str) -> _Node:
    if segment == ANY_DEPTH:
        if node.any_depth is None:
            node.any_depth = _Node(repeats=True)
        return node.any_depth
    if segment == ANY_SEGMENT:
        if node.any_segment is None:
            node.any_segment = _Node()
        return node.any_segment
    return node.literal.setdefault(segment, _Node())


def _prune(parent: _Node, segment: str) -> None:
    if segment == ANY_DEPTH:
        if parent.any_depth is not None and parent.any_depth.is_bare():
            parent.any_depth = None
    elif segment == ANY_SEGMENT:
        if parent.any_segment is not None and parent.any_segment.is_bare():
            parent.any_segment = None
    elif segment in parent.literal and parent.literal[segment].is_bare():
        del parent.literal[segment]
