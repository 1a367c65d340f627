"""The command line without a server: help that teaches, flags from the table, usage errors."""

from __future__ import annotations

import time

import click
import pytest

from millstream import errors
from millstream.cli import context
from millstream.cli.main import cli, main
from millstream.cli.serve import option_for, serve
from millstream.settings import TABLE, Kind


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.delenv("MILLSTREAM_CONFIG", raising=False)


def test_every_setting_of_the_server_is_a_flag_with_help() -> None:
    flags = {flag for parameter in serve.params for flag in parameter.opts}
    text = serve.get_help(click.Context(serve, info_name="serve"))
    for row in TABLE:
        assert (row.flag in flags) == row.serve, row.name
        assert (f"{row.flag} " in text or f"{row.flag}\n" in text) == row.serve, row.name
    assert "--config" in flags
    assert option_for(next(row for row in TABLE if row.kind is Kind.FLAG)).is_flag


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve"],
        ["append"],
        ["read"],
        ["tail"],
        ["stream"],
        ["stream", "create"],
        ["completion"],
    ],
)
def test_help_teaches(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: millstream" in shown
    if arguments != ["stream"]:
        assert "millstream " in shown.partition("Options")[2] + shown.partition("\n\n")[2]


def test_the_root_help_has_the_quick_start_and_the_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for text in ("millstream serve", "append hello", "tail hello", *context.EXIT_CODES.values()):
        assert text in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("millstream ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "no such command 'nonsense'"),
        (["read"], "missing argument 'STREAM'"),
        (["read", "a", "--tail", "-1"], "-1 is not in the range"),
        (["read", "a", "--tail", "1", "--from", "x"], "only one of"),
        (["append", "a", "x", "--file", "f"], "either DATA or --file"),
        (["append", "a", "-", "--if-match", "x"], "--if-match"),
        (["append", "", "x"], "path is empty"),
        (["stream", "create", "a", "--ttl", "soon"], "not a duration"),
        (["stream", "create", "a", "--ttl", "1s", "--expires-at", "x"], "not both"),
        (["serve", "--port", "x"], "bad value `x` for --port"),
        (["serve", "--host", "0.0.0.0"], "refusing to listen"),
        (["serve", "--inflight-bytes-max", "1MiB"], "could never arrive"),
        (["serve", "--durability", "paper"], "'paper' is not one of"),
        (["serve", "--config", "missing.toml"], "cannot read settings file"),
        (["read", "a", "--url", "ftp://x"], "bad server URL"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_wrong(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert words in shown.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.StreamNotFound("x"), 3),
        (errors.StreamGone("x"), 3),
        (errors.StreamClosed("x"), 4),
        (errors.PreconditionFailed("x"), 4),
        (errors.ConnectionFailed("x"), 5),
        (errors.RequestTimeout("x"), 5),
        (errors.Unavailable("x"), 5),
        (errors.SettingsError("x"), 2),
        (errors.InvalidArgument("x"), 2),
        (errors.OutcomeUnknown("x"), 1),
        (errors.ServerError("x"), 1),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert context.exit_code(error) == code


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_MILLSTREAM_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_completion_of_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_MILLSTREAM_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "millstream stream ")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert main([]) == 0
    found = {line.partition(",")[2] for line in capsys.readouterr().out.split()}
    assert found == {"create", "list", "info", "set", "close", "remove"}


def test_times_of_day_and_durations() -> None:
    now_ms = time.time() * 1000
    assert abs(int(context.since_value("5m")) - (now_ms - 300_000)) < 5000
    assert context.since_value("2026-01-01T00:00:00Z") == "2026-01-01T00:00:00Z"
    assert [context.duration_seconds(text) for text in ("90", "90s", "5m", "2h", "1d")] == [
        90,
        90,
        300,
        7200,
        86400,
    ]


def test_commands_stand_in_the_order_of_need() -> None:
    context_ = click.Context(cli)
    assert cli.list_commands(context_)[:4] == ["serve", "append", "read", "tail"]
