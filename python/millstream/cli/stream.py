"""`millstream stream create|list|info|set|close|remove`: what exists, and its configuration.

Where it sits: a thin layer over `Client` and `Stream`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from millstream import errors
from millstream.cli import render
from millstream.cli.context import (
    CLASSES_HELP,
    App,
    client_options,
    complete_stream,
    content_type,
    duration_seconds,
    say,
)
from millstream.settings import DURABILITY_CLASSES
from millstream.types import StreamInfo


@click.group()
@client_options
def stream() -> None:
    """Create, list, inspect, change, close and remove streams."""


@stream.command(
    epilog=f"""\b
Durability:
{CLASSES_HELP}

\b
Examples:
  millstream stream create chat/42
  millstream stream create shop/orders --content-type json
  millstream stream create scratch --ttl 1h --durability memory
  millstream stream create chat/42-b --fork-from chat/42
"""
)
@click.argument("path")
@click.option(
    "--content-type",
    "type_name",
    metavar="TYPE",
    help="`json`, `text`, `bytes` or a media type.  [default text; a fork inherits]",
)
@click.option(
    "--ttl", metavar="TIME", help="Remove it when unused for this long, e.g. 90s, 2h, 7d."
)
@click.option(
    "--expires-at", metavar="TIME", help="Remove it at this time, e.g. 2030-01-01T00:00:00Z."
)
@click.option(
    "--durability",
    type=click.Choice(DURABILITY_CLASSES),
    help="Class of the stream, see below.  [default the server's]",
)
@click.option("--fork-from", metavar="STREAM", help="Share the records of this stream.")
@click.option("--fork-offset", metavar="OFFSET", help="Share them up to here.  [default its tail]")
@click.option("--fork-sub-offset", type=int, help="Bytes or JSON records past the fork offset.")
@click.option("--closed", is_flag=True, help="Create it closed.")
@client_options
@click.pass_obj
def create(
    app: App,
    path: str,
    type_name: str | None,
    ttl: str | None,
    expires_at: str | None,
    durability: str | None,
    fork_from: str | None,
    fork_offset: str | None,
    fork_sub_offset: int | None,
    closed: bool,
) -> None:
    """Create a stream; it is fine if it exists with the same configuration."""
    chosen = content_type(type_name)
    if chosen is None and fork_from is None:
        chosen = "text/plain"
    with app.connect() as client:
        made = client.create(
            path,
            content_type=chosen,
            ttl_seconds=None if ttl is None else duration_seconds(ttl),
            expires_at=expires_at,
            durability=durability,
            forked_from=fork_from,
            fork_offset=fork_offset,
            fork_sub_offset=fork_sub_offset,
            closed=closed,
        )
        if app.json:
            app.result({"created": made.created, **_document(made.info())})
        else:
            verb = "created" if made.created else "exists already:"
            say(f"{verb} stream `{made.path}` ({made.content_type})")


@stream.command(name="list")
@click.argument("prefix", default="", shell_complete=complete_stream)
@click.option("--limit", type=click.IntRange(min=1), help="Show at most this many.")
@client_options
@click.pass_obj
def list_streams(app: App, prefix: str, limit: int | None) -> None:
    """List streams, all or those whose path starts with PREFIX."""
    with app.connect() as client:
        rows = client.list(prefix, limit=limit)
        if app.json:
            for info in rows:
                app.result(_document(info))
        else:
            render.print_streams(rows, sys.stdout)


@stream.command()
@click.argument("path", shell_complete=complete_stream)
@client_options
@click.pass_obj
def info(app: App, path: str) -> None:
    """Describe one stream."""
    with app.connect() as client:
        found = client.stream(path).info()
        try:
            listed = next(client.list(found.path, limit=1), None)
        except errors.NotSupported:
            listed = None
        if listed is not None and listed.path == found.path:
            known = {name: value for name, value in asdict(found).items() if value is not None}
            found = StreamInfo(**{**asdict(listed), **known})
    if app.json:
        app.result(_document(found))
    else:
        render.print_info(found, sys.stdout)


@stream.command(
    name="set",
    epilog=f"""\b
Durability:
{CLASSES_HELP}

Records keep at least what they were promised. A stronger class covers the old records too.

\b
Examples:
  millstream stream set metrics/cpu --durability memory
  millstream stream set shop/orders --durability fsync
""",
)
@click.argument("path", shell_complete=complete_stream)
@click.option(
    "--durability",
    type=click.Choice(DURABILITY_CLASSES),
    required=True,
    help="Its durability class from now on.",
)
@client_options
@click.pass_obj
def set_stream(app: App, path: str, durability: str) -> None:
    """Change the durability class of a stream, while it is used."""
    with app.connect() as client:
        changed = client.stream(path).set_durability(durability)
    app.result(_document(changed))
    say(f"stream `{changed.path}` has durability `{changed.durability}`")


@stream.command()
@click.argument("path", shell_complete=complete_stream)
@client_options
@click.pass_obj
def close(app: App, path: str) -> None:
    """Close a stream for ever: it stays readable, nobody can append."""
    with app.connect() as client:
        tail = client.stream(path).close()
    app.result({"path": path, "closed": True, "tail": tail})
    say(f"closed stream `{path}` at {tail}")


@stream.command()
@click.argument("path", shell_complete=complete_stream)
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@client_options
@click.pass_obj
def remove(app: App, path: str, yes: bool) -> None:
    """Remove a stream and its records.

    Asks first when it runs in a terminal.
    """
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm(f"remove stream `{path}` and all its records?", abort=True, err=True)
    with app.connect() as client:
        client.stream(path).delete()
    app.result({"path": path, "removed": True})
    say(f"removed stream `{path}`")


def _document(info: StreamInfo) -> dict[str, Any]:
    return {name: value for name, value in asdict(info).items() if value is not None}
