"""`millstream tail`: the last records of a stream, then every new one as it comes.

Where it sits: over `Stream.follow_batches`. Resumes by itself and says so on stderr.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from millstream.cli import render
from millstream.cli.context import App, client_options, complete_stream, say, since_value, warn
from millstream.cli.read import warn_of_gap

if TYPE_CHECKING:
    from millstream.errors import MillstreamError
    from millstream.types import Gap

DEFAULT_COUNT = 10


@click.command(
    epilog="""\b
Examples:
  millstream tail chat/42                    the last ten records, then live
  millstream tail chat/42 -n 0               only what comes from now on
  millstream tail chat/42 --from -1          everything, then live
  millstream tail orders --json | jq .value  one JSON object per record
"""
)
@click.argument("stream", shell_complete=complete_stream)
@click.option(
    "-n",
    "--tail",
    "tail_count",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Begin with the last N records.  [default {DEFAULT_COUNT}]",
)
@click.option(
    "--from", "offset", metavar="OFFSET", help="Begin here; -1 is the start, now the end."
)
@click.option("--since", metavar="TIME", help="Begin at a time: RFC 3339, ms, or 5m, 2h, 1d ago.")
@click.option("--offsets", is_flag=True, help="Put the offset before each record.")
@click.option(
    "--mode", type=click.Choice(["auto", "sse", "long-poll"]), default="auto", hidden=True
)
@client_options
@click.pass_obj
def tail(
    app: App,
    stream: str,
    tail_count: int | None,
    offset: str | None,
    since: str | None,
    offsets: bool,
    mode: render.LiveMode,
) -> None:
    """Follow STREAM until Ctrl-C, or until it is closed."""
    if tail_count is None and offset is None and since is None:
        tail_count = DEFAULT_COUNT
    if tail_count == 0 and offset is None and since is None:
        tail_count, offset = None, "now"
    printer = render.Printer(sys.stdout, as_json=app.json, offsets=offsets, live=True)
    notices = Notices()
    with app.connect() as client:
        followed = client.stream(stream).follow_batches(
            offset,
            since=None if since is None else since_value(since),
            tail=tail_count,
            gaps=notices.gap,
            mode=mode,
            on_reconnect=notices.lost,
            on_resume=notices.resumed,
        )
        with followed as batches:
            for batch in batches:
                printer.print(batch.records, batch.content_type)
    printer.finish()
    say(f"stream `{stream}` is closed")


class Notices:
    """Says once that the connection is lost, and once that it is back; tells every gap."""

    def __init__(self) -> None:
        self._lost = False
        self._missed = False

    def lost(self, error: MillstreamError, _: float) -> None:
        if not self._lost:
            warn(f"connection lost, resuming: {error.message}")
        self._lost = True
        self._missed = False

    def gap(self, gap: Gap) -> None:
        self._missed = True
        warn_of_gap(gap)

    def resumed(self) -> None:
        self._lost = False
        warn("connection is back" if self._missed else "connection is back, nothing was missed")
