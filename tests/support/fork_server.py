"""The program that becomes server processes: `millstream serve` with everything loaded, once for each request.

Started by `support.forking`, one per process of pytest. Loading the modules is two thirds of a start, and the tests
start more than a thousand servers. This program loads them, starts no thread and runs nothing; for each request it forks, and
the child goes on exactly as the console script would: `main()` with its arguments, and the interpreter's own end.

Over the socket whose descriptor is the only argument, one JSON object per packet:

    {"start": [...], "cwd": ..., "environment": {...}}  and the descriptor for output  ->  {"pid": 17}
    {"reap": 17}  once that process has ended                                          ->  {"status": 9}

Invariants: a child is reaped only when asked for, so its number is nobody else's until then; when pytest ends, so does
this program, and with it every server.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from importlib import import_module

from millstream.cli import main

# What `millstream serve` loads later, and nothing more.
LOADED_LATER = (
    "millstream.cli.serve",
    "millstream.control.app",
    "millstream.server.lifecycle",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.h11_impl",
)
PACKET_BYTES_MAX = 1 << 18
PR_SET_PDEATHSIG = 1


def serve_requests(channel: socket.socket) -> list[str] | None:
    """Until pytest closes the channel: None. In each child: the command that it is to be."""
    while True:
        packet, descriptors, _, _ = socket.recv_fds(channel, PACKET_BYTES_MAX, 1)
        if not packet:
            return None
        request = json.loads(packet)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            channel.send(json.dumps({"status": status}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            become(request, descriptors[0])
            command: list[str] = request["start"]
            return command
        os.close(descriptors[0])
        channel.send(json.dumps({"pid": pid}).encode())


def become(request: dict[str, object], output: int) -> None:
    """What `Popen` does between fork and exec."""
    parent = os.getppid()
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    os.chdir(str(request["cwd"]))
    environment = request["environment"]
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)


if __name__ == "__main__":
    for module in LOADED_LATER:
        import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    chosen = serve_requests(socket.socket(fileno=int(sys.argv[1])))
    if chosen is not None:
        gc.unfreeze()
        sys.argv = chosen
        sys.exit(main())
