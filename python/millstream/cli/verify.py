"""`millstream verify`: every checksum and relation of a data directory, and its repair.

Where it sits: without a server it works on a directory of this machine; with `--url` it asks a running server, which
looks at its own directory and goes on serving.

Invariants: findings are data and go to stdout; progress goes to stderr; the exit code says whether data is whole.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import click

from millstream.cli.context import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, App, client_options, complain
from millstream.client.control import verified
from millstream.errors import MillstreamError

LINE_EVERY_S: Final = 1.0

EPILOG: Final = """\b
Examples:
  millstream verify                                   the directory of the settings, server stopped
  millstream verify --data-dir /var/lib/millstream
  millstream verify --url http://127.0.0.1:4437       a running server looks at its own directory
  millstream verify --data-dir DIR --repair           keep what is intact, list what is lost
\b
Every line names a file, the byte where it begins, and the stream if it is known. An `error` is
something that was promised and is missing or wrong. A `note` is worth knowing and does no harm:
leftovers, a torn tail after a crash, a range that is already marked as damaged.
\b
--repair needs the server to be stopped. Originals are first copied into repair-<time>/ inside the
data directory. Damaged ranges are marked: readers get a gap with reason `corruption` instead of
wrong bytes. It ends with a second look.
\b
Exit codes: 0 everything is whole (or is again), 1 damage, 2 it could not be looked at.
"""


class Progress:
    """One line on stderr, written over in a terminal."""

    def __init__(self, wanted: bool) -> None:
        self._terminal = sys.stderr.isatty()
        self._wanted = wanted or self._terminal
        self._shown_at: float | None = None

    def __call__(self, done: int, total: int) -> bool:
        now = time.monotonic()
        every = 0.0 if self._terminal else LINE_EVERY_S
        due = self._shown_at is None or now - self._shown_at >= every or done == total
        if self._wanted and due:
            share = done * 100 // total if total else 100
            text = f"verifying: {_size(done)} of {_size(total)} ({share} %)"
            if self._terminal:
                click.echo(f"\r\x1b[K{text}", err=True, nl=False)
            else:
                click.echo(text, err=True)
            self._shown_at = now
        return True

    def clear(self) -> None:
        if self._terminal and self._shown_at is not None:
            click.echo("\r\x1b[K", err=True, nl=False)


@click.command(epilog=EPILOG)
@click.option("--data-dir", metavar="DIR", help="Directory of a stopped server.")
@click.option("--repair", is_flag=True, help="Repair what is damaged; the server must be stopped.")
@click.option("--progress", is_flag=True, help="Show progress even if stderr is not a terminal.")
@client_options
@click.pass_context
def verify(context: click.Context, data_dir: str | None, repair: bool, progress: bool) -> int:
    """Check every checksum and relation of a data directory."""
    app = context.ensure_object(App)
    if data_dir is not None and app.url is not None:
        raise click.UsageError("choose --data-dir (a stopped server) or --url (a running one)")
    if repair and app.url is not None:
        raise click.UsageError("--repair works on the directory of a stopped server: --data-dir")
    shown = Progress(progress)
    try:
        if app.url is not None:
            with app.connect() as client:
                report = verified(client, shown)
        else:
            report = _look(data_dir, repair, shown)
    except MillstreamError as error:
        shown.clear()
        if error.code not in _UNREADABLE:
            raise
        complain(error.message, error.hint, error.code, as_json=app.json)
        return EXIT_USAGE
    shown.clear()
    return _tell(app, report)


_UNREADABLE: Final = {
    "io_error",
    "directory_locked",
    "catalog_damaged",
    "verify_failed",
}
"""Codes that mean: nothing is known about the data."""


def _look(data_dir: str | None, repair: bool, progress: Progress) -> dict[str, Any]:
    from millstream.server.verify import verify as verify_directory
    from millstream.settings import load_settings

    directory = data_dir if data_dir is not None else load_settings({}).data_dir
    return dict(verify_directory(directory, repair=repair, progress=progress))


def _tell(app: App, report: dict[str, Any]) -> int:
    repair = report["repair"]
    whole = (report if repair is None else repair["after"])["errors"] == 0
    if app.json:
        app.result({"whole": whole, **report})
        return EXIT_OK if whole else EXIT_FAILURE
    _print_findings(report)
    if repair is not None:
        _print_repair(repair)
        _print_findings(repair["after"])
    elif report["beyond_repair"]:
        click.echo("this cannot be repaired: restore a backup of the whole directory")
    elif not whole:
        click.echo("`millstream verify --repair` on the stopped server keeps what is intact")
    return EXIT_OK if whole else EXIT_FAILURE


def _print_findings(report: dict[str, Any]) -> None:
    for finding in report["findings"]:
        place = finding["file"] + ("" if finding["byte"] is None else f" at byte {finding['byte']}")
        stream = "" if finding["stream"] is None else f" (stream {finding['stream']})"
        click.echo(f"{finding['severity']}: {place}{stream}: {finding['what']}")
    left = report["errors"] + report["notes"] - len(report["findings"])
    if left:
        click.echo(f"... and {left} more")
    outcome = "whole" if report["errors"] == 0 else f"{report['errors']} errors"
    click.echo(
        f"{outcome}: {report['streams']} streams, {_size(report['stream_bytes'])} in "
        f"{report['appends']} appends, {report['frames']} frames in {report['log_files']} log files"
        + (f", {report['notes']} notes" if report["notes"] else "")
    )


def _print_repair(repair: dict[str, Any]) -> None:
    click.echo(f"repaired; the originals are in {repair['kept_in']}/")
    for line in repair["done"]:
        click.echo(f"done: {line}")
    for given in repair["given_up"]:
        stream = "" if given["stream"] is None else f"stream {given['stream']}: "
        click.echo(f"not recovered: {stream}{given['what']}")
    left = repair["given_up_count"] - len(repair["given_up"])
    if left:
        click.echo(f"... and {left} more were not recovered")
    if not repair["given_up_count"]:
        click.echo("everything was recovered")


def _size(value: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} bytes"
