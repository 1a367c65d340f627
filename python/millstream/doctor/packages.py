"""Checks of what is installed: Python, pyspark, pyarrow, protobuf, pandas, Java.

Where it sits: one theme of `millstream doctor`. Asks for versions without importing the libraries.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING

from millstream.doctor.finding import Finding, fail, ok, warn
from millstream.spark import java as spark_java
from millstream.spark.deploy import required_versions

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON_AT_LEAST = (3, 11)
WITHOUT = "streams work; the pipeline does not"


def python() -> Iterator[Finding]:
    import millstream

    text = f"Python {platform.python_version()}, millstream {millstream.__version__}"
    if sys.version_info < PYTHON_AT_LEAST:
        yield fail("python", f"{text}: too old", "use Python 3.11 or newer")
    else:
        yield ok("python", text)


def pyspark() -> Iterator[Finding]:
    """pyspark, and what the connector needs beside it."""
    spark = required_versions.installed("pyspark")
    if spark is None:
        yield warn("pyspark", f"not installed ({WITHOUT})", required_versions.INSTALL_HINT)
        return
    if required_versions.pyspark_fits(spark):
        yield ok("pyspark", spark)
    else:
        yield fail(
            "pyspark", f"{spark}, needed is 4.2 or newer, below 5", required_versions.INSTALL_HINT
        )
    yield _beside("pyarrow", required_versions.PYARROW_AT_LEAST)
    yield _beside("protobuf", required_versions.PROTOBUF_AT_LEAST)
    yield _pandas()
    yield from _spark_home()


def _beside(package: str, at_least: tuple[int, ...]) -> Finding:
    version = required_versions.installed(package)
    if version is None:
        return fail(package, "not installed", required_versions.INSTALL_HINT)
    if required_versions.numbers(version) < at_least:
        needed = ".".join(map(str, at_least))
        return fail(
            package, f"{version}, needed is {needed} or newer", required_versions.INSTALL_HINT
        )
    return ok(package, version)


def _pandas() -> Finding:
    """Spark asks for it in `transformWithState`, which two of the jobs use."""
    version = required_versions.installed("pandas")
    if version is None:
        text = "not installed (jobs `sessionise` and `metrics` do not run without it)"
        return warn("pandas", text, required_versions.INSTALL_HINT)
    if (
        not required_versions.PANDAS_AT_LEAST
        <= required_versions.numbers(version)
        < required_versions.PANDAS_BELOW
    ):
        return warn(
            "pandas", f"{version}, needed is 2.2 or newer, below 3", required_versions.INSTALL_HINT
        )
    return ok("pandas", version)


def _spark_home() -> Iterator[Finding]:
    """A SPARK_HOME of another version makes Python and JVM disagree, with errors that do not say so."""
    home = os.environ.get("SPARK_HOME")
    if not home:
        return
    jars = os.path.join(home, "jars")
    version = required_versions.installed("pyspark") or ""
    if not os.path.isdir(jars):
        yield fail(
            "SPARK_HOME",
            f"`{home}` does not contain Spark",
            "unset SPARK_HOME; pyspark brings its own",
        )
        return
    found = [name for name in os.listdir(jars) if name.startswith("spark-core_")]
    same = any(name.endswith(f"-{version}.jar") for name in found)
    if found and not same:
        yield fail(
            "SPARK_HOME",
            f"`{home}` is a different Spark than pyspark {version}",
            "unset SPARK_HOME, or install the pyspark of that version",
        )
    else:
        yield ok("SPARK_HOME", home)


def java() -> Iterator[Finding]:
    """A Java that Spark starts on."""
    chosen, all_found = spark_java.choose()
    if chosen is not None:
        how = f"Java {chosen.version} (found by {chosen.source})"
        yield ok("java", how)
        return
    seen = ", ".join(f"{found.version} ({found.source})" for found in all_found)
    message = f"too old: {seen}; Spark needs 17 or newer" if all_found else "not found"
    if required_versions.installed("pyspark") is None:
        yield warn("java", f"{message} ({WITHOUT})", spark_java.INSTALL_HINT)
    else:
        yield fail("java", message, spark_java.INSTALL_HINT)
