"""What all commands share: the options `--url` and `--json`, the client, exit codes and complaints.

Where it sits: between `main` and the command modules.

Invariants:
- I-CLI-1  stdout carries data and nothing else; talk, progress and errors go to stderr.
- I-CLI-2  An error is `error: ...` and, if there is something to do about it, `hint: ...`.
- I-CLI-3  The exit code tells the kind of failure (see `EXIT_CODES`).
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from millstream import errors
from millstream.settings import DURABILITY_HELP

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from millstream.client.sync.client import Client

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_MISSING: Final = 3
EXIT_CONFLICT: Final = 4
EXIT_UNREACHABLE: Final = 5
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143

EXIT_CODES: Final = {
    EXIT_OK: "done",
    EXIT_FAILURE: "failed",
    EXIT_USAGE: "the command line or a setting is wrong",
    EXIT_MISSING: "the stream does not exist",
    EXIT_CONFLICT: "the stream is closed, has another configuration, its tail has moved; or a "
    "checkpoint is in use",
    EXIT_UNREACHABLE: "the server cannot be reached or is too busy; try again later",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
    EXIT_TERMINATED: "ended by SIGTERM before it was done",
}

CLASSES_HELP: Final = "\n".join(f"  {name:<11}{text}" for name, text in DURABILITY_HELP.items())
"""The classes, for the help of the commands that take one."""
COMPLETION_SECONDS: Final = 0.3
CONTENT_TYPE_NAMES: Final = {
    "json": "application/json",
    "text": "text/plain",
    "bytes": "application/octet-stream",
}
_RELATIVE = re.compile(r"^([0-9]{1,9})(ms|s|m|h|d)$")
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
F = TypeVar("F", bound="Callable[..., Any]")


@dataclass(slots=True)
class App:
    """The state of one invocation."""

    url: str | None = None
    json: bool = False

    def connect(self, timeout_seconds: float = 30.0) -> Client:
        from millstream.client.sync.client import connect
        from millstream.settings import client_url

        return connect(client_url(self.url), timeout_seconds=timeout_seconds)

    def result(self, document: dict[str, Any]) -> None:
        """Print the outcome of a command as one JSON line, if `--json` was asked for."""
        if self.json:
            click.echo(json.dumps(document, ensure_ascii=False))


def say(text: str) -> None:
    """Tell a person what happened; a script that reads stdout is not disturbed."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


def warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def exit_code(error: BaseException) -> int:
    if isinstance(error, errors.StreamNotFound | errors.StreamGone):
        return EXIT_MISSING
    if isinstance(error, errors.Conflict | errors.CheckpointBusy):
        return EXIT_CONFLICT
    if isinstance(error, errors.ConnectionFailed | errors.Unavailable | errors.RateLimited):
        return EXIT_UNREACHABLE
    usage = errors.InvalidArgument | errors.OptionInvalid | errors.SettingsError | click.UsageError
    if isinstance(error, usage):
        return EXIT_USAGE
    return EXIT_FAILURE


def complain(message: str, hint: str | None, code: str, *, as_json: bool) -> None:
    if as_json:
        document = {"error": {"code": code, "message": message, "hint": hint}}
        click.echo(json.dumps(document, ensure_ascii=False), err=True)
        return
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)


def client_options(command: F) -> F:
    """Add `--url` and `--json`, which work before and after the command's name."""
    command = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_keep_json,
        help="Print results as JSON lines.",
    )(command)
    return click.option(
        "--url",
        metavar="URL",
        expose_value=False,
        callback=_keep_url,
        help="Server to talk to.  [env MILLSTREAM_URL; default http://127.0.0.1:4437]",
    )(command)


def _keep_url(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.ensure_object(App).url = value


def _keep_json(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(App).json = True


def complete_stream(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Stream names for the shell; silent and quick, or nothing at all."""
    from click.shell_completion import CompletionItem

    from millstream.client.retry import Retry
    from millstream.client.sync.client import Client
    from millstream.settings import client_url

    app = context.find_object(App) or App()
    try:
        url = client_url(app.url)
        with Client(url, timeout_seconds=COMPLETION_SECONDS, retry=Retry(attempts=1)) as client:
            return [CompletionItem(info.path) for info in client.list(incomplete, limit=100)]
    except errors.MillstreamError:
        return []


def content_type(value: str | None) -> str | None:
    """`json`, `text` and `bytes` stand for their media types."""
    return None if value is None else CONTENT_TYPE_NAMES.get(value.lower(), value)


def since_value(text: str) -> str:
    """`5m` is five minutes ago, as milliseconds; everything else is the server's to judge."""
    match = _RELATIVE.match(text)
    if match is None:
        return text
    return str(time.time_ns() // 1_000_000 - int(match[1]) * _UNIT_MS[match[2]])


def duration_seconds(text: str) -> int:
    """`90`, `90s`, `5m`, `2h`, `1d` -> seconds."""
    match = _RELATIVE.match(text if not text.isdigit() else f"{text}s")
    if match is None or match[2] == "ms":
        raise click.BadParameter(f"`{text}` is not a duration; write it like 90s, 5m, 2h or 1d")
    return int(match[1]) * _UNIT_MS[match[2]] // 1000
