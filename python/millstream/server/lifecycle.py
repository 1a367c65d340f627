"""The life of a server process: recover, serve, and leave in order.

Sits below `control` and never imports it: the control application comes in as a factory. The main thread waits for
signals, the engine has its own threads, the control application has one thread with an event loop.
Order: lock, bind and recover (Engine), listen on the private socket, `engine.start`, load the control plane, say
"listening". A signal takes it apart: control plane, engine (drain, sync, clean mark), exit.
Invariants: standard output carries exactly one line; a clean stop ends with 0 in under 2 s whatever clients do; a
second signal ends the process at once with 130; every failure to start is one line on standard error and 1.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from millstream._engine import Engine, EngineError
from millstream.server.control_thread import ControlFailed, ControlThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from starlette.types import ASGIApp

    from millstream.settings import Settings

    AppFactory = Callable[[Engine, Settings], ASGIApp]

DRAIN_MS: Final = 1_300
CONTROL_STOP_S: Final = 0.5
EXIT_DEADLINE_S: Final = 1.95
EXIT_SECOND_SIGNAL: Final = 130
UNIX_PATH_BYTES_MAX: Final = 107

_HINTS: Final = {
    "address_in_use": "another program listens there; choose another --port, or --port 0 for a free one",
    "directory_locked": "another server uses this directory; stop it, or choose another --data-dir",
    "locked": "another server uses this directory; stop it, or choose another --data-dir",
    "corrupt": "run `millstream verify` on the directory; `millstream verify --repair` keeps what is valid",
}


def run_server(settings: Settings, app_factory: AppFactory | None = None) -> int:
    """Serves until SIGTERM or SIGINT; the process's exit code.

    Without an application factory the data path is served alone, and `/-/` and `__ds` answer 503.
    """
    signals = Signals()
    with signals.installed(), ExitStack() as stack:
        try:
            engine = Engine(settings.engine_settings(), _progress)
        except EngineError as error:
            return _failed(error.code, error.detail)
        try:
            control = _start(engine, settings, app_factory, stack)
        except (EngineError, ControlFailed, OSError) as error:
            engine.stop(DRAIN_MS)
            if isinstance(error, EngineError):
                return _failed(error.code, error.detail)
            return _failed("control", str(error))
        print(_listening_line(settings, engine.port), flush=True)
        signals.wait(control)
        return _stop(engine, control)


def _start(
    engine: Engine, settings: Settings, app_factory: AppFactory | None, stack: ExitStack
) -> ControlThread | None:
    if app_factory is None:
        engine.start(None)
        return None
    path, listener = stack.enter_context(_private_socket())
    # The socket listens before the engine forwards to it: early requests wait instead of failing.
    engine.start(path)
    control = ControlThread(app_factory(engine, settings), listener)
    control.start()
    return control


def _stop(engine: Engine, control: ControlThread | None) -> int:
    """Leaves in order. Whatever hangs, the process is gone before two seconds are over."""
    deadline = threading.Timer(EXIT_DEADLINE_S, _give_up)
    deadline.daemon = True
    deadline.start()
    failed = control is not None and control.failure is not None
    if control is not None:
        control.stop(CONTROL_STOP_S)
    try:
        engine.stop(DRAIN_MS)
    except EngineError as error:
        return _failed(error.code, error.detail)
    if control is not None and control.failure is not None and failed:
        return _failed("control", control.failure)
    return 0


def _give_up() -> None:
    print(
        "error: shutdown took too long; ending without the clean mark", file=sys.stderr, flush=True
    )
    os._exit(1)


class Signals:
    """SIGTERM and SIGINT: the first asks for a clean stop, the second ends the process."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # embedded in another program, which owns the signals
            return
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            if (
                not self._asked.is_set()
            ):  # after a first signal the second must still end the process
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def wait(self, control: ControlThread | None) -> None:
        """Returns when a stop was asked for, or when the control plane died."""
        if control is not None:
            control.when_ended(self._asked.set)
        self._asked.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._asked.is_set():
            os._exit(EXIT_SECOND_SIGNAL)
        self._asked.set()


@contextmanager
def _private_socket() -> Iterator[tuple[str, socket.socket]]:
    """A listening unix socket in a directory that only this user can enter."""
    with TemporaryDirectory(prefix="millstream-", dir=_short_directory()) as directory:
        path = str(Path(directory) / "control.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(1024)
            yield path, listener


def _short_directory() -> str | None:
    """Where to put the socket: the usual place for temporary files unless its name is too long."""
    usual = os.environ.get("TMPDIR", "/tmp")  # noqa: S108 - the directory made in it is private
    fits = len(os.fsencode(usual)) + len("/millstream-XXXXXXXX/control.sock") <= UNIX_PATH_BYTES_MAX
    return None if fits else "/tmp"  # noqa: S108


def _listening_line(settings: Settings, port: int) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return (
        f"listening on http://{host}:{port} data={settings.data_dir} "
        f"durability={settings.durability}"
    )


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _failed(code: str, detail: str) -> int:
    hint = next((text for key, text in _HINTS.items() if key in code), None)
    line = f"error: {detail}" + (f" (hint: {hint})" if hint else "")
    print(" ".join(line.split()), file=sys.stderr, flush=True)
    return 1
