"""The life of a server process: recover, serve, and leave in order.

Sits below `control` and never imports it: the control application comes in as a factory. The main thread waits for
signals, the engine has its own threads, the control application has one thread with an event loop.
Order: lock, bind and recover (Engine), listen on the private socket, `engine.start`, load the control plane, say
"listening". A signal takes it apart: control plane, engine (drain, sync, clean mark), exit.
Invariants: standard output carries exactly one line; clients delay a clean stop by less than 2 s, and a disk for as
long as it gets on, within a bound; what threads still do then delays the end of the process by `LINGER_MAX_S` at most
and does not change its code; a second signal ends the process at once with 130; every failure to start is one
line on standard error and 1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from millstream._engine import Engine, EngineError
from millstream.server.control_thread import ControlFailed, ControlThread, Progress
from millstream.server.private_socket import private_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from starlette.types import ASGIApp

    from millstream.settings import Settings

    AppFactory = Callable[[Engine, Settings, Progress], ASGIApp]

DRAIN_MS: Final = 1_300
CONTROL_STOP_S: Final = 0.5
# A stop that gives up costs weak streams their clean restart: it does so when nothing gets on any more.
STILL_MAX_S: Final = 10.0
STOP_MAX_S: Final = 120.0
# A cancelled backup that removes what it wrote.
LINGER_MAX_S: Final = 5.0
TELL_EVERY_S: Final = 2.0
LOOK_AT_STOP_S: Final = 0.1
EXIT_SECOND_SIGNAL: Final = 130
LOOK_AGAIN_S: Final = 1.0

_REPAIR: Final = (
    "`millstream verify --data-dir DIR` shows all damage, and with --repair keeps what is intact; "
    "see docs/operating/verify.md"
)
_HINTS: Final = {
    "port_in_use": "stop what listens there, or choose another --port (0 picks a free one)",
    "bind_failed": "--host must be an address of this machine",
    "directory_locked": "stop the other server, or choose another --data-dir",
    "log_damaged": _REPAIR,
    "catalog_damaged": _REPAIR,
    "format_missing": (
        "choose an empty --data-dir, or the one a server has used before; "
        "a backup becomes one by `millstream restore`"
    ),
    "format_unknown": "this directory was written by another version; use that one, or another --data-dir",
}


def run_server(settings: Settings, app_factory: AppFactory | None = None) -> int:
    """Serves until SIGTERM or SIGINT; the process's exit code.

    Without an application factory the data path is served alone, and `/-/` and `__ds` answer 503.
    """
    signals = Signals()
    with signals.installed(), ExitStack() as stack:
        try:
            engine = _recover(settings, signals)
        except EngineError as error:
            return _failed(error.code, error.detail)
        except ValueError as error:
            return _failed("settings", str(error))
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


def _recover(settings: Settings, signals: Signals) -> Engine:
    """Opens the engine in a thread of its own, so that a signal can end a long recovery."""
    engine: list[Engine] = []
    failure: list[Exception] = []

    def open_engine() -> None:
        try:
            engine.append(Engine(settings.engine_settings(), _progress))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            failure.append(error)
        signals.notice()

    threading.Thread(target=open_engine, name="millstream-recover", daemon=True).start()
    signals.wait_for(lambda: bool(engine or failure))
    if failure:
        raise failure[0]
    if not engine:
        # Nothing was acknowledged or made visible yet, and recovery may be cut at any point.
        print("stopped while recovering", file=sys.stderr, flush=True)
        os._exit(0)
    return engine[0]


def _start(
    engine: Engine, settings: Settings, app_factory: AppFactory | None, stack: ExitStack
) -> ControlThread | None:
    if app_factory is None:
        engine.start(None)
        return None
    path, listener = stack.enter_context(private_socket(settings.data_dir))
    # The socket listens before the engine forwards to it: early requests wait instead of failing.
    engine.start(path)
    progress = Progress()
    control = ControlThread(app_factory(engine, settings, progress), listener, progress)
    control.start()
    return control


def _stop(engine: Engine, control: ControlThread | None) -> int:
    """Leaves in order. Whatever hangs, the process ends."""
    stopped = threading.Event()
    threading.Thread(target=_watch_stop, args=(engine, stopped), daemon=True).start()
    failure = control.failure if control is not None else None
    if control is not None:
        engine.announce_stop()
        control.stop(CONTROL_STOP_S)
    try:
        engine.stop(DRAIN_MS)
    except EngineError as error:
        return _failed(error.code, error.detail)
    finally:
        stopped.set()
    return 0 if failure is None else _failed("control", failure)


def _watch_stop(engine: Engine, stopped: threading.Event) -> None:
    """Says what a long stop waits for; ends the process when it does not get on, or takes too long altogether."""
    began = moved = told = time.monotonic()
    seen = engine.stop_progress()
    while not stopped.wait(LOOK_AT_STOP_S):
        now, before, seen = time.monotonic(), seen, engine.stop_progress()
        if seen != before:
            moved = now
        what, streams, _ = seen
        waits = f"waiting for {what or 'the control plane'}, streams to checkpoint: {streams}"
        if now - moved > STILL_MAX_S or now - began > STOP_MAX_S:
            _progress(
                f"error: shutdown took too long, {waits}; exiting without the clean-shutdown mark"
            )
            os._exit(1)
        if now - told > TELL_EVERY_S:
            told = now
            _progress(f"stopping: {waits}")


def end_in_time(code: int) -> None:
    """Has the process end with this code, also if a thread that it waits for at its end never ends."""
    threading.Thread(target=_end_late, args=(code,), daemon=True).start()


def _end_late(code: int) -> None:
    threading.Event().wait(LINGER_MAX_S)
    main = threading.main_thread()
    left = [one.name for one in threading.enumerate() if not one.daemon and one is not main]
    _progress(f"stopped; not waiting any longer for {', '.join(left) or 'the interpreter'}")
    os._exit(code)


class Signals:
    """SIGTERM and SIGINT: the first asks for a clean stop, the second ends the process."""

    def __init__(self) -> None:
        self._asked = False
        # A handler runs between any two steps of the thread that waits: unlike an event, this has no lock to be caught in.
        self._noticed: SimpleQueue[None] = SimpleQueue()

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
            if not self._asked:  # after a first signal the second must still end the process
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def notice(self) -> None:
        """Has whoever waits look again."""
        self._noticed.put(None)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition` holds after a notice, or when a stop was asked for."""
        while not (self._asked or condition()):
            # A signal just before the wait begins is handled only when it ends.
            with suppress(Empty):
                self._noticed.get(timeout=LOOK_AGAIN_S)

    def wait(self, control: ControlThread | None) -> None:
        """Returns when a stop was asked for, or when the control plane died."""
        if control is not None:
            control.when_ended(self.notice)
        self.wait_for(lambda: control is not None and control.ended)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._asked:
            os._exit(EXIT_SECOND_SIGNAL)
        self._asked = True
        self._noticed.put(None)


def _listening_line(settings: Settings, port: int) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return (
        f"listening on http://{host}:{port} data={settings.data_dir} "
        f"durability={settings.durability}"
    )


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _failed(code: str, detail: str) -> int:
    hint = _HINTS.get(code)
    line = f"error: {detail} ({code})" + (f" (hint: {hint})" if hint else "")
    print(" ".join(line.split()), file=sys.stderr, flush=True)
    return 1
