"""The published JavaScript client, unmodified, in Node."""

from __future__ import annotations

import json
import subprocess

from clients.javascript_expected import check_scenario
from support.server import ROOT, Server


def test_every_call_of_the_client_works_in_node(server: Server) -> None:
    run = subprocess.run(
        ["node", "scenario-node.mjs", server.url],
        cwd=ROOT / "tests" / "js",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    check_scenario(json.loads(run.stdout))
