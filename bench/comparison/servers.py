"""The servers: how each is installed, started, found ready, measured and ended.

Every server runs in a session of its own, so its whole process group can be measured and ended
without touching anything else. All acknowledge an append after it is synced to disk.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BENCH = Path(__file__).resolve().parent.parent
ROOT = BENCH.parent
PEERS = BENCH / ".peers"
NPM_PACKAGE, NPM_VERSION = "@durable-streams/server", "0.3.7"
CRATE, CRATE_VERSION = "durable-streams", "0.1.5"
READY_SECONDS = 60.0
STOP_SECONDS = 10.0


class BenchError(Exception):
    """The benchmark cannot go on; the message says why."""


@dataclass(frozen=True)
class Kind:
    """One kind of server."""

    name: str
    durability: str
    command: Callable[[Path, int], list[str]]
    version: Callable[[], str]
    install: Callable[[], None]
    picks_port: bool
    """True if port 0 works and the ready line names the real one."""
    tells_checkpoints: bool = False
    """True if its metrics say when checkpoints ran."""


class Server:
    """A running server; use as a context manager."""

    def __init__(
        self,
        kind: Kind,
        data: Path,
        *,
        descriptor_limit: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.data = data
        self.lines: list[tuple[float, str]] = []
        self.log = data.with_name(data.name + ".log")
        port = 0 if kind.picks_port else free_port()
        started = time.monotonic()
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                kind.command(data, port),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=data.parent,
                env=None if environment is None else {**os.environ, **environment},
                preexec_fn=_limit_descriptors(descriptor_limit),
            )
        self.group = self.process.pid
        try:
            self.url = self._await_ready(port, started)
        except BaseException:
            self.kill()
            raise
        self.ready_seconds = time.monotonic() - started

    def _await_ready(self, port: int, started: float) -> str:
        """The address, once the server has said that it listens and accepts a connection."""
        deadline = started + READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise BenchError(
                    f"{self.kind.name} ended with {self.process.returncode}: {self.tail()}"
                )
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                output = log.read()
            self._note_lines(output, time.monotonic() - started)
            found = re.search(rb"listening on http://([0-9.]+):(\d+)", output)
            if found:
                host, listed = found[1].decode(), int(found[2])
                address = (host, listed if self.kind.picks_port else port)
                try:
                    socket.create_connection(address, timeout=1.0).close()
                except OSError:
                    continue
                return f"http://{address[0]}:{address[1]}"
            time.sleep(0.005)
        raise BenchError(
            f"{self.kind.name} is not ready after {READY_SECONDS:.0f} s: {self.tail()}"
        )

    def _note_lines(self, output: bytes, seconds: float) -> None:
        """Keeps whole lines with the time after the start at which they were first seen."""
        whole = output[: output.rfind(b"\n") + 1].decode(errors="replace").splitlines()
        self.lines += [(round(seconds, 3), line) for line in whole[len(self.lines) :]]

    def tail(self) -> str:
        """The end of the server's output in one line, for messages; no paths of this machine."""
        text = self.log.read_bytes()[self._log_start :][-600:].decode(errors="replace")
        for path, shown in ((ROOT, "."), (Path.home(), "~")):
            text = text.replace(str(path), shown)
        return " ".join(text.split())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Asks for a clean end and insists after a while."""
        if self.process.poll() is None:
            os.killpg(self.group, signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """kill -9 of the whole group."""
        if self.process.poll() is None:
            os.killpg(self.group, signal.SIGKILL)
            self.process.wait(STOP_SECONDS)

    def metrics(self, names: tuple[str, ...]) -> dict[str, float | None]:
        """The sums over all samples of Prometheus metrics; None for one that is not exported."""
        with urllib.request.urlopen(f"{self.url}/-/metrics", timeout=10) as response:
            return metric_sums(response.read().decode(), names)


def metric_sums(text: str, names: tuple[str, ...]) -> dict[str, float | None]:
    """Sums the samples of each name in a Prometheus text exposition, over all labels."""
    sums: dict[str, float | None] = dict.fromkeys(names)
    for name in names:
        pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)"
        samples = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
        if samples:
            sums[name] = sum(samples)
    return sums


def _limit_descriptors(limit: int | None) -> Callable[[], None] | None:
    if limit is None:
        return None
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_checked(command: list[str], what: str, cwd: Path) -> str:
    """Runs a command to its end and returns its output."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=1800, check=False
        )
    except FileNotFoundError as error:
        raise BenchError(f"{what}: {command[0]} is not installed") from error
    if done.returncode != 0:
        raise BenchError(f"{what} failed ({done.returncode}): {(done.stdout + done.stderr)[-800:]}")
    return done.stdout.strip()


def _npm_home() -> Path:
    return PEERS / "npm" / "node_modules" / NPM_PACKAGE


def _npm_version() -> str:
    version = json.loads((_npm_home() / "package.json").read_text())["version"]
    return f"{NPM_PACKAGE} {version} on Node {run_checked(['node', '--version'], 'node', BENCH)}"


def _npm_install() -> None:
    manifest = _npm_home() / "package.json"
    if manifest.exists() and json.loads(manifest.read_text())["version"] == NPM_VERSION:
        return
    home = PEERS / "npm"
    home.mkdir(parents=True, exist_ok=True)
    (home / "package.json").write_text('{"private": true, "type": "module"}\n')
    package = f"{NPM_PACKAGE}@{NPM_VERSION}"
    run_checked(["npm", "install", "--no-audit", "--no-fund", package], "npm install", home)


def _crate_version() -> str:
    registered = (PEERS / ".crates.toml").read_text()
    found = re.search(rf'"{CRATE} (\S+) ', registered)
    return f"{CRATE} {found[1] if found else 'unknown'}"


def _crate_install() -> None:
    if (PEERS / ".crates.toml").exists() and _crate_version() == f"{CRATE} {CRATE_VERSION}":
        return
    command = [
        "cargo",
        "install",
        CRATE,
        "--version",
        CRATE_VERSION,
        "--locked",
        "--root",
        str(PEERS),
    ]
    run_checked(command, "cargo install", BENCH)


def _npm_command(data: Path, port: int) -> list[str]:
    module = _npm_home() / "dist" / "index.js"
    return ["node", str(BENCH / "peers" / "npm-reference.mjs"), str(module), str(data), str(port)]


def _crate_command(data: Path, port: int) -> list[str]:
    return [
        str(PEERS / "bin" / "durable-streams-server"),
        "--port",
        str(port),
        "--data-dir",
        str(data),
    ]


def millstream_of(checkout: Path, name: str) -> Kind:
    """The Millstream that was built in a checkout, under this name."""
    binary = checkout / ".venv" / "bin" / "millstream"

    def install() -> None:
        if not binary.exists():
            raise BenchError(f"{name} is not built: run `make build` in its checkout first")

    def version() -> str:
        told = run_checked([str(binary), "--version"], f"{name} --version", checkout)
        return f"{told}, source {commit(checkout)}"

    return Kind(
        name=name,
        durability="default settings (`fsync`): group-commit fdatasync of the log before the answer",
        command=lambda data, port: [
            str(binary), "serve", "--port", str(port), "--data-dir", str(data),
        ],
        version=version,
        install=install,
        picks_port=True,
        tells_checkpoints=True,
    )  # fmt: skip


def commit(checkout: Path) -> str:
    """The commit of a checkout, and whether the tree had changes."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return "no commit yet"
    status = run_checked(
        ["git", "-C", str(checkout), "status", "--porcelain"], "git status", checkout
    )
    return head.stdout.strip() + (" with uncommitted changes" if status else "")


KINDS: dict[str, Kind] = {
    "millstream": millstream_of(ROOT, "millstream"),
    "npm": Kind(
        name="npm",
        durability="file-backed (`dataDir`): fdatasync of the stream's file, then LMDB, before the answer",
        command=_npm_command,
        version=_npm_version,
        install=_npm_install,
        picks_port=True,
    ),
    "rust": Kind(
        name="rust",
        durability="default flags (`--durability wal`): group-commit fdatasync of its log before the answer",
        command=_crate_command,
        version=_crate_version,
        install=_crate_install,
        picks_port=False,
    ),
}


def fresh_directory(root: Path, name: str) -> Path:
    """A data directory that does not exist yet, below `root`."""
    path = root / name
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path
