"""The settings table: precedence, parsing, refusals, and that it is the only place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream import settings as module
from millstream.errors import SettingsError
from millstream.settings import (
    BY_NAME,
    TABLE,
    Kind,
    Settings,
    client_url,
    format_size,
    is_loopback,
    load_settings,
    parse_value,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, so that no stray file is read."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(flags: dict[str, object] | None = None, config: str | None = None, **env: str) -> Settings:
    return load_settings(flags, environment=env, config=config)


def test_defaults_are_what_the_interfaces_fix() -> None:
    values = load()
    assert (values.host, values.port, values.data_dir) == ("127.0.0.1", 4437, "./millstream-data")
    assert (values.durability, values.long_poll_timeout_ms) == ("fsync", 30_000)
    assert values.read_window_bytes == 4 * 1024 * 1024


def test_flag_beats_environment_beats_file_beats_default(elsewhere: Path) -> None:
    (elsewhere / "millstream.toml").write_text('port = 1\nhost = "::1"\nreactors = 3\n')
    values = load({"port": "3", "host": None}, MILLSTREAM_PORT="2", MILLSTREAM_HOST="127.0.0.2")
    assert (values.port, values.host, values.reactors) == (3, "127.0.0.2", 3)
    assert load(MILLSTREAM_PORT="2").port == 2
    assert load().port == 1


def test_a_named_file_is_used_instead_and_must_exist(elsewhere: Path) -> None:
    (elsewhere / "millstream.toml").write_text("port = 1\n")
    (elsewhere / "other.toml").write_text('append_max_bytes = "32MiB"\ninsecure = true\n')
    values = load(config="other.toml")
    assert (values.port, values.append_max_bytes, values.insecure) == (4437, 32 << 20, True)
    assert load(MILLSTREAM_CONFIG="other.toml").append_max_bytes == 32 << 20
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        load(config="missing.toml")


def test_an_unknown_key_is_refused_with_a_suggestion(elsewhere: Path) -> None:
    (elsewhere / "millstream.toml").write_text("long_pol_timeout_ms = 5\n")
    with pytest.raises(SettingsError) as caught:
        load()
    assert "long_pol_timeout_ms" in str(caught.value)
    assert caught.value.hint == "did you mean `long_poll_timeout_ms`?"


def test_a_file_that_is_no_toml_is_refused(elsewhere: Path) -> None:
    (elsewhere / "millstream.toml").write_text("port: 5\n")
    with pytest.raises(SettingsError, match="TOML"):
        load()


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("read_window_bytes", "8MiB", 8 << 20),
        ("read_window_bytes", "8 mib", 8 << 20),
        ("read_window_bytes", "64k", 65536),
        ("read_window_bytes", "5MB", 5_000_000),
        ("read_window_bytes", 4096, 4096),
        ("port", "0", 0),
        ("insecure", "yes", True),
        ("insecure", "0", False),
        ("insecure", False, False),
        ("public_url", "", ""),
        ("webhook_allow", "", ""),
        ("webhook_allow", "127.0.0.1, 10.0.0.0/8:80", "127.0.0.1, 10.0.0.0/8:80"),
        ("webhook_allow", ["[::1]:9000", "hooks.internal"], "[::1]:9000,hooks.internal"),
        (
            "subscription_origins",
            " HTTPS://App.example:443,http://[::1]:3000 ",
            "https://app.example,http://[::1]:3000",
        ),
        ("durability", "memory", "memory"),
    ],
)
def test_values_are_read_as_people_write_them(name: str, raw: Any, value: Any) -> None:
    assert parse_value(BY_NAME[name], raw, source="here") == value


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "1.5"),
        ("port", 1.5),
        ("port", True),
        ("port", ""),
        ("port", "٣"),
        ("port", "9" * 30),
        ("read_window_bytes", "1"),
        ("read_window_bytes", "4 parsecs"),
        ("read_window_bytes", "9" * 30 + "GiB"),
        ("long_poll_timeout_ms", "0"),
        ("insecure", "perhaps"),
        ("insecure", 1),
        ("durability", "paper"),
        ("data_dir", ""),
        ("data_dir", "a\0b"),
        ("host", 5),
        ("webhook_allow", 5),
        ("webhook_allow", ["127.0.0.1", 5]),
        ("webhook_allow", "127.0.0.1/8"),
        ("webhook_allow", "127.0.0.1:0"),
        ("webhook_allow", "127.0.0.1:65536"),
        ("webhook_allow", "127.0.0.1:"),
        ("webhook_allow", "127.1"),
        ("webhook_allow", "0.0.0.0"),
        ("webhook_allow", "224.0.0.0/4"),
        ("webhook_allow", "[hooks.internal]:80"),
        ("webhook_allow", "http://127.0.0.1/"),
        ("webhook_allow", "*.internal"),
        ("subscription_origins", "*"),
        ("subscription_origins", "app.example"),
        ("subscription_origins", "https://app.example/"),
        ("subscription_origins", "https://app.example:99999"),
        ("subscription_origins", "null"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, raw: Any) -> None:
    with pytest.raises(SettingsError, match="in the test"):
        parse_value(BY_NAME[name], raw, source="in the test")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.test", "127.0.0.1.evil"])
def test_an_open_address_needs_to_be_asked_for(host: str) -> None:
    with pytest.raises(SettingsError, match="refusing to listen") as caught:
        load({"host": host})
    assert "--insecure" in (caught.value.hint or "")
    assert load({"host": host, "insecure": True}).host == host


@pytest.mark.parametrize(
    "given",
    [
        {"inflight_bytes_max": "15MiB"},
        {"append_max_bytes": "257MiB"},
        {"append_max_bytes": "1GiB", "inflight_bytes_max": "1023MiB"},
    ],
)
def test_the_largest_append_must_fit_into_what_may_arrive(given: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="`inflight_bytes_max`") as caught:
        load(given)
    assert "append_max_bytes" in (caught.value.hint or "")
    alike = load({"append_max_bytes": "1GiB", "inflight_bytes_max": "1GiB"})
    assert alike.append_max_bytes == alike.inflight_bytes_max


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST"]
)
def test_loopback_is_recognised(host: str) -> None:
    assert is_loopback(host)


def test_every_default_passes_its_own_rules() -> None:
    for row in TABLE:
        assert parse_value(row, row.default, source="default") == row.default
        if row.kind is Kind.SIZE:
            assert parse_value(row, row.default_text, source="default") == row.default
        assert row.help
        assert row.help[0].islower() or row.help.startswith("URL"), row.name
        assert not row.help.endswith(".")


def test_the_engine_gets_exactly_its_keys() -> None:
    values = Settings().engine_settings()
    assert values["listen"] is True
    assert "public_url" not in values
    assert "url" not in values
    assert set(values) == {"listen"} | {row.name for row in TABLE if row.engine} - {"public_url"}
    assert Settings(public_url="http://x").engine_settings()["public_url"] == "http://x"


def test_sizes_are_written_short() -> None:
    assert [format_size(n) for n in (0, 5, 1024, 4 << 20, 3 << 30, 1500)] == [
        "0",
        "5",
        "1KiB",
        "4MiB",
        "3GiB",
        "1500",
    ]


def test_the_client_finds_its_server(elsewhere: Path) -> None:
    assert client_url(None, environment={}) == module.DEFAULT_URL
    (elsewhere / "millstream.toml").write_text('url = "http://file"\nport = 1\n')
    assert client_url(None, environment={}) == "http://file"
    assert client_url(None, environment={"MILLSTREAM_URL": "http://env"}) == "http://env"
    assert client_url("http://flag", environment={"MILLSTREAM_URL": "http://env"}) == "http://flag"
