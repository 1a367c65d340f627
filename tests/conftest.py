"""Fixtures and options for every test: real servers, unique stream names, long or short counts."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("support", "clients.javascript_expected")

from support import forking  # noqa: E402 - rewriting must be registered first
from support.http import Api  # noqa: E402
from support.many_streams import delete_all  # noqa: E402
from support.server import Server  # noqa: E402

# Nothing may depend on local time being UTC: tests, their servers and their JVMs run elsewhere, off the full hour.
os.environ.setdefault("TZ", "Asia/Kathmandu")
time.tzset()
# Tests start a thousand Python processes, and Spark one for every query: each would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SYNC_DELAY = "MILLSTREAM_FAULT_SYNC_DELAY_MS"
SPARK_TESTS = Path(__file__).resolve().parent / "spark"

_serial = itertools.count()
_running: list[Server] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every test at its full count")
    parser.addoption(
        "--spark",
        choices=("with", "without", "only"),
        default="with",
        help="run the tests of tests/spark too (default), leave them out, or run nothing else",
    )
    parser.addoption(
        "--durability-report", type=Path, help="write what the crash tests lost to this JSON file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if is_full(config):
        os.environ["MILLSTREAM_TEST_FULL"] = "1"  # support.server starts its servers otherwise then


def pytest_unconfigure() -> None:
    forking.close()


def chosen(path: Path, config: pytest.Config) -> bool:
    """Tests with Spark need both cores, so `make` runs them apart from the others."""
    wanted = config.getoption("--spark")
    return bool(wanted == "with" or (SPARK_TESTS in path.parents) == (wanted == "only"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not chosen is not loaded either, unless it was named: each process would import what it needs."""
    return None if collection_path.is_dir() or chosen(collection_path, config) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that take minutes belong to the full counts."""
    with_long = is_full(config)
    kept, left_out = [], []
    for item in items:
        fits = with_long or item.get_closest_marker("long") is None
        (kept if fits and chosen(item.path, config) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("--spark") != "only":
        return None
    from support.spark_halves import scheduler

    return scheduler(config, log)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """True when the long counts are asked for (`--full` or MILLSTREAM_TEST_FULL=1)."""
    return is_full(request.config)


def is_full(config: pytest.Config) -> bool:
    asked = os.environ.get("MILLSTREAM_TEST_FULL", "") not in ("", "0")
    return bool(config.getoption("--full")) or asked


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real object store with a bucket, started when it is first asked for."""
    from support.object_store import ObjectStore  # it loads pyarrow

    store = ObjectStore(tmp_path_factory.mktemp("objects"))
    yield store
    store.close()


@pytest.fixture(scope="session")
def durability_report(request: pytest.FixtureRequest) -> Path | None:
    """Where the crash tests write their counts, if anywhere."""
    asked: Path | None = request.config.getoption("--durability-report")
    return asked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.failed:
        for server in _running:
            report.sections.append((f"server log ({server.url})", server.log()[-20_000:]))
    return report


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with any settings; all of them end, and are checked, with the test."""
    started: list[Server] = []

    def start(*, data_dir: Path | None = None, **options: Any) -> Server:
        folder = data_dir or tmp_path / f"data-{len(started)}"
        if (options.get("environment") or {}).keys() == {SYNC_DELAY} and not folder.exists():
            # A new directory takes four syncs: they need not be slow, too.
            Server(folder).close()
        server = Server(folder, **options)
        started.append(server)
        _running.append(server)
        return server

    yield start
    faults = []
    for server in started:
        try:
            server.close()
        except AssertionError as fault:
            faults.append(fault)
            server.kill()
        finally:
            _running.remove(server)
    if faults:
        raise faults[0]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the test's own, over an empty directory. In a file with the mark `one_server` it is the one of the
    file, with the streams of the tests before unless `emptied`, and with the mark `own_server` it is not."""
    node = request.node
    mark = node.get_closest_marker("one_server")
    if mark is None or node.get_closest_marker("own_server") is not None:
        yield request.getfixturevalue("start_server")(settings={"long_poll_timeout_ms": 2000})
        return
    server: Server = request.getfixturevalue("server_of_the_file")
    if server.process.poll() is not None:
        server.restart()  # the last test failed between a kill and a start
    yield server
    server.check_life()
    if mark.kwargs.get("emptied"):
        delete_all(server)


@pytest.fixture
def api(server: Server) -> Api:
    return Api(server)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as they found it; long polls end after 500 ms."""
    server = Server(tmp_path_factory.mktemp("shared"), settings={"long_poll_timeout_ms": 500})
    _running.append(server)
    try:
        yield server
        server.close()
    finally:
        server.kill()
        _running.remove(server)


@pytest.fixture(scope="module")
def server_of_the_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """For all tests of a file: what they lose in a crash, streams of other tests survive."""
    settings = getattr(request.module, "SERVER_SETTINGS", {"long_poll_timeout_ms": 2000})
    server = Server(tmp_path_factory.mktemp("file"), settings=settings)
    _running.append(server)
    try:
        yield server
        server.close()
    finally:
        server.kill()
        _running.remove(server)


@pytest.fixture
def shared(shared_server: Server) -> Api:
    return Api(shared_server)


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    """A stream name that no other test uses."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    return f"t/{name}-{next(_serial)}"
