"""Every setting of Millstream, once: the table behind flags, environment, file and docs.

Where it sits: read by `cli/serve.py` (flags), by `server/` (values), by the docs
generator (`TABLE`). It imports nothing of the package but `errors`.

Invariants:
- I-SET-1  A setting exists exactly once, as a field of `Settings`; `TABLE` is derived from it.
- I-SET-2  Precedence: flag > environment (`MILLSTREAM_<NAME>`) > file > default.
- I-SET-3  An unknown key in the file and a value out of range are errors, never ignored.
- I-SET-4  Loaded settings bind only to loopback unless `insecure` was said explicitly.

Example of a file (every key is optional):

    # millstream.toml
    port = 4437
    data_dir = "/var/lib/millstream"
    durability = "fsync"
    append_max_bytes = "32MiB"
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

DURABILITY_HELP: Final = {
    "ephemeral": "only in this process: every restart loses the records, never the stream",
    "memory": "acknowledged before it is written; a crash may lose the last records",
    "disk": "acknowledged when written; survives kill -9, a power cut costs some milliseconds",
    "fsync": "acknowledged when synced to disk; nothing is lost",
    "quorum": "synced by a majority of servers; not offered yet",
    "object": "stored in an object store; not offered yet",
}
"""What an acknowledgement means, one line per class; shown by `--help`."""
DURABILITY_CLASSES: Final = tuple(DURABILITY_HELP)
ENVIRONMENT_PREFIX: Final = "MILLSTREAM_"
CONFIG_FILE_NAME: Final = "millstream.toml"
DEFAULT_URL: Final = "http://127.0.0.1:4437"

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


class Kind(Enum):
    """What a value looks like when a person types it."""

    TEXT = "text"
    PATH = "path"
    INTEGER = "integer"
    SIZE = "size"
    MILLISECONDS = "milliseconds"
    FLAG = "flag"
    CHOICE = "choice"
    PLACES = "places"
    """Addresses, networks and host names, with or without a port; see `allowlists`."""
    ORIGINS = "origins"
    """What browsers send as `Origin`; see `allowlists`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    kind: Kind
    default: str | int | bool
    help: str
    group: str
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    serve: bool = True
    """True: a flag of `millstream serve`. False: a setting of the client commands."""
    engine: bool = True
    """True: handed to the engine under the same name."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default as a person would write it, for help and docs."""
        if self.kind is Kind.SIZE and isinstance(self.default, int):
            return format_size(self.default)
        if self.kind is Kind.FLAG:
            return "true" if self.default else "false"
        return str(self.default)


def _row(
    default: Any,
    text: str,
    *,
    kind: Kind,
    group: str,
    minimum: int | None = None,
    maximum: int | None = None,
    choices: tuple[str, ...] = (),
    serve: bool = True,
    engine: bool = True,
) -> Any:
    """A dataclass field that carries its row of the table."""
    row: dict[str, Any] = {
        "kind": kind,
        "help": text,
        "group": group,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "serve": serve,
        "engine": engine,
    }
    return field(default=default, metadata=row)


def _milliseconds(default: int, text: str, *, group: str, minimum: int = 1) -> Any:
    day_ms = 24 * 60 * 60 * 1000
    return _row(default, text, kind=Kind.MILLISECONDS, group=group, minimum=minimum, maximum=day_ms)


def _size(default: int, text: str, *, group: str, minimum: int, maximum: int) -> Any:
    return _row(default, text, kind=Kind.SIZE, group=group, minimum=minimum, maximum=maximum)


def _count(default: int, text: str, *, group: str, minimum: int, maximum: int) -> Any:
    return _row(default, text, kind=Kind.INTEGER, group=group, minimum=minimum, maximum=maximum)


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force. Build it with `load_settings`; `Settings()` is all defaults."""

    data_dir: str = _row(
        "./millstream-data", "directory that holds all data", kind=Kind.PATH, group="server"
    )
    host: str = _row("127.0.0.1", "address to listen on", kind=Kind.TEXT, group="server")
    port: int = _count(
        4437, "port to listen on; 0 picks a free one", group="server", minimum=0, maximum=65535
    )
    durability: str = _row(
        "fsync",
        "durability class of streams that do not name one",
        kind=Kind.CHOICE,
        group="server",
        choices=DURABILITY_CLASSES,
    )
    insecure: bool = _row(
        False,
        "allow a non-loopback address although there is no authentication",
        kind=Kind.FLAG,
        group="server",
    )
    public_url: str = _row(
        "",
        "URL at which clients reach this server, if it is behind a proxy",
        kind=Kind.TEXT,
        group="server",
    )
    webhook_allow: str = _row(
        "",
        "webhook targets beyond public https: addresses, networks and host names, each with a port "
        "if wanted, separated by commas",
        kind=Kind.PLACES,
        group="server",
        engine=False,
    )
    subscription_origins: str = _row(
        "",
        "origins of web pages that may use subscriptions, besides the server's own, separated by commas",
        kind=Kind.ORIGINS,
        group="server",
    )
    reactors: int = _count(
        0,
        "network threads; 0 means one less than the cores, at least one",
        group="server",
        minimum=0,
        maximum=64,
    )
    long_poll_timeout_ms: int = _milliseconds(
        30_000, "how long a long-poll waits for data", group="live"
    )
    sse_lifetime_ms: int = _milliseconds(
        60_000, "age at which an SSE connection is ended for recycling", group="live", minimum=1000
    )
    sse_keepalive_ms: int = _milliseconds(
        15_000, "silence after which an SSE connection gets a comment line", group="live"
    )
    read_window_bytes: int = _size(
        4 * MIB, "most bytes in one read response", group="limits", minimum=4 * KIB, maximum=GIB
    )
    append_max_bytes: int = _size(
        16 * MIB, "largest body of one append", group="limits", minimum=KIB, maximum=GIB
    )
    connections_max: int = _count(
        10_000, "open connections; more get 503", group="limits", minimum=1, maximum=10_000_000
    )
    inflight_bytes_max: int = _size(
        256 * MIB,
        "bytes of request bodies still arriving, of all clients; more get 503",
        group="limits",
        minimum=MIB,
        maximum=1024 * GIB,
    )
    client_bytes_max: int = _size(
        64 * MIB,
        "bytes buffered for clients that do not read their responses; beyond it they get smaller pieces",
        group="limits",
        minimum=16 * MIB,
        maximum=1024 * GIB,
    )
    header_timeout_ms: int = _milliseconds(
        10_000, "time a client has to send the head of a request", group="limits"
    )
    body_timeout_ms: int = _milliseconds(
        30_000,
        "time a client has for a body, plus one millisecond for every 64 bytes that have come",
        group="limits",
    )
    idle_timeout_ms: int = _milliseconds(
        60_000, "time a connection may stay silent between requests", group="limits"
    )
    send_timeout_ms: int = _milliseconds(
        30_000, "time a client may stop reading a response", group="limits"
    )
    disk_sync_ms: int = _milliseconds(
        20, "how long an acknowledged `disk` append may stay unsynced", group="storage"
    )
    ephemeral_bytes_max: int = _size(
        256 * MIB,
        "memory of `ephemeral` streams; what they hold beyond it goes to files that every start discards; at twice as much, appends are refused until they are there (503)",
        group="storage",
        minimum=64 * KIB,
        maximum=1024 * GIB,
    )
    wal_file_bytes: int = _size(
        64 * MIB,
        "size of one log file; never less than `append_max_bytes` and 9 MiB more",
        group="storage",
        minimum=64 * KIB,
        maximum=16 * GIB,
    )
    checkpoint_bytes: int = _size(
        64 * MIB,
        "log bytes after which a checkpoint is written",
        group="storage",
        minimum=64 * KIB,
        maximum=64 * GIB,
    )
    streams_cached_max: int = _count(
        20_000, "streams kept in memory", group="storage", minimum=16, maximum=100_000_000
    )
    sweep_interval_ms: int = _milliseconds(
        1_000, "pause between two searches for expired streams", group="storage"
    )
    backup_dir: str = _row(
        "",
        "directory below which backups may be made; needed on a non-loopback address",
        kind=Kind.PATH,
        group="storage",
        engine=False,
    )
    scrub_bytes_per_second: int = _size(
        8 * MIB,
        "how fast bytes at rest are checked for damage; 0 checks only what looks damaged",
        group="storage",
        minimum=0,
        maximum=64 * GIB,
    )
    scrub_interval_s: int = _count(
        24 * 60 * 60,
        "seconds from the start of one full check to the start of the next",
        group="storage",
        minimum=1,
        maximum=365 * 24 * 60 * 60,
    )
    stage_bytes_max: int = _size(
        4 * GIB,
        "staged records that wait for a commit; more is refused",
        group="storage",
        minimum=MIB,
        maximum=16 * 1024 * GIB,
    )
    stage_ttl_s: int = _count(
        60 * 60,
        "seconds that staged records wait for a commit",
        group="storage",
        minimum=1,
        maximum=30 * 24 * 60 * 60,
    )
    url: str = _row(
        DEFAULT_URL,
        "server that client commands and `millstream.connect()` talk to",
        kind=Kind.TEXT,
        group="client",
        serve=False,
        engine=False,
    )

    def engine_settings(self) -> dict[str, str | int | bool]:
        """The dictionary that the engine takes; `public_url` only when it is set."""
        values: dict[str, str | int | bool] = {"listen": True}
        for row in TABLE:
            if row.engine:
                values[row.name] = getattr(self, row.name)
        if not self.public_url:
            del values["public_url"]
        return values


TABLE: Final[tuple[Setting, ...]] = tuple(
    Setting(name=entry.name, default=entry.default, **entry.metadata)  # type: ignore[arg-type]
    for entry in fields(Settings)
)
BY_NAME: Final[Mapping[str, Setting]] = {row.name: row for row in TABLE}

_SIZE = re.compile(r"^([0-9]+)\s*(B|KB|MB|GB|KIB|MIB|GIB|K|M|G)?$", re.IGNORECASE)
_SIZE_UNITS: Final = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "m": MIB,
    "mib": MIB,
    "g": GIB,
    "gib": GIB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
}
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


def format_size(value: int) -> str:
    """`67108864` -> `64MiB`: the largest binary unit that divides the value."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


def parse_value(row: Setting, raw: object, *, source: str) -> str | int | bool:
    """Turn what a person wrote into the setting's type; `source` names the place for the error."""
    if row.kind is Kind.FLAG:
        return _parse_flag(row, raw, source)
    if row.kind in (Kind.INTEGER, Kind.SIZE, Kind.MILLISECONDS):
        return _parse_number(row, raw, source)
    if row.kind in (Kind.PLACES, Kind.ORIGINS):
        return _parse_list(row, raw, source)
    if not isinstance(raw, str):
        raise _bad(row, raw, source, "expected a text")
    if row.kind is Kind.CHOICE and raw not in row.choices:
        raise _bad(row, raw, source, "expected one of " + ", ".join(row.choices))
    if raw == "" and row.default != "":
        raise _bad(row, raw, source, "must not be empty")
    if "\0" in raw:
        raise _bad(row, raw, source, "must not contain a NUL character")
    return raw


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    config: str | None = None,
) -> Settings:
    """Resolve all settings.

    `flags` holds what was given on the command line (`None` values count as absent). `config` names
    the file; without it `MILLSTREAM_CONFIG`, else `millstream.toml` in the current directory if it
    exists. A file that was named must exist.
    """
    environment = os.environ if environment is None else environment
    named = config or environment.get(ENVIRONMENT_PREFIX + "CONFIG") or None
    values: dict[str, str | int | bool] = {}
    path = named or CONFIG_FILE_NAME
    if named or os.path.isfile(path):
        values.update(read_config_file(path))
    for row in TABLE:
        raw = environment.get(row.environment)
        if raw is not None:
            values[row.name] = parse_value(row, raw, source=row.environment)
    for name, given in (flags or {}).items():
        if given is not None:
            row = BY_NAME[name]
            values[name] = parse_value(row, given, source=row.flag)
    settings = Settings(**values)  # type: ignore[arg-type]
    check_bind(settings)
    check_bodies(settings)
    return settings


def client_url(given: str | None, *, environment: Mapping[str, str] | None = None) -> str:
    """The server for client commands: `--url`, else MILLSTREAM_URL, else the file, else default."""
    environment = os.environ if environment is None else environment
    row = BY_NAME["url"]
    if given:
        return given
    named = environment.get(row.environment)
    if named:
        return named
    config = environment.get(ENVIRONMENT_PREFIX + "CONFIG") or CONFIG_FILE_NAME
    if os.path.isfile(config):
        return str(read_config_file(config).get(row.name, row.default))
    return str(row.default)


def read_config_file(path: str) -> dict[str, str | int | bool]:
    """Read one TOML file; every key must be in the table."""
    import tomllib

    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise SettingsError(
            f"cannot read settings file `{path}`: {error.strerror or error}",
            hint="name an existing file with `--config`, or leave it out",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"settings file `{path}` is not valid TOML: {error}",
            hint="write one `name = value` per line; texts are in double quotes",
        ) from error
    values: dict[str, str | int | bool] = {}
    for key, raw in document.items():
        row = BY_NAME.get(key)
        if row is None:
            raise SettingsError(f"unknown setting `{key}` in `{path}`", hint=_suggestion(key))
        values[key] = parse_value(row, raw, source=f"`{key}` in `{path}`")
    return values


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    import ipaddress

    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(settings: Settings) -> None:
    """Refuse to open an unauthenticated server to the network by accident (I-SET-4)."""
    if settings.insecure or is_loopback(settings.host):
        return
    raise SettingsError(
        f"refusing to listen on `{settings.host}`: there is no authentication, "
        "anyone who reaches the port can read and write every stream",
        hint="listen on 127.0.0.1, or add `--insecure` if the network is trusted",
    )


def check_bodies(settings: Settings) -> None:
    """Refuse a bound under which the largest append that is allowed would always be turned away."""
    arriving, append = settings.inflight_bytes_max, settings.append_max_bytes
    if arriving >= append:
        return
    raise SettingsError(
        f"`inflight_bytes_max` is {format_size(arriving)}: an append of {format_size(append)}, which "
        "`append_max_bytes` allows, could never arrive",
        hint="raise `inflight_bytes_max`, or lower `append_max_bytes`",
    )


def _suggestion(key: str) -> str:
    import difflib

    close = difflib.get_close_matches(key.replace("-", "_").lower(), BY_NAME, n=1, cutoff=0.5)
    if close:
        return f"did you mean `{close[0]}`?"
    return "known settings are listed by `millstream serve --help`"


def _parse_flag(row: Setting, raw: object, source: str) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE:
        return True
    if isinstance(raw, str) and raw.lower() in _FALSE:
        return False
    raise _bad(row, raw, source, "expected true or false")


def _parse_list(row: Setting, raw: object, source: str) -> str:
    """A text with commas, or in a file a list of texts; kept as a text in normal form."""
    from millstream import allowlists

    if isinstance(raw, list) and all(isinstance(entry, str) for entry in raw):
        raw = ",".join(raw)
    if not isinstance(raw, str):
        raise _bad(row, raw, source, "expected texts, separated by commas")
    try:
        if row.kind is Kind.ORIGINS:
            return ",".join(allowlists.origins(raw))
        allowlists.places(raw)
    except ValueError as error:
        raise _bad(row, raw, source, str(error)) from error
    return raw


def _parse_number(row: Setting, raw: object, source: str) -> int:
    if isinstance(raw, bool):
        raise _bad(row, raw, source, "expected a number")
    if isinstance(raw, int):
        value = raw
    elif isinstance(raw, str) and row.kind is Kind.SIZE:
        match = _SIZE.match(raw.strip())
        if match is None or len(match[1]) > 18:
            raise _bad(row, raw, source, "expected a size such as 4MiB")
        value = int(match[1]) * _SIZE_UNITS[(match[2] or "").lower()]
    elif isinstance(raw, str) and re.fullmatch(r"[0-9]{1,18}", raw.strip()):
        value = int(raw)
    else:
        raise _bad(row, raw, source, "expected a whole number")
    if row.minimum is not None and value < row.minimum:
        raise _bad(row, raw, source, f"must be at least {_number_text(row, row.minimum)}")
    if row.maximum is not None and value > row.maximum:
        raise _bad(row, raw, source, f"must be at most {_number_text(row, row.maximum)}")
    return value


def _number_text(row: Setting, value: int) -> str:
    return format_size(value) if row.kind is Kind.SIZE else str(value)


def _bad(row: Setting, raw: object, source: str, reason: str) -> SettingsError:
    return SettingsError(
        f"bad value `{raw}` for {source}: {reason}", hint=f"{row.name}: {row.help}"
    )
