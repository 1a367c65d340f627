"""The extras `[spark]` and `[java]` alone are enough: no other package, no other Java.

One session in an interpreter that lacks everything else which is installed here for tests (numpy, grpc, ...), and
pandas, which only the jobs `sessionise` and `metrics` need, with a PATH that has no Java: the connector reads and writes, a batch and a stream.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from millstream.client.sync.client import Client
from support.bare_python import bare_python, path_without
from support.server import Server
from support.spark import environment

pytestmark = pytest.mark.long

OTHERS = (
    r"(pandas|numpy|grpc|googleapis|zstandard|deltalake|pyiceberg|sqlalchemy|arro3|pydantic|rich"
    r"|requests|hypothesis|pytest|_pytest|fsspec|strictyaml|tenacity|mypy|ruff|maturin).*"
)
SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
from millstream.spark.session import build_session

url, folder = sys.argv[1:]
assert not [name for name in ("pandas", "numpy", "grpc") if importlib.util.find_spec(name)]
spark = build_session("extras", master="local[2]", conf={"spark.driver.memory": "512m"},
                      log_file=Path(folder) / "jvm.log")
options = {"url": url, "subscribe": "in", "startingOffsets": "earliest"}
stream = spark.readStream.format("millstream").options(**options).load()
query = (stream.select("value").writeStream.format("millstream").options(url=url, stream="out")
         .option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start())
assert query.awaitTermination(100)
batch = spark.read.format("millstream").options(url=url, subscribe="out").load()
batch.select("value").write.format("millstream").options(url=url, stream="out").mode("append").save()
print(json.dumps({
    "count": spark.read.format("millstream").options(url=url, subscribe="out").load().count(),
    "java": spark.sparkContext.getSystemProperty("java.version"),
}))
spark.stop()
"""


def test_the_extras_alone(server: Server, client: Client, tmp_path: Path) -> None:
    client.create("in", content_type="application/json").append_many(list(range(100)))
    client.create("out", content_type="application/json")
    python = bare_python(tmp_path / "venv", without=OTHERS)
    env = environment(tmp_path, {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python})
    env.pop("JAVA_HOME", None)
    env["PATH"] = path_without("java.*", tmp_path / "path")
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    folder = tmp_path / "a folder"
    folder.mkdir()
    done = subprocess.run(
        [python, "-c", SCRIPT, server.url, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["count"] == 200
    assert seen["java"].startswith("21.")
    assert "incubator" not in done.stderr, "the JVM's own output belongs in the log"
    assert "INFO" not in done.stderr
    assert (folder / "jvm.log").exists()
