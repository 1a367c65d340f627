"""What `millstream doctor` looks at: is everything here that the server and the pipeline need?

Where it sits: below the command line. Each module beside this one holds the checks of one theme; `examine` runs them all.

Invariants:
- I-DOC-1  A check never raises: what it cannot find out is its finding.
- I-DOC-2  Everything that is not `ok` says what to do about it.
- I-DOC-3  Looking changes nothing, apart from a file that is made and removed to see whether a directory can be written.
- I-DOC-4  Without any extra installed all of it works: what the pipeline lacks is then a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.doctor.finding import Finding, State, guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Finding", "State", "examine", "healthy"]


def examine(
    *,
    url: str | None = None,
    data_dir: str | None = None,
    master: str | None = None,
    remote: str | None = None,
) -> Iterator[Finding]:
    """Run every check, one after the other, and hand out its findings as they come.

    `url`: the server that must answer (without it, one that is not there is only a warning). `master` or `remote`: start a
    Spark session there and ask its workers what they have.
    """
    from millstream.doctor import machine, packages, server, workers

    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", packages.python),
        ("pyspark", packages.pyspark),
        ("java", packages.java),
        ("worker python", lambda: workers.local_python(master or remote)),
        ("memory", machine.memory),
        ("loopback", machine.loopback),
        ("settings", machine.settings),
        ("data directory", lambda: machine.data_directory(data_dir)),
        ("server", lambda: server.reachable(url)),
    ]
    if master is not None or remote is not None:
        checks.append(("workers", lambda: workers.on_cluster(master, remote)))
    for name, check in checks:
        yield from guarded(name, check)


def healthy(findings: list[Finding]) -> bool:
    """True if nothing failed; warnings do no harm."""
    return all(finding.state is not State.FAIL for finding in findings)
