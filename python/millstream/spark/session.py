"""Builds the Spark session of a command, a job or a test.

Where it sits: used by `cli/`, `spark/jobs` and the tests; the connector itself works in any session.

Invariants:
- I-SES-1  A local master stays on this machine: it binds and advertises 127.0.0.1, and its workers run this interpreter.
- I-SES-2  With `log_file` nothing of the JVM reaches the terminal: its log and its raw output go to that file, which
           is rolled at 32 MiB and kept four times.
- I-SES-3  What the caller sets in `conf` wins over every default here.
- I-SES-4  A Connect server that does not answer is told within `REACH_SECONDS`: pyspark itself tries for minutes.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from millstream.errors import ConnectionFailed, InvalidArgument, SetupError
from millstream.spark.deploy.required_versions import require_spark
from millstream.spark.java import ensure_java

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

LOOPBACK: Final = "127.0.0.1"
DEFAULT_MASTER: Final = "local[*]"
CONNECT_PORT: Final = 15002
REACH_SECONDS: Final = 10.0
JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_LOG_CONFIGURATION: Final = """status = error
rootLogger.level = {level}
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {path}
appender.file.filePattern = {path}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd'T'HH:mm:ss.SSS}} %p %c{{1}}: %m%n%ex
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 32MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
"""


def is_local(master: str) -> bool:
    """True if driver and executors of this master run on this machine."""
    return master == "local" or master.startswith(("local[", "local-cluster["))


def build_session(
    app_name: str,
    *,
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
    log_file: Path | None = None,
    log_level: str = "warn",
) -> SparkSession:
    """A session on `master` (default `local[*]`), or a Connect session on `remote` (`sc://host:port`).

    Raises `SetupError` when pyspark, pyarrow or Java is missing or too old. A session that this process already has is
    returned as it is, with `conf` applied where Spark allows it.
    """
    if master is not None and remote is not None:
        raise InvalidArgument("choose a master or a remote, not both")
    require_spark()
    if remote is not None:
        return _remote_session(app_name, remote, dict(conf or {}))
    master = master or DEFAULT_MASTER
    ensure_java()
    settings = {**(_local_defaults() if is_local(master) else {}), **(conf or {})}
    if is_local(master):
        _stay_on_this_machine()
    return _classic_session(app_name, master, settings, log_file, log_level)


def _local_defaults() -> dict[str, str]:
    cores = os.cpu_count() or 2
    return {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # 200 shuffle partitions are made for a cluster; here they only cost start-up time.
        "spark.sql.shuffle.partitions": str(max(2, cores)),
    }


def _stay_on_this_machine() -> None:
    """What only the environment can say, before the JVM starts."""
    os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def _remote_session(app_name: str, remote: str, conf: dict[str, str]) -> SparkSession:
    from pyspark.errors import PySparkImportError
    from pyspark.sql import SparkSession

    if is_local(remote):  # a server inside a JVM of ours
        ensure_java()
        _stay_on_this_machine()
        conf = {**_local_defaults(), **conf}
    else:
        _reach_connect_server(remote)
    try:
        builder = SparkSession.builder.remote(remote).appName(app_name)
        for name, value in conf.items():
            builder = builder.config(name, value)
        return builder.getOrCreate()
    except PySparkImportError as error:
        raise SetupError(
            f"a Connect session needs more packages: {error}", hint="pip install 'pyspark[connect]'"
        ) from error


def _reach_connect_server(remote: str) -> None:
    """Returns when somebody listens there; what he speaks is told by the session that follows."""
    try:
        address = urlsplit(remote)
        host, port = address.hostname, address.port or CONNECT_PORT
    except ValueError as error:
        raise InvalidArgument(f"{remote!r} is not an address: {error}") from None
    if address.scheme != "sc" or not host:
        raise InvalidArgument(
            f"{remote!r} is not the address of a Connect server", hint="sc://host:port"
        )
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionFailed(
            f"no Spark Connect server answers at {host}:{port}: {error.strerror or error}",
            hint="start one with Spark's sbin/start-connect-server.sh, or leave --remote out to run here",
        ) from None


def _classic_session(
    app_name: str, master: str, conf: dict[str, str], log_file: Path | None, log_level: str
) -> SparkSession:
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder.appName(app_name).master(master)
    for name, value in conf.items():
        builder = builder.config(name, value)
    if log_file is None:
        session: SparkSession = builder.getOrCreate()
        return session
    folder = Path(tempfile.mkdtemp(prefix="millstream-log-"))
    try:
        options = _log_options(log_file.absolute(), log_level, folder)
        options = " ".join(filter(None, (conf.get(JAVA_OPTIONS), options)))
        builder = builder.config(JAVA_OPTIONS, options)
        _start_jvm({**conf, "spark.master": master, JAVA_OPTIONS: options}, log_file.absolute())
        session = builder.getOrCreate()
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # read once, at the start of the JVM
    return session


def _log_options(log_file: Path, level: str, folder: Path) -> str:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    described = str(log_file).replace("\\", "\\\\").replace("$", "$$")
    configuration = folder / "log4j2.properties"
    configuration.write_text(_LOG_CONFIGURATION.format(level=level, path=described))
    return f"-Dlog4j2.configurationFile={configuration.as_uri()}"


def _start_jvm(conf: dict[str, str], log_file: Path) -> None:
    """Start the driver's JVM with its raw output in `log_file`, unless this process has one already."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    # The JVM's memory and options are fixed when it starts, so it must see the settings now.
    described = SparkConf(loadDefaults=False)
    for name, value in conf.items():
        described.set(name, value)
    with log_file.open("ab") as output:
        to_file = {"stdout": output, "stderr": output}
        gateway = launch_gateway(described, to_file)  # type: ignore[no-untyped-call]
    SparkContext._ensure_initialized(gateway=gateway)
