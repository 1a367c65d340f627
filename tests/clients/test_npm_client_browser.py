"""The published JavaScript client in a real browser page from another origin.

The page is bundled by esbuild and served by this test; headless Chromium loads it, and the page posts
what it saw back to its own origin. What is proven is CORS as browsers enforce it: preflights, exposed
headers (offsets, cursors, base64 mode) and streaming through `fetch`.
"""

from __future__ import annotations

import http.server
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from clients.javascript_expected import check_scenario
from support.server import ROOT, Server

PAGE = b'<!doctype html><meta charset="utf-8"><script type="module" src="/page.js"></script>'
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str:
    for name in ("chromium", "chromium-browser"):
        if found := shutil.which(name):
            return found
    raise AssertionError("Chromium is missing: `make setup` installs the package `chromium`")


@pytest.fixture
def page_script(tmp_path: Path) -> bytes:
    bundle = tmp_path / "page.js"
    subprocess.run(
        [
            "node_modules/.bin/esbuild",
            "scenario-page.mjs",
            "--bundle",
            "--format=esm",
            f"--outfile={bundle}",
            "--log-level=warning",
        ],
        cwd=ROOT / "tests" / "js",
        check=True,
        timeout=60,
    )
    return bundle.read_bytes()


@pytest.fixture
def results() -> queue.Queue[dict[str, Any]]:
    return queue.Queue()


@pytest.fixture
def page_origin(page_script: bytes, results: queue.Queue[dict[str, Any]]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_script = self.path == "/page.js"
            body = page_script if is_script else PAGE
            self.send_response(200)
            self.send_header("Content-Type", "text/javascript" if is_script else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - name set by the base
            pass

    page_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=page_server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{page_server.server_address[1]}"
    page_server.shutdown()
    page_server.server_close()
    thread.join(10)


def test_every_call_of_the_client_works_in_a_page_of_another_origin(
    server: Server,
    page_origin: str,
    results: queue.Queue[dict[str, Any]],
    tmp_path: Path,
) -> None:
    url = f"{page_origin}/?server={quote(server.url, safe='')}"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    flags = [*CHROMIUM_FLAGS, "--enable-logging=stderr", "--remote-debugging-port=0", profile]
    with (tmp_path / "browser.log").open("wb") as log_file:
        browser = subprocess.Popen(
            [chromium(), *flags, url], stdout=subprocess.DEVNULL, stderr=log_file
        )
    try:
        result = results.get(timeout=60)
    except queue.Empty:
        log = (tmp_path / "browser.log").read_text(errors="replace")
        pytest.fail(f"the page never reported\n{log[-6000:]}")
    finally:
        browser.terminate()
        browser.wait(15)
    assert "error" not in result, result["error"]
    assert result["origin"] == page_origin
    check_scenario(result["value"])
