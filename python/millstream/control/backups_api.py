"""Backups over HTTP: `POST /-/api/backups`, `GET` and `DELETE /-/api/backups/{id}`.

Sits above `backups`. The destination is a directory on the server's machine, so where it may lie is decided here:
Invariants: it is absolute, new, in a directory that exists and outside the data directory; with `backup_dir` it lies
below that, links resolved; a server that others can reach makes backups nowhere else; one destination is looked at at a
time, however long that takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.routing import Route

from millstream.control.background import aside
from millstream.control.backups import BackupRunning, Backups
from millstream.control.http import ApiError, JsonResponse, is_loopback, read_json_object
from millstream.control.lanes import Lane, wait_as_asked
from millstream.control.limits import BACKUP_PATH_BYTES_MAX, BACKUP_PLACES_MAX

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from millstream._engine import Engine
    from millstream.control.backups import Backup

RATE_MIB_MAX: Final = 1_000_000
_KEYS: Final = {"to", "rate_mib_per_second", "allow_damage"}


class BackupSettings(Protocol):
    @property
    def host(self) -> str: ...
    @property
    def data_dir(self) -> str: ...
    @property
    def backup_dir(self) -> str: ...


class BackupRoutes:
    def __init__(self, engine: Engine, settings: BackupSettings, waits: Lane) -> None:
        self._backups = Backups(engine)
        self._waits = waits
        self._places = Lane(engine, BACKUP_PLACES_MAX)
        self._settings = settings

    def routes(self) -> list[Route]:
        one = "/-/api/backups/{id}"
        return [
            Route("/-/api/backups", self.start, methods=["POST"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.cancel, methods=["DELETE"]),
        ]

    async def close(self) -> None:
        await self._backups.close()

    async def start(self, request: Request) -> Response:
        """Begins a backup of everything, while everything goes on."""
        asked = await _asked(request)
        with self._places.place():
            to = await aside(lambda: self._destination(asked["to"]), "millstream-backup-place")
        try:
            backup = self._backups.start(
                to, int(asked["rate_mib_per_second"] * (1 << 20)), asked["allow_damage"]
            )
        except BackupRunning as running:
            raise ApiError(
                409,
                "backup_running",
                f"backup {running.identifier} is running",
                "wait for it, or cancel it with DELETE /-/api/backups/{id}",
            ) from None
        headers = {"Location": f"/-/api/backups/{backup.identifier}"}
        return JsonResponse(backup.document(), 202, headers)

    async def get(self, request: Request) -> Response:
        """How far a backup is; with `wait_ms` the answer waits so long for its end."""
        backup = self._find(request)
        await wait_as_asked(request, self._waits, backup.ended)
        return JsonResponse(backup.document())

    async def cancel(self, request: Request) -> Response:
        """Cancels a backup; what it wrote is removed. Nothing happens to one that has ended."""
        backup = self._find(request)
        backup.cancel_asked = True
        return JsonResponse(backup.document(), 202 if backup.state == "running" else 200)

    def _find(self, request: Request) -> Backup:
        identifier: str = request.path_params["id"]
        backup = self._backups.find(identifier)
        if backup is None:
            raise ApiError(
                404,
                "backup_not_found",
                f"there is no backup {identifier!r}",
                "only the most recent backups are remembered, and only until the server stops",
            )
        return backup

    def _destination(self, given: str) -> Path:
        """Where the backup will lie, links resolved; raises if it may not be there."""
        path = Path(os.path.normpath(given))
        if not path.is_absolute() or not path.name:
            raise ApiError(
                400,
                "bad_request",
                f"`to` must be the absolute path of a new directory, not {given!r}",
                "it names a directory on the server's machine",
            )
        try:
            parent = Path(os.path.realpath(path.parent, strict=True))
        except OSError as error:
            raise ApiError(
                400,
                "bad_request",
                f"{str(path.parent)!r} cannot be used: {error.strerror or error}",
                "the directory above the destination must exist on the server's machine",
            ) from error
        to = parent / path.name
        self._check_place(to)
        if os.path.lexists(to):
            raise ApiError(
                409,
                "backup_exists",
                f"{str(to)!r} exists",
                "a backup creates its directory itself; choose another name",
            )
        return to

    def _check_place(self, to: Path) -> None:
        allowed = self._settings.backup_dir
        if allowed:
            if not to.is_relative_to(os.path.realpath(allowed)):
                raise _refused(
                    f"{str(to)!r} is not below backup_dir", "choose a destination below backup_dir"
                )
        elif not is_loopback(self._settings.host):
            raise _refused(
                "this server listens on the network and has no backup_dir",
                "set backup_dir to the directory in which backups may be made",
            )
        if to.is_relative_to(os.path.realpath(self._settings.data_dir)):
            raise _refused(
                "a backup inside the data directory would be lost with it",
                "choose a destination outside the data directory, best on another device",
            )


def _refused(message: str, hint: str) -> ApiError:
    return ApiError(403, "backup_refused", message, hint)


async def _asked(request: Request) -> dict[str, Any]:
    """The body, checked: a misspelt option must not be silently absent."""
    try:
        body = await read_json_object(request)
    except ApiError as error:  # its code is the protocol's, which this is not
        raise _bad(error.detail) from error
    unknown = sorted(set(body) - _KEYS)
    to, rate = body.get("to"), body.get("rate_mib_per_second", 0)
    allow_damage = body.get("allow_damage", False)
    if unknown:
        raise _bad(f"unknown key {unknown[0]!r}")
    if not isinstance(to, str) or not to or "\0" in to:
        raise _bad("`to` must be a path")
    if len(to.encode("utf-8", "surrogatepass")) > BACKUP_PATH_BYTES_MAX:
        raise _bad(f"`to` is longer than {BACKUP_PATH_BYTES_MAX} bytes")
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not number or not 0 <= rate <= RATE_MIB_MAX:
        raise _bad(f"`rate_mib_per_second` must be a number from 0 to {RATE_MIB_MAX}")
    if not isinstance(allow_damage, bool):
        raise _bad("`allow_damage` must be true or false")
    return {"to": to, "rate_mib_per_second": rate, "allow_damage": allow_damage}


def _bad(message: str) -> ApiError:
    return ApiError(400, "bad_request", message, 'send {"to": "/absolute/path/of/a/new/directory"}')
