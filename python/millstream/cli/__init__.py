"""The command line: `millstream serve`, `stream`, `append`, `read`, `tail`, `completion`.

Where it sits: on top. Client commands speak only HTTP through `millstream.client`, so whatever they
do a user can do. Reading order: `main` (tree and exit codes), `context` (what commands share),
`render` (how things look), then one module per command.
"""

from __future__ import annotations

from millstream.cli.main import main

__all__ = ["main"]
