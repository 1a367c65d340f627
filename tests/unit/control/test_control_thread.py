"""The thread of the control application: how long its start is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.applications import Starlette

from millstream.server import control_thread
from millstream.server.control_thread import ControlFailed, ControlThread, Progress

PATIENCE_S = 0.3


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(control_thread, "START_TIMEOUT_S", PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def loading(progress: Progress, steps: int) -> Starlette:
    """An application that takes three times the patience to load, in so many steps."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for _ in range(steps):
            await asyncio.sleep(3 * PATIENCE_S / steps)
            progress()
        yield

    return Starlette(lifespan=lifespan)


def test_a_load_that_gets_on_is_waited_for(listener: socket.socket) -> None:
    progress = Progress()
    thread = ControlThread(loading(progress, 30), listener, progress)
    thread.start()
    assert progress.steps == 30
    thread.stop(5)


def test_a_load_that_does_not_is_given_up(listener: socket.socket) -> None:
    progress = Progress()
    thread = ControlThread(loading(progress, 1), listener, progress)
    with pytest.raises(ControlFailed, match="no further"):
        thread.start()
    thread.stop(5)
