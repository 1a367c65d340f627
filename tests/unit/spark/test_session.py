"""Sessions that cannot begin: one clear error, and soon."""

from __future__ import annotations

import socket

import pytest

from millstream.errors import ConnectionFailed, InvalidArgument
from millstream.spark.session import build_session


def test_nobody_listens_at_the_address_of_a_connect_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        port = taken.getsockname()[1]
        with pytest.raises(
            ConnectionFailed, match=f"no Spark Connect server .* 127.0.0.1:{port}"
        ) as seen:
            build_session("nobody", remote=f"sc://127.0.0.1:{port}")
    assert "start-connect-server" in str(seen.value.hint)


@pytest.mark.parametrize(
    "remote", ["127.0.0.1:15002", "spark://host:7077", "sc://", "sc://host:port"]
)
def test_no_address_of_a_connect_server(remote: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is not (the|an) address"):
        build_session("nowhere", remote=remote)
