"""`millstream serve`: flags from the settings table, then the server's own life cycle.

Where it sits: turns the command line into `Settings` and composes the server: it hands the control
application to `millstream.server.lifecycle`. Both are imported only when a server is started, so
that client commands start quickly.
Invariant I-SRV-1: every row of the table with `serve` is a flag; none is written by hand.
"""

from __future__ import annotations

import gc
from typing import Any

import click

from millstream.cli.context import CLASSES_HELP
from millstream.settings import CONFIG_FILE_NAME, TABLE, Kind, Setting, load_settings

EPILOG = """\b
Examples:
  millstream serve                                      durable, on this machine only
  millstream serve --port 0 --data-dir /tmp/play        any free port, another directory
  millstream serve --durability memory                  quicker, a crash may cost the last records
  MILLSTREAM_PORT=8080 millstream serve                 every flag is also a variable
  millstream serve --config /etc/millstream.toml        or a line of a file
\b
Durability, per stream; --durability is for streams that ask for none:
{classes}
\b
A flag beats the environment, the environment beats the file, the file beats the default.
Stop it with Ctrl-C or SIGTERM: what was acknowledged is safe, but for ephemeral records.
It waits for a slow disk, up to 2 minutes, and says so; a second Ctrl-C ends it at once.
"""
_METAVARS = {
    Kind.TEXT: "TEXT",
    Kind.PATH: "DIR",
    Kind.INTEGER: "N",
    Kind.SIZE: "SIZE",
    Kind.MILLISECONDS: "MS",
    Kind.PLACES: "LIST",
    Kind.ORIGINS: "LIST",
}
_TITLES = {"server": "Server", "live": "Live reading", "limits": "Limits", "storage": "Storage"}


class ServeCommand(click.Command):
    """Lists the flags under the groups of the settings table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _TITLES.values()}
        groups["Other"] = []
        rows = {row.name: row for row in TABLE}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            row = rows.get(parameter.name or "")
            groups["Other" if row is None else _TITLES[row.group]].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def option_for(row: Setting) -> click.Option:
    """The flag of one setting; its text is parsed by the table, so that errors read the same."""
    help_text = f"{row.help}  [{row.environment}; {row.default_text or 'unset'}]"
    if row.kind is Kind.FLAG:
        return click.Option([row.flag], is_flag=True, default=None, help=help_text)
    if row.kind is Kind.CHOICE:
        return click.Option([row.flag], type=click.Choice(row.choices), help=help_text)
    return click.Option([row.flag], type=str, metavar=_METAVARS[row.kind], help=help_text)


def run_serve(config: str | None, **flags: Any) -> int:
    """Run a server until it is told to stop.

    Prints one line when it is ready: address, data directory and durability.
    """
    settings = load_settings(flags, config=config)
    from millstream.control.app import create_app
    from millstream.server.lifecycle import end_in_time, run_server

    code = run_server(settings, create_app)
    end_in_time(code)
    gc.freeze()  # what was kept in memory ends with the process: to take it apart first would take seconds
    return code


serve = ServeCommand(
    "serve",
    callback=run_serve,
    help=run_serve.__doc__,
    epilog=EPILOG.format(classes=CLASSES_HELP),
    params=[
        *(option_for(row) for row in TABLE if row.serve),
        click.Option(
            ["--config"],
            metavar="FILE",
            help=f"settings file  [MILLSTREAM_CONFIG; ./{CONFIG_FILE_NAME} if it exists]",
        ),
    ],
)
