"""The bounds of pyspark and what comes with it, and the one error outside of them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from millstream.errors import SetupError
from millstream.spark.deploy import required_versions

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def test_the_extra_has_the_same_bounds() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert sorted(extras["spark"]) == sorted(
        [
            f"pyspark>={dotted(required_versions.PYSPARK_AT_LEAST)},<{dotted(required_versions.PYSPARK_BELOW)}",
            f"pyarrow>={dotted(required_versions.PYARROW_AT_LEAST)}",
            f"protobuf>={dotted(required_versions.PROTOBUF_AT_LEAST)}",
            f"pandas>={dotted(required_versions.PANDAS_AT_LEAST)},<{dotted(required_versions.PANDAS_BELOW)}",
        ]
    )


@pytest.mark.parametrize(
    ("version", "fits"),
    [("4.1.9", False), ("4.2.0", True), ("4.3.0.dev1", True), ("4.10", True), ("5.0.0", False)],
)
def test_pyspark_versions(version: str, fits: bool) -> None:
    assert required_versions.pyspark_fits(version) is fits


@pytest.mark.parametrize(
    ("present", "said"),
    [
        ({}, "pyspark is not installed"),
        ({"pyspark": "3.5.4", "pyarrow": "18.0"}, "pyspark 3.5.4 does not fit"),
        ({"pyspark": "4.3.0"}, "pyarrow is not installed"),
        ({"pyspark": "4.3.0", "pyarrow": "15.0.2"}, "pyarrow 15.0.2 does not fit"),
    ],
)
def test_what_is_said(present: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(required_versions, "installed", present.get)
    with pytest.raises(SetupError, match=said) as raised:
        required_versions.require_spark()
    assert raised.value.hint == "pip install 'millstream[spark]'"


def test_what_is_here_fits() -> None:
    required_versions.require_spark()
    assert required_versions.installed("no-such-package") is None


OLD = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "4.1.4" if name == "pyspark" else real(name)
sys.modules["pyspark.sql.streaming.datasource"] = None  # what 4.1 lacks
from millstream.errors import SetupError
import millstream.spark
try:
    millstream.spark.MillstreamDataSource
except SetupError as error:
    print(error.code, error.message, error.hint, sep="|")
import pyspark_millstream
try:
    pyspark_millstream.DefaultSource({})
except RuntimeError as error:
    print(error)
"""


def test_an_older_pyspark_is_one_sentence_wherever_it_is_met() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OLD], capture_output=True, text=True, timeout=60, check=True
    )
    by_name, by_format = done.stdout.splitlines()
    sentence = "pyspark 4.1.4 does not fit: the connector needs 4.2 or newer, below 5"
    assert by_name == f"setup_incomplete|{sentence}|{required_versions.INSTALL_HINT}"
    assert by_format == f"setup_incomplete: {sentence}. Hint: {required_versions.INSTALL_HINT}."
