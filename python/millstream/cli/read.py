"""`millstream read`: the records of a stream up to its tail.

Where it sits: over `Stream.read_batches`; shares its options and output with `tail`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from millstream.cli import render
from millstream.cli.context import App, client_options, complete_stream, since_value, warn

if TYPE_CHECKING:
    from millstream.types import Gap


@click.command(
    epilog="""\b
Examples:
  millstream read orders                     everything, one JSON record per line
  millstream read orders --tail 5            the last five
  millstream read orders --since 10m         of the last ten minutes
  millstream read orders --offsets           with the position after each batch
  millstream read orders --from OFFSET       from there on
  millstream read image > image.png          byte streams come out byte for byte
"""
)
@click.argument("stream", shell_complete=complete_stream)
@click.option(
    "--from", "offset", metavar="OFFSET", help="Start here; -1 is the start, now the end."
)
@click.option("--since", metavar="TIME", help="Start at a time: RFC 3339, ms, or 5m, 2h, 1d ago.")
@click.option("--tail", "tail_count", type=click.IntRange(min=0), help="Only the last N records.")
@click.option("--limit", type=click.IntRange(min=1), help="Stop after N records.")
@click.option("--offsets", is_flag=True, help="Put the offset before each record.")
@client_options
@click.pass_obj
def read(
    app: App,
    stream: str,
    offset: str | None,
    since: str | None,
    tail_count: int | None,
    limit: int | None,
    offsets: bool,
) -> None:
    """Print the records of STREAM up to its tail."""
    printer = render.Printer(sys.stdout, as_json=app.json, offsets=offsets)
    left = limit
    with app.connect() as client:
        for batch in client.stream(stream).read_batches(
            offset,
            since=None if since is None else since_value(since),
            tail=tail_count,
            gaps=warn_of_gap,
        ):
            records = batch.records if left is None else batch.records[:left]
            printer.print(records, batch.content_type)
            if left is not None:
                left -= len(records)
                if left == 0:
                    break
    printer.finish()


def warn_of_gap(gap: Gap) -> None:
    lost = "records are missing" if gap.certain else "records may be missing"
    warn(f"{lost} between {gap.from_offset} and {gap.to_offset} (reason: {gap.reason})")
