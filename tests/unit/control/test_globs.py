"""Globs against a plain recursive definition of what they mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream._engine import Engine, matching
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


@given(PATTERN, st.lists(PATH, max_size=4))
def test_a_glob_matches_what_its_definition_says(pattern: str, paths: list[str]) -> None:
    expected = [path for path in paths if means(pattern.split("/"), path.split("/"))]
    assert matching(pattern, paths) == expected


@given(PATTERN, PATH)
def test_every_match_starts_with_the_literal_prefix(pattern: str, path: str) -> None:
    if matching(pattern, [path]):
        assert path.startswith(globs.literal_prefix(pattern))


def test_names_are_watched_as_they_are_and_globs_by_what_they_match(engine: Engine) -> None:
    engine.watch(["a/b", "c/*"], ["a/*", "**/b"])
    paths = ["a/b", "a/c", "c/d", "c/*", "x/y/b", "x"]
    found = [None if row is None else sorted(row) for row in engine.globs_of(paths)]
    assert found == [["**/b", "a/*"], ["a/*"], None, [], ["**/b"], None]
    engine.unwatch(["a/b", "c/*", "never"], ["**/b", "never/*"])
    assert engine.globs_of(paths) == [["a/*"], ["a/*"], None, None, None, None]


def test_a_glob_with_too_many_parts_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="at most 127 parts"):
        engine.watch([], ["*/" * 127 + "a"])
    assert engine.globs_of(["/".join("a" * 128)]) == [None]


def test_cover_keeps_the_shortest_prefixes() -> None:
    assert globs.cover({"a/", "a/b/", "b/", "bc"}) == ["a/", "b/", "bc"]
    assert globs.cover({"", "x/"}) == [""]
