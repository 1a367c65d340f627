"""Real Spark, shared: one `local[2]` session in this process, the others in processes that start when first asked for.

| fixture | what it is |
| --- | --- |
| `spark` | the shared classic session, `local[2]`; its Python is forked, but not with `--full` (`support.spark_forks`) |
| `queries` | the queries of the shared session that a test leaves running end with it |
| `server` | the shared Millstream server, without streams; with the mark `own_server` one of the test's own |
| `client` | a client of `server` |
| `new_driver` | starts a `support.spark.Driver` with any master and settings |
| `local_cluster` | a shared driver on `local-cluster[2,1,1024]`: two executor processes on one host |
| `local_clusters` | gives that driver, a new one if the last one was killed |
| `standalone` | the shared standalone cluster: master and two workers on 127.0.0.1 and 127.0.0.2 |
| `standalone_driver` | a shared driver on it |
| `connect_server`, `connect` | a shared Spark Connect server, and a driver with a session on it |

With `--numprocesses=2` one process of pytest has all tests that start Spark processes of their own; each has a shared session
for the others (`support.spark_halves`).

`support.spark.available_now(writer)` runs a stream with a deadline; `run_driver(script, folder, master=...)` runs a file once.
Only here warnings of other people's packages are no errors: pyspark and py4j leave sockets to the collector.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.client.sync.client import Client
from millstream.spark.session import build_session
from support.many_streams import delete_all
from support.server import Server
from support.spark import SMALL, TOKEN, TOKEN_VARIABLE, Driver, environment
from support.spark_cluster import ConnectServer, StandaloneCluster
from support.spark_forks import SparkForks
from support.spark_halves import SHARED, half_of

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
# The JVMs of the tests live for seconds: what the second compiler gains it never gets back.
# Hadoop starts a `chmod` for every file of a checkpoint: without a helper process between, that costs half.
SHORT_LIVED_JVM = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djdk.lang.Process.launchMechanism=VFORK"
)
# The usual one starts two or three `readlink` besides; drivers of their own keep to it.
CHECKPOINT_FILES = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
TAMED = (
    "default",
    "ignore::ResourceWarning",
    "ignore::DeprecationWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "error:::millstream",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        for line in reversed(TAMED):
            item.add_marker(pytest.mark.filterwarnings(line), append=False)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        if half_of(item.nodeid) == "session":
            heavy = SHARED.intersection(getattr(item, "fixturenames", ()))
            assert not heavy, f"{item.nodeid} uses {heavy}: name it in support/spark_halves.py"
    items.sort(key=lambda item: half_of(item.nodeid) == "session")  # the longest part begins first


@pytest.fixture(scope="session", autouse=True)
def short_lived_jvms() -> Iterator[None]:
    """For every `java` that a test starts, by whatever command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", SHORT_LIVED_JVM)
        yield


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything of Spark goes: JVM log, shuffle files, work directories."""
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="session")
def worker_python(full: bool, spark_folder: Path) -> Iterator[str]:
    """The interpreter of the shared session: at the short counts one whose processes have loaded everything."""
    if full:
        yield sys.executable
        return
    forks = SparkForks(spark_folder / "forks")
    yield str(forks.python)
    forks.close()


@pytest.fixture(scope="session")
def spark(spark_folder: Path, worker_python: str) -> Iterator[Any]:
    """The shared session. Its log is `jvm.log` in `spark_folder`, its event log is in `events` there."""
    saved = dict(os.environ)
    pythons = dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), worker_python)
    os.environ.update(
        {
            name: value
            for name, value in environment(spark_folder / "shared", pythons).items()
            if name.startswith(("SPARK_", "PYSPARK_"))
        }
    )
    os.environ[TOKEN_VARIABLE] = TOKEN
    (spark_folder / "events").mkdir()
    conf = {
        **SMALL,
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_FILES,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",  # a test reads it
        "spark.eventLog.dir": (spark_folder / "events").as_uri(),
        "spark.local.dir": str(spark_folder / "shared" / "local"),
        "spark.sql.warehouse.dir": str(spark_folder / "shared" / "warehouse"),
    }
    session = build_session(
        "millstream-tests", master="local[2]", conf=conf, log_file=spark_folder / "jvm.log"
    )
    try:
        yield session
    finally:
        session.stop()
        gc.collect()  # what py4j leaves open is found here, and not behind the last test, where it is an error
        os.environ.clear()
        os.environ.update(saved)


@pytest.fixture
def queries(spark: Any) -> Iterator[None]:
    """What a page leaves running ends with it."""
    yield
    for query in spark.streams.active:
        query.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show the end of the shared JVM's log below a failure."""
    report: Any = yield
    folder = getattr(item, "funcargs", {}).get("spark_folder")
    if report.failed and isinstance(folder, Path) and (folder / "jvm.log").exists():
        text = (folder / "jvm.log").read_text(errors="replace")
        report.sections.append(("spark log", text[-10_000:]))
    return report


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server start costs a second beside a busy JVM, so tests that do not kill it share one and leave it empty."""
    if request.node.get_closest_marker("own_server") is not None:
        yield request.getfixturevalue("start_server")(settings={"long_poll_timeout_ms": 2000})
        return
    shared: Server = request.getfixturevalue("shared_server")
    yield shared
    delete_all(shared)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with millstream.connect(server.url) as connected:
        yield connected


@pytest.fixture
def new_driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts drivers; whatever the test leaves of them is killed."""
    started: list[Driver] = []

    def start(**options: Any) -> Driver:
        driver = Driver(tmp_path / f"driver-{len(started)}", **options)
        started.append(driver)
        return driver

    yield start
    for driver in started:
        driver.kill()


@pytest.fixture(scope="session")
def local_clusters(spark_folder: Path) -> Iterator[Callable[[], Driver]]:
    """Gives the shared driver on `local-cluster`; one that a test has killed is replaced when it is asked for."""
    started: list[Driver] = []

    def running() -> Driver:
        if not started or started[-1].process.poll() is not None:
            folder = spark_folder / f"local-cluster-{len(started)}"
            started.append(Driver(folder, master=LOCAL_CLUSTER))
        return started[-1]

    yield running
    for driver in started:
        driver.close()


@pytest.fixture
def local_cluster(local_clusters: Callable[[], Driver]) -> Driver:
    return local_clusters()


@pytest.fixture(scope="session")
def standalone(spark_folder: Path) -> Iterator[StandaloneCluster]:
    cluster = StandaloneCluster(spark_folder / "standalone")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def standalone_driver(standalone: StandaloneCluster, spark_folder: Path) -> Iterator[Driver]:
    """A shared driver on the cluster; a task that takes longer than its siblings gets a second attempt."""
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.cores.max": "2",  # one on each worker; the others are for the tests that bring a driver
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.5",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "500ms",
    }
    folder = spark_folder / "standalone-driver"
    with Driver(folder, master=standalone.master, conf=conf) as driver:
        yield driver


@pytest.fixture(scope="session")
def connect_server(spark_folder: Path) -> Iterator[ConnectServer]:
    server = ConnectServer(spark_folder / "connect-server", conf=SMALL)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def connect(connect_server: ConnectServer, spark_folder: Path) -> Iterator[Driver]:
    with Driver(spark_folder / "connect", remote=connect_server.url) as driver:
        yield driver
