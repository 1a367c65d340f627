"""What the engine reports on, kept in step with what subscriptions follow.

Sits between `manager` and the engine. Only what changed is handed over, some thousands at a time. Invariants: a name or
pattern is watched before a subscription with it looks at its streams, and at least until that one is gone; one that
nobody follows any more is let go at the next change.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from millstream.control.limits import WATCH_BATCH_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from millstream._engine import Engine
    from millstream.control.subscriptions.state import State

Run: TypeAlias = "Callable[[Callable[[], None]], Awaitable[None]]"


class Watching:
    """`run` carries out what may take long, off the loop."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self._engine = engine
        self._run = run
        self._turn = asyncio.Lock()
        # Watched for a subscription that is being made.
        self._ahead_names: set[str] = set()
        self._ahead_patterns: set[str] = set()

    async def begin(self, names: Iterable[str], pattern: str | None = None) -> None:
        """Watches what a subscription that is being made, or gets streams, is about to follow."""
        self._ahead_names.update(names)
        if pattern is not None:
            self._ahead_patterns.add(pattern)
        new_names, new_patterns = list(self._ahead_names), list(self._ahead_patterns)
        async with self._turn:
            await self._run(lambda: self._change(self._engine.watch, new_names, new_patterns))

    def end(self, state: State) -> None:
        """The change that began is over, in whichever way: what is followed counts again."""
        state.touched_names |= self._ahead_names
        state.touched_patterns |= self._ahead_patterns
        self._ahead_names, self._ahead_patterns = set(), set()

    async def follow(self, state: State) -> None:
        """Watches what is followed now and was not before, and lets go what is not any more."""
        async with self._turn:
            names, state.touched_names = state.touched_names, set()
            patterns, state.touched_patterns = state.touched_patterns, set()
            if not names and not patterns:
                return
            kept_names = {name for name in names if state.is_named(name)}
            kept_patterns = patterns & state.patterns.keys()
            gone_names = list(names - kept_names - self._ahead_names)
            gone_patterns = list(patterns - kept_patterns - self._ahead_patterns)

            def change() -> None:
                self._change(self._engine.watch, list(kept_names), list(kept_patterns))
                self._change(self._engine.unwatch, gone_names, gone_patterns)

            try:
                await self._run(change)
            except BaseException:
                state.touched_names |= names
                state.touched_patterns |= patterns
                raise

    def _change(
        self,
        call: Callable[[list[str], list[str]], None],
        names: list[str],
        patterns: list[str],
    ) -> None:
        for batch in _batches(names):
            call(batch, [])
        for batch in _batches(patterns):
            call([], batch)


def _batches(items: list[str]) -> Iterator[list[str]]:
    iterator = iter(items)
    while batch := list(islice(iterator, WATCH_BATCH_MAX)):
        yield batch
