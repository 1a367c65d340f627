"""One line of the doctor's report, and the guard that turns a check's accident into one.

Where it sits: under every check of this package. Plain data.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class State(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; `remedy` is there unless all is well."""

    check: str
    state: State
    message: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert (self.state is State.OK) == (self.remedy is None), f"{self.check}: remedy or not?"

    def document(self) -> dict[str, str | None]:
        return asdict(self)


def ok(check: str, message: str) -> Finding:
    return Finding(check, State.OK, message)


def warn(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, State.WARN, message, remedy)


def fail(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, State.FAIL, message, remedy)


def guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an exception in it is one more (I-DOC-1)."""
    try:
        yield from check()
    except MillstreamError as error:
        yield fail(name, error.message, error.hint or f"see the code `{error.code}` in the docs")
    except Exception as error:  # noqa: BLE001 - whatever it was, the other checks go on
        yield fail(
            name,
            f"could not be checked: {type(error).__name__}: {error}",
            "report this as a defect of `millstream doctor`, with this line",
        )
