"""`millstream backup` and `millstream restore`: a copy of a running server, and a server from a copy.

Where it sits: `backup` asks a server over HTTP and shows how far it is; `restore` works on directories of this
machine, without a server.

Invariants:
- I-BAK-1  Ctrl-C cancels the backup on the server as well, and waits until it is gone.
- I-BAK-2  A restore that is told to end, by Ctrl-C or SIGTERM, leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import click

from millstream.cli.context import App, client_options, say, warn
from millstream.errors import InvalidArgument, MillstreamError

if TYPE_CHECKING:
    from millstream.client.sync.client import Client

WAIT_MS: Final = 500
LINE_EVERY_S: Final = 5.0
_BACKUP_HINTS: Final = {
    "backup_damaged": "`millstream verify` shows all damage; `--allow-damage` copies it as it is",
}


class BackupFailed(MillstreamError):  # noqa: N818 - named by what happened
    """The server gave up; nothing is left at the destination."""

    code = "backup_failed"


class ProgressLine:
    """One line on stderr that is written over in a terminal, and now and then a new one elsewhere."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._terminal = sys.stderr.isatty()
        self._shown = ""
        self._shown_at = time.monotonic()

    def show(self, phase: str, done: int, total: int) -> None:
        text = f"{self._verb}: {phase}"
        if total:
            share = min(100, done * 100 // total)
            text += f", {_size(done)} of {_size(total)} ({share} %)"
        now = time.monotonic()
        if text == self._shown or (not self._terminal and now - self._shown_at < LINE_EVERY_S):
            return
        self._shown, self._shown_at = text, now
        if self._terminal:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
        else:
            click.echo(text, err=True)

    def clear(self) -> None:
        if self._terminal and self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)


@click.command(
    epilog="""\b
Examples:
  millstream backup /backups/monday
  millstream backup /backups/monday --rate 50          at most 50 MiB per second
  millstream restore /backups/monday --data-dir ./restored
\b
Writes and reads go on meanwhile. The backup holds everything that was acknowledged before the
command was given, and what was written later up to one moment. Records of `ephemeral` streams are
not in it. Ctrl-C cancels it. A server that others can reach makes backups below its `backup_dir`
only.
"""
)
@click.argument("destination")
@click.option("--rate", type=float, metavar="MIB", help="Limit in MiB per second.")
@click.option("--allow-damage", is_flag=True, help="Copy damaged records as they are.")
@client_options
@click.pass_obj
def backup(app: App, destination: str, rate: float | None, allow_damage: bool) -> None:
    """Copy a running server into the new directory DESTINATION on its machine."""
    from millstream.client.control import control_call

    if rate is not None and rate <= 0:
        raise click.BadParameter("must be more than 0", param_hint="--rate")
    with app.connect() as client:
        asked: dict[str, Any] = {"to": _destination(client.url, destination)}
        if rate is not None:
            asked["rate_mib_per_second"] = rate
        if allow_damage:
            asked["allow_damage"] = True
        started = control_call(client, "POST", "/-/api/backups", asked)
        ended = _follow(client, f"/-/api/backups/{quote(str(started['id']), safe='')}")
    _tell(app, ended)


def _follow(client: Client, path: str) -> dict[str, Any]:
    """Show how far it is until it has ended; Ctrl-C cancels it and waits for that."""
    from millstream.client.control import control_call

    line = ProgressLine("backup")
    interrupted = False
    while True:
        try:
            now = control_call(client, "GET", f"{path}?wait_ms={WAIT_MS}")
            if now["state"] != "running":
                line.clear()
                break
            line.show(str(now["phase"]), int(now["bytes_done"]), int(now["bytes_total"]))
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            line.clear()
            click.echo("cancelling the backup", err=True)
            control_call(client, "DELETE", path)
    if interrupted and now["state"] == "cancelled":
        raise KeyboardInterrupt
    return now


def _tell(app: App, ended: dict[str, Any]) -> None:
    error = ended["error"]
    if error is not None:
        raise BackupFailed(
            f"the backup failed: {error['detail']}",
            code=error["code"],
            hint=_BACKUP_HINTS.get(error["code"]),
        )
    summary = ended["summary"]
    for finding in summary["damage"]:
        warn(finding)
    if summary["damaged"]:
        warn(f"{summary['damaged']} damaged places were copied as is")
    app.result({"to": ended["to"], **summary})
    say(
        f"backup of {summary['streams']} streams, {_size(summary['bytes'])}, in {ended['to']} "
        f"(commit number {summary['commit_number']})"
    )


def _destination(url: str, given: str) -> str:
    """A relative path means this directory, which only a server on this machine knows."""
    if os.path.isabs(given):
        return given
    from millstream.settings import is_loopback

    if is_loopback(urlsplit(url).hostname or ""):
        return os.path.abspath(given)
    raise InvalidArgument(
        f"`{given}` is relative, and the server at {url} is on another machine",
        hint="name the destination by its absolute path there",
    )


@click.command(
    epilog="""\b
Examples:
  millstream restore /backups/monday --data-dir /var/lib/millstream
  millstream serve --data-dir /var/lib/millstream
\b
Every file is compared with its checksum. Streams go on in a new epoch: who comes with an offset of
the old server reads on where the backup ends and is told of the gap (reason `restore`). Nothing is
ever overwritten, and a restore that fails leaves nothing behind.
"""
)
@click.argument("source", metavar="BACKUP")
@click.option(
    "--data-dir", required=True, metavar="DIR", help="Directory to restore into; new or empty."
)
@client_options
@click.pass_obj
def restore(app: App, source: str, data_dir: str) -> None:
    """Make the data directory DIR from a backup."""
    from millstream.cli.interrupts import Interrupts
    from millstream.server.restore import restore as restore_directory

    line = ProgressLine("restore")

    def show(phase: str, done: int, total: int) -> bool:
        line.show(phase, done, total)
        return True

    try:
        with Interrupts().taken():
            files, size = restore_directory(source, data_dir, show)
    finally:
        line.clear()
    app.result({"data_dir": data_dir, "files": files, "bytes": size})
    say(f"restored {files} files, {_size(size)}, into {data_dir}; serve it with --data-dir")


def _size(value: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} bytes"
