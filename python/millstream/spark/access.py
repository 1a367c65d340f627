"""How driver and executors reach the server: address, patience and where the token is.

Where it sits: made once from the options on the driver, travels in readers, writers and partitions;
`connect` is called where the work is done.

Invariants:
- I-ACC-1  It holds the name of a token's variable or file, never the token.
- I-ACC-2  MILLSTREAM_URL counts on the driver only, so that all executors use the same server.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.client.reach import reach
from millstream.client.sync.client import Client
from millstream.client.wire import TOKEN_CHARACTERS_MAX, check_token, default_url, parse_url
from millstream.errors import ConnectionFailed, InvalidArgument, OptionInvalid

if TYPE_CHECKING:
    from millstream.spark.options import Options


@dataclass(frozen=True, slots=True)
class Access:
    url: str
    token_env: str
    token_file: str
    patience_ms: int
    """For a server that was there before."""
    first_patience_ms: int
    """For the first contact of a query."""

    def connect_first(self) -> Client:
        """A client whose server has answered. Where a query begins: a wrong address is told soon."""
        client = self.connect()
        try:
            self.reach(client)
        except BaseException:
            client.close()
            raise
        return client

    def reach(self, client: Client) -> None:
        seconds = min(self.first_patience_ms, self.patience_ms) / 1000
        try:
            reach(client, seconds)
        except ConnectionFailed as error:
            raise error.reworded(
                hint=f"is the server running, and is the option `url` right? It was tried for "
                f"{seconds:g} s (option `connectTimeout`)"
            ) from None

    def connect(self) -> Client:
        """A client with the token as it is now on this machine."""
        return Client(self.url, token=self.token())

    @property
    def patience_seconds(self) -> float:
        return self.patience_ms / 1000

    def token(self) -> str:
        if self.token_env:
            value = os.environ.get(self.token_env, "").strip()
            if not value:
                raise OptionInvalid(
                    f"the environment variable `{self.token_env}` (option `tokenEnv`) is not set here",
                    hint="set it for the driver, and for executors with "
                    f"`spark.executorEnv.{self.token_env}`; or use `tokenFile`",
                )
            return _checked(value, f"the environment variable `{self.token_env}`")
        if self.token_file:
            try:
                data = Path(self.token_file).read_bytes()[: TOKEN_CHARACTERS_MAX + 1]
            except OSError as error:
                raise OptionInvalid(
                    f"the file `{self.token_file}` (option `tokenFile`) cannot be read here: "
                    f"{error.strerror}",
                    hint="it must be there on the driver and on every executor",
                ) from None
            return _checked(data.decode("utf-8", "replace").strip(), f"`{self.token_file}`")
        return ""


def _checked(value: str, where: str) -> str:
    try:
        return check_token(value, where)
    except InvalidArgument as error:
        raise OptionInvalid(error.message, hint=error.hint) from None


def access(options: Options) -> Access:
    url = options.text("url") or default_url()
    try:
        parse_url(url)
    except InvalidArgument as error:
        raise OptionInvalid(
            f"option `url`: {error.message}", hint="write it like http://127.0.0.1:4437"
        ) from None
    if options.given("tokenEnv") and options.given("tokenFile"):
        raise OptionInvalid("both `tokenEnv` and `tokenFile` are given", hint="give one of them")
    return Access(
        url=url,
        token_env=options.text("tokenEnv"),
        token_file=options.text("tokenFile"),
        patience_ms=options.required_number("readTimeout"),
        first_patience_ms=options.required_number("connectTimeout"),
    )
