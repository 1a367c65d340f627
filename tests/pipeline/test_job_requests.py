"""What a run is asked for: names and globs become options of the source, targets are told apart."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from millstream._engine import matching
from millstream.cli.context import App
from millstream.cli.main import cli
from millstream.cli.pipeline import tell
from millstream.errors import InvalidArgument
from millstream.spark.jobs import JOBS, find
from millstream.spark.jobs.__main__ import parser, request_of
from millstream.spark.jobs.audits.audit_report import AuditReport
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
        pattern = re.compile(glob_pattern(glob))
        found = [path for path in PATHS if pattern.fullmatch(path)]
        assert found == matching(glob, PATHS), f"{glob} -> {pattern.pattern}"


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


def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str, *flags: str) -> Request:
    """What the program on the cluster makes of the line that `submit` prints."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = ["pipeline", "submit", job, "--master", "spark://h:1", "--print", "--json", *flags]
    done = CliRunner().invoke(cli, given, obj=App())
    assert done.exit_code == 0, done.output
    command = json.loads(done.stdout)["command"]
    behind = next(n for n, word in enumerate(command) if word.endswith("run_job.py"))
    parsed = parser().parse_args(command[behind + 1 :])
    assert parsed.job == job
    return request_of(parsed)


def test_the_cluster_is_asked_for_what_the_command_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common = ("--from", "a", "--from", "b/*", "--to", "stream:t", "--checkpoint", "c")
    flags = ("--create", "--end-offset", "7", "--max-rows", "5", "--option", "tokenEnv=T")
    found = submitted(monkeypatch, tmp_path, "replay", *common, *flags, "--url", "http://h:1")
    assert found == Request(
        "http://h:1",
        ("a", "b/*"),
        Target(stream="t"),
        {"end-offset": "7", "create": "yes"},
        {"tokenEnv": "T"},
        5,
        "c",
    )


def test_every_job_is_a_command_with_its_options() -> None:
    for way in ("run", "submit"):
        for job in JOBS.values():
            shown = CliRunner().invoke(cli, ["pipeline", way, job.name, "--help"]).stdout
            for option in job.options:
                assert f"--{option.name}" in shown, (way, job.name, option.name)


def test_what_is_missing_or_set_by_the_job_is_refused() -> None:
    replay = find("replay")
    asked = Request("u", ("s",), Target(stream="t"), {"end-offset": "1"}, {"ENDINGoffsets": "2"})
    with pytest.raises(InvalidArgument, match="sets the option `ENDINGoffsets` of the source"):
        check_options(replay, asked)


def test_a_batch_job_has_no_trigger_and_says_so(tmp_path: Path) -> None:
    for job, flags in (("audit", ["--every", "5s"]), ("compact", ["--max-rows", "5"])):
        given = ["pipeline", "run", job, "--from", "s", "--to", str(tmp_path), *flags]
        done = CliRunner().invoke(cli, given, obj=App())
        assert isinstance(done.exception, InvalidArgument), done.output
        assert f"job `{job}` is done once, at once: {flags[0]} means" in done.exception.message
    land = ["pipeline", "run", "land", "--from", "s"]
    assert "Missing option '--to'" in CliRunner().invoke(cli, land, obj=App()).output


def test_a_table_is_its_own_target_on_a_cluster_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(type(find("compact")), "check", lambda *_: None)
    found = submitted(monkeypatch, tmp_path, "compact", "--from", "/data/table", "--all")
    assert (found.streams, found.target) == (("/data/table",), Target(path="/data/table"))
    assert found.options == {"all": "yes"}


def test_the_report_of_a_batch_job_is_the_output_and_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, torn = AuditReport("lake"), AuditReport("lake", files=["a\x1b.parquet"])
    assert (tell(App(), whole), tell(App(), torn), tell(App(json=True), torn)) == (0, 1, 1)
    lines = capsys.readouterr().out.splitlines()
    assert "whole" in lines
    assert "file: `a\\x1b.parquet` is missing or cannot be read" in lines
    assert json.loads(lines[-1])["files"] == torn.files
