"""The official protocol suite (npm, pinned in tests/js/package.json) must pass whole.

The suite runs unmodified in Node against a fresh server; this test reads its JSON report. Fewer tests
than expected fails as well: a suite that loaded half of itself proves nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.server import ROOT, Server

TESTS_EXPECTED = 338
LONG_POLL_MS = 500
SUITE_DEADLINE_S = 400


@pytest.mark.slow
@pytest.mark.timeout(SUITE_DEADLINE_S + 60)
def test_every_test_of_the_official_suite_passes(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    # Its webhooks go to receivers on this machine.
    server = start_server(
        settings={"long_poll_timeout_ms": LONG_POLL_MS, "webhook_allow": "127.0.0.1"}
    )
    report_path = tmp_path / "report.json"
    run = subprocess.run(
        [
            "node_modules/.bin/vitest",
            "run",
            "conformance.test.mjs",
            "--no-coverage",
            "--testTimeout=40000",
            "--reporter=json",
            f"--outputFile.json={report_path}",
        ],
        cwd=ROOT / "tests" / "js",
        env={
            **os.environ,
            "CONFORMANCE_TEST_URL": server.url,
            "CONFORMANCE_LONG_POLL_MS": str(LONG_POLL_MS),
        },
        capture_output=True,
        text=True,
        timeout=SUITE_DEADLINE_S,
        check=False,
    )
    assert report_path.exists(), f"no report:\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
    report = json.loads(report_path.read_text())
    results = [result for file in report["testResults"] for result in file["assertionResults"]]
    unhappy = [
        f"{result['status']}: {result['fullName']}\n    "
        + "\n    ".join("".join(result.get("failureMessages") or []).splitlines()[:4])
        for result in results
        if result["status"] != "passed"
    ]
    counts = Counter(result["status"] for result in results)
    assert not unhappy, f"{dict(counts)}\n" + "\n".join(unhappy)
    assert counts == {"passed": TESTS_EXPECTED}
    assert run.returncode == 0, run.stdout[-4000:]
