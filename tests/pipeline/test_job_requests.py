"""What a run is asked for: names and globs become options of the source, targets are told apart."""

from __future__ import annotations

import itertools
import re

import pytest

from millstream.control.subscriptions.globs import matcher
from millstream.errors import InvalidArgument
from millstream.spark.jobs import JOBS, find
from millstream.spark.jobs.job import Request, Target, check_options, glob_pattern, selection

SEGMENTS = ("a", "b", "a.b", "*", "**")
PATHS = [
    "/".join(parts)
    for size in (1, 2, 3)
    for parts in itertools.product(("a", "b", "a.b", "axb"), repeat=size)
]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_glob_means_what_it_means_for_subscriptions(size: int) -> None:
    for parts in itertools.product(SEGMENTS, repeat=size):
        glob = "/".join(parts)
        wanted = matcher(glob)
        pattern = re.compile(glob_pattern(glob))
        for path in PATHS:
            found = pattern.fullmatch(path) is not None
            assert found == wanted(path), f"{glob} -> {pattern.pattern} on {path}"


def test_a_star_inside_a_segment_stays_inside_it() -> None:
    pattern = re.compile(glob_pattern("chat-*/v1.*"))
    assert pattern.fullmatch("chat-7/v1.0")
    assert pattern.fullmatch("chat-/v1.")
    assert not pattern.fullmatch("chat-7/x/v1.0")
    assert not pattern.fullmatch("chat-7/v1x0")


def test_names_are_subscribed_to_and_globs_become_a_pattern() -> None:
    assert selection(["b", "a", "b"]) == {"subscribe": "b,a"}
    assert selection(["a.b", "c/*"]) == {"subscribePattern": r"(?:a\.b)|(?:c/[^/]+)"}
    for nothing in ([], [""], ["a", ""]):
        with pytest.raises(InvalidArgument, match="no stream"):
            selection(nothing)


def test_a_target_is_a_stream_only_with_its_prefix() -> None:
    assert Target.parse("stream:a/b") == Target(stream="a/b")
    assert Target.parse("streams") == Target(path="streams")
    for wrong in ("", "stream:"):
        with pytest.raises(InvalidArgument):
            Target.parse(wrong)


def test_options_of_a_job_are_checked() -> None:
    land = find("land")
    good = Request("u", ("s",), Target(path="p"), {"table": "delta"})
    check_options(land, good)
    assert good.option(land, "table") == "delta"
    assert good.option(land, "partition-by") == "date"
    for options in ({"tabel": "delta"}, {"table": "hudi"}):
        with pytest.raises(InvalidArgument):
            check_options(land, Request("u", ("s",), Target(path="p"), options))


def test_an_unknown_job_names_those_there_are() -> None:
    with pytest.raises(InvalidArgument) as caught:
        find("lnad")
    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in JOBS)
