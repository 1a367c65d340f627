"""A real engine without a listener, for tests of what stands on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream._engine import Engine

OpenEngine = Callable[[], Engine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    """Opens the engine over the test's directory; opening it again stops it first."""
    opened: list[Engine] = []

    def open_it() -> Engine:
        while opened:
            opened.pop().stop()
        engine = Engine({"data_dir": str(tmp_path / "data"), "listen": False})
        engine.start()
        opened.append(engine)
        return engine

    yield open_it
    while opened:
        opened.pop().stop()


@pytest.fixture
def engine(open_engine: OpenEngine) -> Engine:
    return open_engine()
