"""Globs against a plain recursive definition of what they mean."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.control.subscriptions import globs

SEGMENT = st.sampled_from(["a", "b", "ab", "*x"])
PATH = st.lists(SEGMENT, min_size=1, max_size=6).map("/".join)
PATTERN = st.lists(st.one_of(SEGMENT, st.sampled_from(["*", "**"])), min_size=1, max_size=6).map(
    "/".join
)


def means(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(means(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and pattern[0] in ("*", path[0]) and means(pattern[1:], path[1:])


@given(PATTERN, PATH)
def test_a_matcher_follows_the_definition(pattern: str, path: str) -> None:
    assert globs.matcher(pattern)(path) == means(pattern.split("/"), path.split("/"))


@given(st.lists(PATTERN, max_size=8), st.sets(st.integers(0, 7)), PATH)
def test_an_index_finds_exactly_the_owners_that_were_not_removed(
    patterns: list[str], removed: set[int], path: str
) -> None:
    index = globs.GlobIndex()
    for number, pattern in enumerate(patterns):
        index.add(pattern, str(number))
    for number, pattern in enumerate(patterns):
        if number in removed:
            index.remove(pattern, str(number))
    kept = {str(n): p for n, p in enumerate(patterns) if n not in removed}
    expected = {owner for owner, p in kept.items() if means(p.split("/"), path.split("/"))}
    assert index.find(path) == expected
    assert sorted(index.patterns()) == sorted(set(kept.values()))


@given(PATTERN, PATH)
def test_every_match_starts_with_the_literal_prefix(pattern: str, path: str) -> None:
    if globs.matcher(pattern)(path):
        assert path.startswith(globs.literal_prefix(pattern))


def test_many_double_stars_cost_no_more_than_a_walk() -> None:
    pattern = "/".join(["**", "a"] * 30)
    assert not globs.matcher(pattern)("/".join(["a"] * 500 + ["b"]))


def test_cover_keeps_the_shortest_prefixes() -> None:
    assert globs.cover({"a/", "a/b/", "b/", "bc"}) == ["a/", "b/", "bc"]
    assert globs.cover({"", "x/"}) == [""]
