"""The private socket: for one user, of bounded length, taken over after a kill."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.server.private_socket import PATH_BYTES_MAX, private_socket


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for temporary files with a short name."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def test_it_listens_for_this_user_alone_and_leaves_nothing(place: Path) -> None:
    with private_socket("data") as (path, _):
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    assert list(place.iterdir()) == []


def test_what_a_killed_server_left_is_taken_over(place: Path) -> None:
    with private_socket("data") as (path, _):
        directory = Path(path).parent
    directory.mkdir(mode=0o700)
    (directory / "control.sock").touch()
    with private_socket("data") as (again, _):
        assert again == path
    with private_socket("other") as (other, _):
        assert other != path


@pytest.mark.parametrize("kind", ["open directory", "link"])
def test_a_directory_that_others_can_enter_is_avoided(place: Path, kind: str) -> None:
    with private_socket("data") as (path, _):
        directory = Path(path).parent
    if kind == "link":
        (place / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(place / "elsewhere")
    else:
        directory.mkdir()
        directory.chmod(0o777)
    with private_socket("data") as (again, _):
        assert Path(again).parent != directory
        assert Path(again).parent.stat().st_mode & 0o777 == 0o700


def test_a_long_temporary_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_socket(str(tmp_path)) as (path, _):
        assert len(path) <= PATH_BYTES_MAX
