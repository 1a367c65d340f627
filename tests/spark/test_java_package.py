"""Spark on the Java of the extra `[java]`, where no other Java is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.commands import path_without
from support.spark import environment

SCRIPT = """
import json, sys
from pathlib import Path
from millstream.spark.session import build_session
session = build_session("java", master="local[1]", conf={"spark.driver.memory": "512m"},
                        log_file=Path(sys.argv[1]))
print(json.dumps({
    "count": session.range(1000).selectExpr("id % 7 as k").groupBy("k").count().count(),
    "java": session.sparkContext.getSystemProperty("java.version"),
}))
session.stop()
"""


def test_spark_runs_on_the_packaged_java(tmp_path: Path) -> None:
    env = environment(tmp_path)
    env.pop("JAVA_HOME", None)
    env["PATH"] = path_without("java.*", tmp_path / "path")
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    log = tmp_path / "logs folder" / "jvm.log"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(log)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["count"] == 7
    assert seen["java"].startswith("21.")
    assert "java" not in done.stderr.lower(), "the JVM's own output belongs in the log"
    assert log.exists()
