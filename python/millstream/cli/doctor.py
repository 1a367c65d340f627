"""`millstream doctor`: is everything here that the server and the pipeline need?

Where it sits: one command; the checks are in `millstream.doctor`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from millstream.cli.context import EXIT_FAILURE, EXIT_OK, App, client_options
from millstream.cli.render import GREEN, RED, YELLOW, paint, use_colour

if TYPE_CHECKING:
    from millstream.doctor import Finding

COLOURS: Final = {"ok": GREEN, "warn": YELLOW, "fail": RED}

EPILOG: Final = """\b
Examples:
  millstream doctor                              this machine
  millstream doctor --url http://10.0.0.7:4437   a server that must answer
  millstream doctor --master spark://host:7077   also start a session and ask its workers
\b
ok is well; warn does no harm until you need it; fail must be mended.
Exit codes: 0 nothing failed, 1 something did.
"""


@click.command(epilog=EPILOG)
@click.option("--data-dir", metavar="DIR", help="Directory to check instead of the settings' one.")
@click.option("--master", metavar="URL", help="Start a Spark session there and ask its workers.")
@click.option("--remote", metavar="URL", help="The same by Spark Connect (sc://host:port).")
@client_options
@click.pass_context
def doctor(
    context: click.Context, data_dir: str | None, master: str | None, remote: str | None
) -> int:
    """Check Java, pyspark, memory, the network and the server, with a remedy for each."""
    from millstream.doctor import examine, healthy

    app = context.ensure_object(App)
    if master is not None and remote is not None:
        raise click.UsageError("choose --master or --remote")
    findings = []
    for finding in examine(url=app.url, data_dir=data_dir, master=master, remote=remote):
        findings.append(finding)
        if not app.json:
            _print(finding)
    well = healthy(findings)
    if app.json:
        app.result({"ok": well, "checks": [finding.document() for finding in findings]})
    else:
        counts = [sum(f.state == state for f in findings) for state in ("ok", "warn", "fail")]
        click.echo("{} ok, {} warnings, {} failures".format(*counts))
    return EXIT_OK if well else EXIT_FAILURE


def _print(finding: Finding) -> None:
    word = f"{finding.state:<4}"
    shown = paint(word, COLOURS[finding.state]) if use_colour(sys.stdout) else word
    click.echo(f"{shown}  {finding.check:<15} {finding.message}")
    if finding.remedy:
        click.echo(f"{'':<22}-> {finding.remedy}")
