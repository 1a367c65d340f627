"""One clear text for whatever goes wrong: `code: sentence. Hint: what to do.`

Where it sits: around every method that Spark calls (`clear`). Spark shows the text of an exception
that left a Python worker, in classic and Connect sessions alike, and nothing else of it; so code and
hint have to be in the text.

Invariants:
- I-SER-1  Errors of Millstream leave as `ConnectorError`, without the frames that led to them.
- I-SER-2  Anything else is a defect and keeps its traceback.
- I-SER-3  No text holds a token: tokens are in no option and in no message of the client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import ParamSpec, TypeVar

from millstream.errors import MillstreamError

P = ParamSpec("P")
T = TypeVar("T")


class ConnectorError(Exception):
    """What a Spark user sees: code, one sentence, a hint."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(text(code, message, hint))
        self.code = code
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[ConnectorError], tuple[str, str, str | None]]:
        return ConnectorError, (self.code, self.message, self.hint)


def text(code: str, message: str, hint: str | None) -> str:
    sentence = message.strip().rstrip(".")
    return f"{code}: {sentence}." + (f" Hint: {hint.strip().rstrip('.')}." if hint else "")


def connector_error(error: MillstreamError) -> ConnectorError:
    return ConnectorError(error.code, error.message, error.hint)


def clear(function: Callable[P, T]) -> Callable[P, T]:
    """A method for Spark: errors of Millstream leave it with code and hint in their text."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except MillstreamError as error:
            raise connector_error(error) from None

    return wrapped


def clear_iteration(values: Iterator[T]) -> Generator[T, None, None]:
    """The same for what is computed while Spark iterates."""
    try:
        yield from values
    except MillstreamError as error:
        raise connector_error(error) from None
