"""`millstream append`: records from arguments, from stdin or from a file.

Where it sits: over `Stream.append_many` for arguments, `Stream.producer` for longer input.

    source        JSON stream                         byte stream
    DATA          one JSON value each, all or none     one record each, text/* gets a newline
    stdin, file   one JSON value per line              one record per line, newline kept
    --whole       the whole input is one record        the whole input is one record
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING

import click

from millstream import errors
from millstream.cli import render
from millstream.cli.context import App, client_options, complete_stream, content_type, say
from millstream.types import is_json_type, is_text_type, media_type

if TYPE_CHECKING:
    from millstream.client.sync.client import Client, Stream
    from millstream.client.sync.producer import Producer

INTERRUPT_FLUSH_SECONDS = 2.0


@click.command(
    epilog="""\b
Examples:
  millstream append hello "hi" --create                 make the stream if it is missing
  millstream append orders '{"id": 1}' '{"id": 2}'      two JSON records, all or none
  tail -f app.log | millstream append logs -            one record per line, as they come
  millstream append events --file events.ndjson --create --content-type json
  millstream append image --file image.png --whole --create --content-type image/png
"""
)
@click.argument("stream", shell_complete=complete_stream)
@click.argument("data", nargs=-1)
@click.option("--file", "-f", "file_name", metavar="FILE", help="Read records from this file.")
@click.option("--whole", is_flag=True, help="The whole input is one record, not one per line.")
@click.option("--create", is_flag=True, help="Create the stream if it does not exist.")
@click.option(
    "--content-type",
    "type_name",
    metavar="TYPE",
    help="`json`, `text`, `bytes` or a media type.  [default of a new stream: text]",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1, max=100_000),
    default=1000,
    show_default=True,
    help="Most JSON records per request when reading lines.",
)
@click.option("--no-newline", "-n", is_flag=True, help="Byte streams: add and keep no newline.")
@click.option("--if-match", metavar="OFFSET", help="Append only if this is the tail (with DATA).")
@click.option("--producer", "producer_id", metavar="ID", help="Producer id.  [default random]")
@client_options
@click.pass_obj
def append(
    app: App,
    stream: str,
    data: tuple[str, ...],
    file_name: str | None,
    whole: bool,
    create: bool,
    type_name: str | None,
    batch: int,
    no_newline: bool,
    if_match: str | None,
    producer_id: str | None,
) -> None:
    """Append records to STREAM: DATA, or one record per line from stdin or a file.

    `-`, or no DATA with piped input, reads stdin.
    """
    from_input = file_name is not None or data in ((), ("-",))
    if file_name is not None and data:
        raise click.UsageError("give either DATA or --file, not both")
    if from_input and file_name is None and sys.stdin.isatty() and data == ():
        raise click.UsageError("nothing to append: give DATA, --file, or pipe records to stdin")
    if if_match is not None and from_input and not whole:
        raise click.UsageError("--if-match works with DATA or --whole")
    with app.connect() as client, ExitStack() as stack:
        source: IO[bytes] = sys.stdin.buffer
        if file_name is not None:
            source = stack.enter_context(open(file_name, "rb"))
        target = _target(client, stream, create=create, type_name=type_name)
        offset: str | None
        if not from_input or whole:
            values = [source.read()] if whole else _arguments(target, data, no_newline=no_newline)
            offset, count = _append_values(target, values, if_match), len(values)
        else:
            with target.producer(producer_id, batch_records_max=batch) as producer:
                offset, count = _append_lines(target, producer, source, no_newline=no_newline)
    app.result({"path": target.path, "records": count, "offset": offset})
    noun = "record" if count == 1 else "records"
    say(f"appended {count:,} {noun} to `{target.path}`, tail {offset}")


def _target(client: Client, path: str, *, create: bool, type_name: str | None) -> Stream:
    """The stream with its type known; made if it is missing and that was asked for."""
    wanted = content_type(type_name)
    target = client.stream(path)
    try:
        info = target.info()
    except errors.StreamNotFound as error:
        if not create:
            error.hint = f"make it with `--create`, or `millstream stream create {path}`"
            raise
        try:
            return client.create(path, content_type=wanted or "text/plain")
        except errors.StreamConflict:
            # Somebody else created it just now, with another type: that type decides.
            info = target.info()
    if wanted is not None and media_type(wanted) != media_type(info.content_type):
        raise errors.ContentTypeMismatch(
            f"stream `{path}` holds {info.content_type}, not {wanted}",
            hint="leave `--content-type` out to use the stream's type",
        )
    return target


def _arguments(target: Stream, data: tuple[str, ...], *, no_newline: bool) -> list[bytes]:
    newline = b"\n" if is_text_type(target.content_type) and not no_newline else b""
    return [item.encode("utf-8", "surrogateescape") + newline for item in data]


def _append_values(target: Stream, values: list[bytes], if_match: str | None) -> str:
    try:
        return target.append_many(values, if_match=if_match)
    except errors.InvalidArgument as error:
        raise _explained(error, target) from error


def _append_lines(
    target: Stream, producer: Producer, source: IO[bytes], *, no_newline: bool
) -> tuple[str | None, int]:
    """Feed lines to the producer until the end of the input."""
    as_json = is_json_type(target.content_type)
    progress = render.Progress(sys.stderr)
    number = 0
    try:
        for line in source:
            number += 1
            record = line.strip() if as_json else line.rstrip(b"\r\n") if no_newline else line
            if record:
                producer.append(record)
                progress.update(len(line), producer)
        return producer.flush(), producer.acknowledged
    except errors.InvalidArgument as error:
        producer.flush()
        explained = _explained(error, target, f"line {number}: ")
        explained.message += f"; the {producer.acknowledged:,} records before it were appended"
        raise explained from error
    except KeyboardInterrupt:
        producer.close(timeout_seconds=INTERRUPT_FLUSH_SECONDS)
        raise
    finally:
        progress.finish()


def _explained(
    error: errors.InvalidArgument, target: Stream, place: str = ""
) -> errors.InvalidArgument:
    hint = error.hint
    if is_json_type(target.content_type):
        hint = "this stream takes JSON; a text needs its quotes, like '\"hello\"'"
    return errors.InvalidArgument(place + error.message, hint=hint)
