"""The package as it is imported: cheap, lazy, complete."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

import millstream

HEAVY = (
    "pyspark",
    "pyarrow",
    "starlette",
    "uvicorn",
    "rich",
    "click",
    "cryptography",
    "millstream._engine",
)


def fresh(code: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.parametrize("code", ["import millstream", "import millstream; millstream.connect()"])
def test_the_client_loads_nothing_heavy(code: str) -> None:
    modules = json.loads(fresh(f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"))
    loaded = [name for name in modules if name.split(".")[0] in HEAVY or name in HEAVY]
    assert loaded == []


def test_import_takes_less_than_80_ms() -> None:
    code = (
        "import time; began = time.perf_counter(); import millstream;"
        "print((time.perf_counter() - began) * 1000)"
    )
    # The best of a few: a busy machine slows a run down, nothing speeds it up.
    assert min(float(fresh(code)) for _ in range(5)) < 80


def test_every_public_name_can_be_had() -> None:
    for name in millstream.__all__:
        assert getattr(millstream, name) is not None
    assert set(millstream.__all__) <= set(dir(millstream))
    with pytest.raises(AttributeError):
        _ = millstream.no_such_thing


def test_a_client_travels_to_another_process_without_its_connections() -> None:
    client = millstream.connect("http://example.test:1/x", headers={"A": "b"}, timeout_seconds=3)
    copy = pickle.loads(pickle.dumps(client))
    assert copy.url == client.url
    assert copy._headers == {"A": "b"}
    assert copy._operations.timeout_seconds == 3
